"""Times of forward passes of one model, by the number of their tokens. To be called on the model's thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import CachedSequence, Feed, RewindMode
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.feature_input import FeatureInput

WIDTHS = (1, 2, 3, 5, 9)
REPEATS = 7
CONTEXT_TOKENS = 64  # tokens in the cache when a pass is timed
SHARED_CONTEXT_TOKENS = 16  # likewise, of each text that shares it: reading a token of each takes 10 ms on a CPU
MAX_WIDTH = 64
WITHIN_S = 30.0  # seconds after which no pass is repeated


@attrs.frozen
class PassTime:
    """The time of a pass, measured several times, in seconds. One slow pass has no influence on the median."""

    median: float
    low: float
    high: float
    building: float  # median of the part in which Python builds the graph of the pass, and holds the GIL
    num_passes: int


def medians(times: Mapping[int, PassTime]) -> dict[int, float]:
    """The median times in seconds, by width."""
    return {width: each.median for width, each in times.items()}


def time_passes(model: MLXModel | TrainedDrafter, widths: Sequence[int]) -> dict[int, PassTime]:
    """Time forward passes over several numbers of tokens of one text, each in [1, 64], which take turns; by number.

    Each has `REPEATS` passes; fewer, but at least one, if they take longer than `WITHIN_S` seconds.
    """
    began_all = time.perf_counter()
    sequence = _filled_sequence(model, CONTEXT_TOKENS)
    taken: dict[int, list[tuple[float, float]]] = {width: [] for width in widths}
    # The first pass of a width compiles kernels, and is not counted.
    for repeat in range(1 + REPEATS):
        for width in widths if repeat % 2 == 0 else reversed(widths):
            if repeat > 1 and time.perf_counter() - began_all > WITHIN_S:
                break
            rewind_mode = sequence.prepare(width, CONTEXT_TOKENS)
            seconds = _timed(partial(sequence.feed, (1,) * width, width))
            if repeat > 0:
                taken[width].append(seconds)
            if rewind_mode is RewindMode.SINGLE:
                sequence.close()
                sequence = _filled_sequence(model, CONTEXT_TOKENS)
            else:
                sequence.rewind(CONTEXT_TOKENS)
    sequence.close()
    return {width: _pass_time(each) for width, each in taken.items()}


def time_shared_passes(model: MLXModel, num_texts: int) -> PassTime:
    """Time passes that texts share, which must be able to, with one token each."""
    feeds = [Feed(_filled_sequence(model, SHARED_CONTEXT_TOKENS), (1,), 1) for _ in range(num_texts)]
    taken = []
    for _ in range(1 + REPEATS):
        for feed in feeds:
            feed.sequence.prepare(1, feed.sequence.length)
        taken.append(_timed(partial(model.feed_together, feeds)))
    for feed in feeds:
        feed.sequence.close()
    return _pass_time(taken[1:])  # the first pass puts the texts into one batch


def _timed(feed: Callable[[], object]) -> tuple[float, float]:
    """The seconds of a pass, and of building its graph."""
    began = time.perf_counter()
    logits = feed()
    built = time.perf_counter()
    mx.eval(logits)
    return time.perf_counter() - began, built - began


def _pass_time(taken: Sequence[tuple[float, float]]) -> PassTime:
    seconds, building = zip(*taken, strict=True)
    return PassTime(statistics.median(seconds), min(seconds), max(seconds), statistics.median(building), len(taken))


def _filled_sequence(model: MLXModel | TrainedDrafter, num_tokens: int) -> CachedSequence:
    sequence = model.open_sequence(alongside_model=False)
    if isinstance(sequence, FeatureInput):
        sequence.give_nothing(num_tokens + MAX_WIDTH)
    sequence.feed(tuple(token % model.vocab_size for token in range(num_tokens)), 0)
    return sequence
