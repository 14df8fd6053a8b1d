"""Prefill chunks: how many prompt tokens to read in one forward pass.

Other streams wait for a pass to end, and so does a cancellation. So a pass should be short; but a pass of few tokens
may cost more per token. Which sizes are cheap depends on the device, and is measured.
"""

from __future__ import annotations

import attrs

from protocol.prices import Mean

# The sizes that are tried, in tokens: powers of two between these.
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 16, 2048
# The longest that a pass should take.
MAX_PASS_S = 0.2
# A size counts as cheap if it costs at most this many times as much per token as the cheapest size.
CHEAP_FACTOR = 1.1
# Passes after which sizes above the present one are tried again.
RETRY_PASSES = 16
# The size where the text depends on how the prompt is cut into passes: that of mlx-lm.
FIXED_CHUNK_TOKENS = 2048


@attrs.define
class PrefillChunkSize:
    """The size of the next pass: the largest that was measured to be cheap and to take at most MAX_PASS_S.

    It begins with the smallest size, and doubles it as long as twice as many tokens should fit into that time.
    """

    _seconds_per_token: dict[int, Mean] = attrs.field(factory=dict, init=False)  # by size
    _num_passes: int = attrs.field(default=0, init=False)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add the measurement of a pass. One of another size, such as the end of a prompt, is ignored."""
        if MIN_CHUNK_TOKENS <= num_tokens <= MAX_CHUNK_TOKENS and num_tokens & (num_tokens - 1) == 0:
            self._seconds_per_token.setdefault(num_tokens, Mean(memory=8.0)).observe(seconds / num_tokens)
            self._num_passes += 1
            if self._num_passes % RETRY_PASSES == 0:
                # A larger size may have been slow only once, because the machine did something else.
                for size in [size for size in self._seconds_per_token if size > num_tokens]:
                    del self._seconds_per_token[size]

    def __call__(self) -> int:
        """Tokens for the next pass."""
        prices = {size: mean.value for size, mean in self._seconds_per_token.items()}
        if not prices:
            return MIN_CHUNK_TOKENS
        max_price = CHEAP_FACTOR * min(prices.values())
        largest = max(prices)
        if largest < MAX_CHUNK_TOKENS and prices[largest] <= max_price and 2 * largest * prices[largest] <= MAX_PASS_S:
            return 2 * largest
        fitting = [size for size, price in prices.items() if price <= max_price and size * price <= MAX_PASS_S]
        # If no size fits, every pass is long; take the shortest.
        return max(fitting) if fitting else min(prices, key=lambda size: size * prices[size])
