"""Times of forward passes of one model, by the number of their tokens. To be called on the model's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import CachedSequence, RewindMode
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.feature_input import FeatureInput
from protocol.pass_price import PassPrice
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Spread, spread

WIDTHS = (1, 2, 3, 5, 9)
REPEATS = 7
CONTEXT_TOKENS = 64  # tokens in the cache when a pass is timed
MAX_WIDTH = 64


@attrs.frozen
class Passes:
    """Measured forward passes.

    Attributes:
        times: in seconds, by width in tokens.
    """

    times: Mapping[int, Spread]

    @property
    def seconds(self) -> dict[int, float]:
        """The median times."""
        return {width: times.median for width, times in self.times.items() if times.median is not None}

    @property
    def price(self) -> PassPrice:
        """The price of a pass by its width: of the medians, so that one slow pass has no influence."""
        price = PassPrice()
        for width, seconds in self.seconds.items():
            price.observe(width, 0.0, seconds)
        return price

    def rows(self, symbol: str, named: Callable[[int], str]) -> list[tuple[str, str]]:
        """Rows (name, times) of a report; `named` gives the name of a width."""
        return [
            (named(width), f"{symbol}({width}) = {seconds * 1e3:,.2f} ms ({low * 1e3:,.2f}–{high * 1e3:,.2f})")
            for width, times in self.times.items()
            for seconds, low, high in [(times.median or 0.0, times.low or 0.0, times.high or 0.0)]
        ]


def time_passes(
    model: MLXModel | TrainedDrafter,
    widths: Sequence[int] = WIDTHS,
    *,
    repeats: int = REPEATS,
    num_context: int = CONTEXT_TOKENS,
) -> Passes:
    """Time forward passes of several widths over the same text, in turn.

    Args:
        model: the model.
        widths: numbers of tokens, each in [1, 64].
        repeats: passes of each width, >= 1.
        num_context: tokens in the cache when a pass is timed, >= 1.
    """
    sequence = _filled_sequence(model, num_context)
    contest: Contest[int, int, float] = Contest(widths, [num_context], repeats, warm_up=[num_context])
    for step in contest.steps():
        width = step.contender
        rewind_mode = sequence.prepare(width, num_context)
        began = time.perf_counter()
        mx.eval(sequence.feed((1,) * width, width))
        contest.record(step, time.perf_counter() - began)
        if rewind_mode is RewindMode.SINGLE:
            sequence = _filled_sequence(model, num_context)
        else:
            sequence.rewind(num_context)
    sequence.close()
    return Passes({width: spread(contest.runs(width).values()) for width in widths})


def _filled_sequence(model: MLXModel | TrainedDrafter, num_tokens: int) -> CachedSequence:
    sequence = model.open_sequence(beside_another=False)
    if isinstance(sequence, FeatureInput):
        sequence.give_nothing(num_tokens + MAX_WIDTH)
    sequence.feed(tuple(token % model.vocab_size for token in range(num_tokens)), 0)
    return sequence
