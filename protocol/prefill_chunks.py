"""How many prompt tokens to read in one forward pass.

Other streams wait for a pass, and a cancellation takes effect after it. So a pass should be short; but a pass of few
tokens may cost more per token. What is cheap depends on the device, and is measured.
"""

from __future__ import annotations

import attrs

from protocol.prices import Mean

# Sizes that are tried, in tokens: powers of two between these.
SMALLEST, LARGEST = 16, 2048
# Seconds that a pass should take at most.
MAX_PASS_S = 0.2
# A size is as cheap as the cheapest if it costs no more than this factor above it, per token.
AS_CHEAP = 1.1
# Passes after which larger sizes than the present one are tried anew.
RETRY_PASSES = 16
# Where the text depends on how it is cut into passes, it is cut as mlx-lm cuts it.
FIXED_SIZE = 2048


@attrs.define
class PrefillChunkSize:
    """The size of the next pass, by what passes have cost so far: as large as is cheap, and MAX_PASS_S at most.

    It begins with the smallest size, and doubles it as long as twice as many tokens promise to fit into the time.
    """

    _seconds_per_token: dict[int, Mean] = attrs.field(factory=dict, init=False)  # by size
    _num_passes: int = attrs.field(default=0, init=False)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take note of a pass. One of a size that is not tried, such as the end of a prompt, says little."""
        if SMALLEST <= num_tokens <= LARGEST and num_tokens & (num_tokens - 1) == 0:
            self._seconds_per_token.setdefault(num_tokens, Mean(memory=8.0)).observe(seconds / num_tokens)
            self._num_passes += 1
            if self._num_passes % RETRY_PASSES == 0:
                # A larger size may have been slow but once, for something else that the machine did.
                for size in [size for size in self._seconds_per_token if size > num_tokens]:
                    del self._seconds_per_token[size]

    def __call__(self) -> int:
        """Tokens for the next pass."""
        prices = {size: mean.value for size, mean in self._seconds_per_token.items()}
        if not prices:
            return SMALLEST
        cheap = AS_CHEAP * min(prices.values())
        largest = max(prices)
        if largest < LARGEST and prices[largest] <= cheap and 2 * largest * prices[largest] <= MAX_PASS_S:
            return 2 * largest
        fitting = [size for size, price in prices.items() if price <= cheap and size * price <= MAX_PASS_S]
        # Where nothing fits, a pass takes long whatever its size is; the shortest of them then.
        return max(fitting) if fitting else min(prices, key=lambda size: size * prices[size])
