"""A scripted target that records hidden states, and a scripted drafter that reads them: pairs for `scripted.simulated`.

The hidden states are empty. What counts is which of them have come: where a drafter has not got that of a position, it
reads its own, and its script may say something else then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from scripted import ScriptedModel, ScriptedSequence

from actors.model import CannotFork
from runtime.simulation.scripted_features import ReadsFeatures, RecordsEmptyFeatures

StaleScript = Callable[[Sequence[int], int], Sequence[float]]
"""A function from a token history, and how many hidden states of its own the drafter has read, to the next logits."""


class RecordingSequence(RecordsEmptyFeatures, ScriptedSequence):
    """One text of a target that records."""

    def forget(self) -> None:
        super().forget()
        self.forget_taken()


class RecordingTarget(ScriptedModel):
    """A target that records."""

    def open_sequence(self, *, beside_another: bool) -> ScriptedSequence:
        self.fail_if_told("open")
        self.sequences.append(RecordingSequence(self))
        return self.sequences[-1]


class TrainedSequence(CannotFork, ReadsFeatures, ScriptedSequence):
    """One text of a drafter that reads hidden states."""

    def __init__(self, model: TrainedDraft) -> None:
        super().__init__(model)
        self._stale_script = model.stale_script

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        begin = len(self.tokens)
        super().feed(tokens, 0)
        self.note_read(begin, len(self.tokens))
        ends = range(len(self.tokens) - num_logits + 1, len(self.tokens) + 1)
        rows = [self._stale_script(self.tokens[:end], self.staleness_at(end)) for end in ends]
        return mx.array(rows) if rows else None

    def feed_lazy(self, token: mx.array) -> mx.array:
        rows = self.feed((int(token.item()),), 1)
        assert rows is not None
        return rows

    def rewind(self, length: int) -> int:
        remaining = super().rewind(min(length, self.length))
        self.note_rewound(remaining)
        return remaining

    def forget(self) -> None:
        super().forget()
        self.forget_stale()

    @property
    def length(self) -> int:
        return self.usable_length(len(self.tokens))

    def give(self, start: int, features: mx.array) -> None:
        assert start <= self.num_given, "hidden states are missing"
        super().give(start, features)

    @property
    def staleness(self) -> int:
        return self.staleness_at(len(self.tokens))


class TrainedDraft(ScriptedModel):
    """A drafter that reads hidden states.

    Attributes:
        stale_script: what it says.
    """

    def __init__(self, stale_script: StaleScript, **options: Any) -> None:
        super().__init__(lambda history: stale_script(history, 0), **options)
        self.stale_script = stale_script

    def open_sequence(self, *, beside_another: bool) -> ScriptedSequence:
        self.fail_if_told("open")
        self.sequences.append(TrainedSequence(self))
        return self.sequences[-1]

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        return "a trained drafter reads one text at a time"
