"""Prefill chunks: how many prompt tokens to read in one forward pass.

Other streams and a cancellation wait for a pass to end, so it should be short; but a pass of few tokens may cost more
per token. Which sizes are cheap depends on the device, and is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from protocol.pass_price import MAX_SURPRISE
from protocol.prices import Mean

# The sizes that are tried, in tokens: each is 1.33 or 1.5 times the one before it.
SIZES = tuple(sorted([16 << k for k in range(8)] + [24 << k for k in range(7)]))
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = SIZES[0], SIZES[-1]
# The longest that a pass should take: so many seconds, or so many passes of one token where these take long.
MAX_PASS_S, MAX_DECODING_PASSES = 0.2, 4
CHEAP_FACTOR = 1.1  # a size is cheap if it costs at most this many times as much per token as the cheapest that fits
RETRY_PASSES = 16  # passes after which sizes above the present one are tried again
PRIOR_TOKENS = 64  # before anything was measured, the price per token is that expected of a pass over this many tokens
MAX_RATIO = math.sqrt(2)  # a pass counts for a size if it has at most this many times as many tokens, or as few
MAX_PADDING = 0.25  # the largest part of a pass over several prompts that may be padding
FIXED_CHUNK_TOKENS = 2048  # the size if the text depends on how the prompt is cut into passes: mlx-lm's


@attrs.define
class PrefillChunkSize:
    """The size of the next pass: the largest that was measured to be cheap and to take no longer than a pass should.

    The first pass is the smallest, or up to as large as an expected price was measured for. The one after it may be
    much larger; then the next larger size is tried as long as it would fit at the present price per token, which is
    mostly too high: in short passes, most of the time is that of reading the weights.
    """

    _expected_s: Callable[[float], float] = lambda num_tokens: 0.0  # 0 where it is not known
    _seconds_per_token: dict[int, Mean] = attrs.field(factory=dict, init=False)  # by size
    _num_passes: int = attrs.field(default=0, init=False)
    # Whether the next measurement says nothing: that pass waits for another one, which was launched before it.
    leaves_out_next: bool = attrs.field(default=False, init=False)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add the measurement of a pass: it counts for the nearest size, if that is one of those that are tried."""
        if self.leaves_out_next:
            self.leaves_out_next = False
            return
        size = min(SIZES, key=lambda size: abs(math.log(size / max(1, num_tokens))))
        if size / MAX_RATIO <= num_tokens <= size * MAX_RATIO:
            mean = self._seconds_per_token.setdefault(size, Mean(memory=8.0))
            known = mean.value if mean.is_known else self._expected_s(PRIOR_TOKENS) / PRIOR_TOKENS
            price = seconds / num_tokens
            mean.observe(min(price, MAX_SURPRISE * known) if known > 0.0 else price)
            self._num_passes += 1
            if self._num_passes % RETRY_PASSES == 0:
                # A larger size may have been slow only once, because the machine did something else.
                for larger in [other for other in self._seconds_per_token if other > size]:
                    del self._seconds_per_token[larger]

    def __call__(self) -> int:
        return self._next()[0]

    def of(self, num_tokens: int) -> int:
        """Tokens for the next pass over a text with `num_tokens` left to read; a small remainder gets no own pass."""
        return num_tokens if num_tokens <= self.most_tokens else self()

    @property
    def most_tokens(self) -> int:
        """Most tokens of a pass that saves another pass: `MAX_RATIO` times the size, if they fit the time."""
        size, price = self._next()
        return max(size, int(min(MAX_RATIO * size, self._max_pass_s / price if price > 0.0 else 0.0)))

    def may_go_on(self, num_read: int, seconds: float, num_more: int) -> bool:
        """Whether a turn that has read `num_read` >= 1 tokens may read more, at the pace so far or a pass's least."""
        more_s = max(seconds * num_more / num_read, self._expected_s(1))
        return num_read + num_more <= self.most_tokens and seconds + more_s <= self._max_pass_s

    @property
    def _max_pass_s(self) -> float:
        return max(MAX_PASS_S, MAX_DECODING_PASSES * self._expected_s(1))

    def _next(self) -> tuple[int, float]:
        """Tokens for the next pass, and the seconds that each is expected to take; 0 if that is not known."""
        prices = {size: mean.value for size, mean in self._seconds_per_token.items()}
        if not prices:
            price = self._expected_s(PRIOR_TOKENS) / PRIOR_TOKENS
            return min(self._jump(MIN_CHUNK_TOKENS, price), PRIOR_TOKENS), price
        fitting = {size: price for size, price in prices.items() if size * price <= self._max_pass_s}
        if not fitting:  # every pass is long; take the shortest
            shortest = min(prices, key=lambda size: size * prices[size])
            return shortest, prices[shortest]
        max_price = CHEAP_FACTOR * min(fitting.values())
        best = max(size for size, price in fitting.items() if price <= max_price)
        larger = SIZES[min(SIZES.index(best) + 1, len(SIZES) - 1)]
        if larger in prices or larger * prices[best] > self._max_pass_s:
            return best, prices[best]
        return self._jump(larger, prices[best]) if self._num_passes == 1 else larger, prices[best]

    def _jump(self, size: int, price: float) -> int:
        """The largest size, from `size` on, that should take at most half of the time that a pass may take."""
        return max([size, *(other for other in SIZES if price > 0.0 and other * price <= self._max_pass_s / 2)])


def read_together(lengths: Sequence[int], max_tokens: int, max_width: int) -> list[int]:
    """Which prompts of these lengths >= 1 to read whole in one pass: the first, and others like it; ascending.

    A pass has at most `max_tokens`, padding included, and the longest of several prompts `max_width`; a longer first
    one has the pass to itself.
    """
    chosen, longest, total = [0], lengths[0], lengths[0]
    if longest > max_width:
        return chosen
    for index in sorted(range(1, len(lengths)), key=lambda index: (abs(lengths[index] - lengths[0]), index)):
        width, number = max(longest, lengths[index]), len(chosen) + 1
        is_padded_little = total + lengths[index] >= (1.0 - MAX_PADDING) * number * width
        if is_padded_little and number * width <= max_tokens and width <= max_width:
            chosen.append(index)
            longest, total = width, total + lengths[index]
    return sorted(chosen)
