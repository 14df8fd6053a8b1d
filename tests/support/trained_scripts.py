"""A scripted target that records hidden states, and a scripted drafter that reads them: pairs for `scripted.simulated`.

The hidden states are empty. What counts is which of them have come: where a drafter has not got that of a position, it
reads its own, and its script may say something else then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from scripted import ScriptedModel, ScriptedSequence
from scripted_sequence import ReadsFeatures, RecordsEmptyFeatures

StaleScript = Callable[[Sequence[int], int], Sequence[float]]
"""A function from a token history, and how many hidden states of its own the drafter has read, to the next logits."""


class RecordingSequence(RecordsEmptyFeatures, ScriptedSequence):
    """One text of a target that records."""


class RecordingTarget(ScriptedModel):
    """A target that records."""

    kind = RecordingSequence
    records_features = True


class TrainedSequence(ReadsFeatures, ScriptedSequence):
    """One text of a drafter that reads hidden states."""

    reads_with_others = False
    model: TrainedDraft

    def row(self, length: int) -> Sequence[float]:
        return self.model.stale_script(self.tokens[:length], self.staleness_at(length))

    def give(self, start: int, features: mx.array) -> None:
        assert start <= self.num_given, "hidden states are missing"
        super().give(start, features)


class TrainedDraft(ScriptedModel):
    """A drafter that reads hidden states."""

    kind = TrainedSequence

    def __init__(self, stale_script: StaleScript, **options: Any) -> None:
        super().__init__(lambda history: stale_script(history, 0), **options)
        self.stale_script = stale_script
