"""Prefill chunks: how many prompt tokens to read in one forward pass.

Other streams wait for a pass to end, and so does a cancellation. So a pass should be short; but a pass of few tokens
may cost more per token. Which sizes are cheap depends on the device, and is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
# A pass counts as one of a size if its tokens differ from it by at most this part.
SIZE_TOLERANCE = 0.15
# The largest part of a pass over several prompts that may be padding.
MAX_PADDING = 0.25
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
        """Add the measurement of a pass. One that is not about of a size, such as the end of a prompt, is ignored."""
        size = 1 << max(0, round(math.log2(max(1, num_tokens))))
        if MIN_CHUNK_TOKENS <= size <= MAX_CHUNK_TOKENS and abs(num_tokens - size) <= SIZE_TOLERANCE * size:
            self._seconds_per_token.setdefault(size, Mean(memory=8.0)).observe(seconds / num_tokens)
            self._num_passes += 1
            if self._num_passes % RETRY_PASSES == 0:
                # A larger size may have been slow only once, because the machine did something else.
                for larger in [other for other in self._seconds_per_token if other > size]:
                    del self._seconds_per_token[larger]

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


def read_together(lengths: Sequence[int], size: int, max_width: int) -> list[int]:
    """Which prompts to read in one pass, each whole: the first, and others of like length.

    Every prompt of a pass takes as many rows as the longest.

    Args:
        lengths: tokens to read of each prompt, >= 1, in the order in which they came.
        size: tokens of a pass; a first prompt that is longer has the pass for itself.
        max_width: longest prompt of a pass that several share.

    Returns: their indices, ascending.
    """
    chosen, longest, total = [0], lengths[0], lengths[0]
    if longest > max_width:
        return chosen
    for index in sorted(range(1, len(lengths)), key=lambda index: (abs(lengths[index] - lengths[0]), index)):
        width, number = max(longest, lengths[index]), len(chosen) + 1
        is_padded_little = total + lengths[index] >= (1.0 - MAX_PADDING) * number * width
        if is_padded_little and number * width <= size and width <= max_width:
            chosen.append(index)
            longest, total = width, total + lengths[index]
    return sorted(chosen)
