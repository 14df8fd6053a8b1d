"""Times of forward passes of one model, by the number of their tokens. To be called on the model's thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import CachedSequence, RewindMode
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.feature_input import FeatureInput
from protocol.pass_price import PassPrice

WIDTHS = (1, 2, 3, 5, 9)
REPEATS = 7
CONTEXT_TOKENS = 64  # tokens in the cache when a pass is timed
MAX_WIDTH = 64


@attrs.frozen
class Passes:
    """Measured forward passes.

    Attributes:
        seconds: median by width in tokens.
        spread: (fastest, slowest) in seconds, by width.
        price: of the medians, so that one slow pass has no influence.
    """

    seconds: dict[int, float]
    spread: dict[int, tuple[float, float]]
    price: PassPrice


def time_passes(
    model: MLXModel | TrainedDrafter,
    widths: Sequence[int] = WIDTHS,
    *,
    repeats: int = REPEATS,
    num_context: int = CONTEXT_TOKENS,
) -> Passes:
    """Time forward passes of several widths over the same text, in turn, so that drift affects all widths alike.

    Args:
        model: the model.
        widths: numbers of tokens, each in [1, 64].
        repeats: passes of each width, >= 1.
        num_context: tokens in the cache when a pass is timed, >= 1.
    """
    sequence = _filled_sequence(model, num_context)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    price = PassPrice()
    for repeat in range(repeats + 1):
        for width in widths:
            rewind_mode = sequence.prepare(width, num_context)
            began = time.perf_counter()
            mx.eval(sequence.feed((1,) * width, width))
            took = time.perf_counter() - began
            if rewind_mode is RewindMode.SINGLE:
                sequence = _filled_sequence(model, num_context)
            else:
                sequence.rewind(num_context)
            if repeat > 0:  # the first of each builds kernels and buffers
                seconds[width].append(took)
    sequence.close()
    medians = {width: statistics.median(times) for width, times in seconds.items()}
    for width, took in medians.items():
        price.observe(width, 0.0, took)
    return Passes(medians, {width: (min(times), max(times)) for width, times in seconds.items()}, price)


def _filled_sequence(model: MLXModel | TrainedDrafter, num_tokens: int) -> CachedSequence:
    sequence = model.open_sequence(beside_another=False)
    if isinstance(sequence, FeatureInput):
        sequence.give_nothing(num_tokens + MAX_WIDTH)
    sequence.feed(tuple(token % model.vocab_size for token in range(num_tokens)), 0)
    return sequence
