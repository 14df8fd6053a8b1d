"""Times of forward passes of one model, by the number of their tokens. To be called on the model's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import CachedSequence, Feed, RewindMode
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.feature_input import FeatureInput
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Spread, spread

WIDTHS = (1, 2, 3, 5, 9)
REPEATS = 7
CONTEXT_TOKENS = 64  # tokens in the cache when a pass is timed
MAX_WIDTH = 64
WITHIN_S = 30.0  # seconds after which no pass is repeated


@attrs.frozen
class Passes:
    """Measured forward passes."""

    times: Mapping[int, Spread]  # in seconds, by width in tokens, or in texts of one token each
    building: Mapping[int, Spread] = {}  # the part in which Python builds the graph of the pass, and holds the GIL

    @property
    def seconds(self) -> dict[int, float]:
        """The median times, on which one slow pass has no influence."""
        return {width: times.median for width, times in self.times.items() if times.median is not None}

    def python_row(self, num_layers: int) -> tuple[str, str]:
        """A row of a report: how long a pass over one token holds the GIL."""
        held_s = self.building[1].median or 0.0
        a_layer = f", {held_s / num_layers * 1e6:,.0f} µs a layer" if num_layers else ""
        return "Python's lock", f"held for {held_s * 1e3:,.2f} ms to build a pass{a_layer}"

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
    within_s: float = WITHIN_S,
) -> Passes:
    """Time forward passes of several widths, each in [1, 64], over the same text, in turn.

    Args:
        repeats: of each width; fewer, but at least one, if they take longer than `within_s` seconds.
        num_context: tokens in the cache when a pass is timed.
    """
    began_all = time.perf_counter()
    sequence = _filled_sequence(model, num_context)
    contest: Contest[int, int, tuple[float, float]] = Contest(widths, [num_context], repeats, warm_up=[num_context])
    for step in contest.steps():
        if time.perf_counter() - began_all > within_s and all(map(contest.runs, widths)):
            break
        width = step.contender
        rewind_mode = sequence.prepare(width, num_context)
        began = time.perf_counter()
        logits = sequence.feed((1,) * width, width)
        built = time.perf_counter()
        mx.eval(logits)
        contest.record(step, (time.perf_counter() - began, built - began))
        if rewind_mode is RewindMode.SINGLE:
            sequence = _filled_sequence(model, num_context)
        else:
            sequence.rewind(num_context)
    sequence.close()
    taken = {width: list(zip(*contest.runs(width).values(), strict=True)) for width in widths}
    return Passes(*({width: spread(taken[width][part]) for width in widths} for part in (0, 1)))


def time_shared_passes(
    model: MLXModel, numbers: Sequence[int], *, repeats: int = REPEATS, num_context: int = CONTEXT_TOKENS
) -> Passes:
    """Time forward passes that several texts share, one token each. They must be able to share passes."""
    times, building = {}, {}
    for number in numbers:
        feeds = [Feed(_filled_sequence(model, num_context), (1,), 1) for _ in range(number)]
        taken: list[tuple[float, float]] = []
        for _ in range(1 + repeats):
            for feed in feeds:
                feed.sequence.prepare(1, feed.sequence.length)
            began = time.perf_counter()
            logits = model.feed_together(feeds)
            built = time.perf_counter()
            mx.eval(logits)
            taken.append((time.perf_counter() - began, built - began))
        for feed in feeds:
            feed.sequence.close()
        # The first pass puts the texts into one batch.
        times[number], building[number] = (spread(part) for part in zip(*taken[1:], strict=True))
    return Passes(times, building)


def _filled_sequence(model: MLXModel | TrainedDrafter, num_tokens: int) -> CachedSequence:
    sequence = model.open_sequence(beside_another=False)
    if isinstance(sequence, FeatureInput):
        sequence.give_nothing(num_tokens + MAX_WIDTH)
    sequence.feed(tuple(token % model.vocab_size for token in range(num_tokens)), 0)
    return sequence
