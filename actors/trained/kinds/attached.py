"""What a drafter of any kind is once it is attached to its target."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.target_parts import width_of
from actors.trained.trained_sequence import TrainedSequence
from protocol.errors import ModelError


@attrs.frozen
class Attached:
    """A drafter, and what it reads of its target.

    Attributes:
        feature_layers: of the target, whose inputs are recorded; see `FeatureRecorder`.
        vocab_size: width of the logits, whose ids are the target's.
        open_sequence: makes an empty text.
        module: its weights.
        num_draft_tokens: how many of the target's tokens it can propose.
        arrays: those of its weights that are no parameters of the module.
    """

    feature_layers: tuple[int, ...]
    vocab_size: int
    open_sequence: Callable[[], TrainedSequence]
    module: Module
    num_draft_tokens: int
    arrays: tuple[mx.array, ...] = ()


def check_target(
    files: DrafterFiles, target: Module, target_vocab_size: int, *, hidden_size: int, vocab_size: int
) -> None:
    """Check that a target fits a drafter that reads hidden states of a width, and knows so many of its tokens.

    Raises: ModelError: the target is narrower or wider, or has fewer tokens.
    """
    if (width := width_of(target, files.named)) != hidden_size:
        raise ModelError(
            f"{files.named} reads hidden states of a width of {hidden_size}, and those of this target have {width}"
        )
    if vocab_size > target_vocab_size:
        raise ModelError(
            f"{files.named} was made for a target with {vocab_size} tokens, and this one has {target_vocab_size}"
        )
