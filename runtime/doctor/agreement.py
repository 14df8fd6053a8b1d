"""How often a trained drafter predicts its target's next token: as it is, quantised, and one layer off.

A drafter that reads other hidden states than it was trained with still drafts, and is wrong more often. Files do not
always say which layers they mean, and what quantisation costs differs from drafter to drafter: both are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from actors.mlx.model import MLXModel, is_quantized
from actors.trained.drafter_model import TrainedDrafter
from runtime.measuring.pass_times import time_passes

# Beginnings that the target continues, and for how many tokens.
BEGINNINGS = ("def quicksort(items):\n    ", "The first thing to know about the sea is")
NUM_TOKENS = 60
# Of the target's tokens; the comparisons take about as long again.
MAX_SECONDS = 60.0
# Quantisations that are tried.
QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "at 8 bits": {"bits": 8, "group_size": 64, "mode": "affine"},
    "at 4 bits": {"bits": 4, "group_size": 64, "mode": "affine"},
}


def agreement_rows(
    target: MLXModel, beginnings: Sequence[Sequence[int]], drafter: TrainedDrafter, decode_s: float
) -> tuple[tuple[str, str], ...]:
    """The rows (name, finding) of a report. Called on the drafter's thread, while the target rests.

    The target continues each of the beginnings. If it is slow, by the seconds of a pass over one token, nothing is
    compared.
    """
    seconds = decode_s * NUM_TOKENS * len(beginnings)
    if seconds > MAX_SECONDS:
        return (("agrees", f"not measured: {NUM_TOKENS * len(beginnings)} tokens of the target take {seconds:.0f} s"),)
    texts = [_greedy_text(target, beginning) for beginning in beginnings]
    layers, num_layers = drafter.feature_layers, len(target.module.layers)
    share = agreement(drafter, target, texts, layers)
    rows = [("agrees", f"with {share:.0%} of {NUM_TOKENS * len(texts)} tokens of the target's")]
    for name, by in (("a layer earlier", -1), ("a layer later", 1)):
        moved = tuple(layer + by for layer in layers)
        # A drafter that reads the last layer's output means just that.
        if num_layers not in layers and all(0 <= layer <= num_layers for layer in moved):
            rows.append((f"agrees, read {name}", f"with {agreement(drafter, target, texts, moved):.0%}"))
    if not is_quantized(drafter.module):
        for name, settings in QUANTIZED.items():
            smaller = drafter.quantized(settings)
            if is_quantized(smaller.module):
                seconds = time_passes(smaller, (1,))[1].median
                share = agreement(smaller, target, texts, layers)
                rows.append((f"agrees {name}", f"with {share:.0%}, T_d(1) = {seconds * 1e3:,.2f} ms"))
    return tuple(rows)


def agreement(
    drafter: TrainedDrafter, target: MLXModel, texts: Sequence[tuple[int, ...]], layers: tuple[int, ...]
) -> float:
    """How often, in [0, 1], a drafter that reads `layers` predicts each of the last `NUM_TOKENS` tokens of texts."""
    target.record_features(layers)
    try:
        with target.evaluating_layers():
            return sum(_named_of(drafter, target, text) for text in texts) / (NUM_TOKENS * len(texts))
    finally:
        target.record_features(None)


def _named_of(drafter: TrainedDrafter, target: MLXModel, text: tuple[int, ...]) -> int:
    read = target.open_sequence(alongside_model=False)
    read.feed(text, 0)
    features = read.recorded.take(len(text) - 2)
    read.close()
    assert features is not None
    sequence = drafter.open_sequence(alongside_model=False)
    sequence.give(features.start, features.values)
    sequence.rewind(0)  # has it look at the features
    logits = sequence.feed(text[:-1], NUM_TOKENS)
    assert logits is not None
    named = mx.argmax(logits, axis=-1) == mx.array(text[-NUM_TOKENS:])
    sequence.close()
    return int(cast(int, named.sum().item()))


def _greedy_text(target: MLXModel, beginning: Sequence[int]) -> tuple[int, ...]:
    text, unread = [*beginning], tuple(beginning)
    sequence = target.open_sequence(alongside_model=False)
    for _ in range(NUM_TOKENS):
        logits = sequence.feed(unread, 1)
        assert logits is not None
        unread = (int(cast(int, mx.argmax(logits[-1]).item())),)
        text += unread
    sequence.close()
    return tuple(text)
