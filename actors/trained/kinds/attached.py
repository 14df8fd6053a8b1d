"""What a drafter of any kind is once it is attached to its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.target_parts import width_of
from actors.trained.shared_reading import SharedPass
from actors.trained.trained_sequence import TrainedSequence
from protocol.errors import ModelError


@attrs.frozen
class Attached:
    """A drafter, and what it reads of its target."""

    feature_layers: tuple[int, ...]  # of the target, whose inputs are recorded; see `FeatureRecorder`
    vocab_size: int  # width of the logits, whose ids are the target's
    open_sequence: Callable[[], TrainedSequence]
    module: Module
    num_draft_tokens: int  # how many of the target's tokens it can propose
    arrays: tuple[mx.array, ...] = ()  # weights that are not parameters of the module
    passes: Sequence[SharedPass[Any]] = ()  # those of its sequences that several texts can share


def check_target(
    files: DrafterFiles, target: Module, target_vocab_size: int, *, hidden_size: int, vocab_size: int
) -> None:
    """Raises: ModelError: a target has hidden states of another width than a drafter reads, or lacks tokens."""
    if (width := width_of(target, files.named)) != hidden_size:
        raise ModelError(
            f"{files.named} reads hidden states of a width of {hidden_size}, and those of this target have {width}"
        )
    if vocab_size > target_vocab_size:
        raise ModelError(
            f"{files.named} was made for a target with {vocab_size} tokens, and this one has {target_vocab_size}"
        )
