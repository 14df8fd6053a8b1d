"""Attaches a trained drafter of any kind to its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.trained.eagle3 import Eagle3Reader
from actors.trained.eagle3 import load as load_eagle3
from actors.trained.feature_sequence import FeatureSequence
from actors.trained.kinds.head_sequence import HeadSequence
from actors.trained.kinds.medusa import is_medusa, load_medusa
from actors.trained.kinds.mtp import MTPReader, is_mtp, load_mtp
from actors.trained.kinds.target_parts import embedding_of, final_norm_of, head_of, width_of
from protocol.errors import ModelError


@attrs.frozen
class Attached:
    """A drafter, and what it reads of its target.

    Attributes:
        feature_layers: of the target, whose inputs are recorded; see `FeatureRecorder`.
        vocab_size: width of the logits, whose ids are the target's.
        open_sequence: makes an empty text.
        module: its weights.
        arrays: those of its weights that are no parameters of the module.
    """

    feature_layers: tuple[int, ...]
    vocab_size: int
    open_sequence: Callable[[], FeatureSequence | HeadSequence]
    module: Module
    arrays: tuple[mx.array, ...] = ()


def attach(
    folder: Path, target: Module, target_vocab_size: int, named: str, *, is_targets_own: bool = False
) -> Attached:
    """Load the drafter in a folder, of the kind that its `config.json` says, and attach it to its target.

    Args:
        folder: with its files.
        target: mlx-lm's model, whose weights are evaluated.
        target_vocab_size: width of the target's logits.
        named: the drafter, for messages.
        is_targets_own: whether the folder is the target's own, and the drafter the MTP layer in it.

    Raises: ModelError: it cannot be loaded, or was made for another target; the message says what differs.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the drafter in {folder} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"the drafter in {folder} cannot be read: its config.json has no settings by name")
    if is_targets_own or is_mtp(config):
        return _attach_mtp(folder, target, target_vocab_size, named)
    attached = (_attach_medusa if is_medusa(config) else _attach_eagle3)(folder, target, named)
    if attached.vocab_size > target_vocab_size:
        raise ModelError(
            f"{named} was made for a target with {attached.vocab_size} tokens, and this one has {target_vocab_size}"
        )
    return attached


def _attach_eagle3(folder: Path, target: Module, named: str) -> Attached:
    loaded = load_eagle3(folder)
    config = loaded.model.config
    feature_layers = config.feature_layers_of(len(target.layers))
    embed = None if loaded.embedding is not None else embedding_of(target, named)
    _check_width(config.target_hidden_size, target, named)
    arrays = tuple(array for array in (loaded.target_ids, loaded.embedding) if array is not None)
    reader = Eagle3Reader(loaded, embed)
    return Attached(feature_layers, config.vocab_size, partial(FeatureSequence, reader), loaded.model, arrays)


def _attach_medusa(folder: Path, target: Module, named: str) -> Attached:
    model = load_medusa(folder)
    config = model.config
    _check_width(config.hidden_size, target, named)
    # The heads read what the target's own head reads.
    open_sequence = partial(
        HeadSequence, final_norm_of(target, named), model.heads, config.hidden_size, config.vocab_size
    )
    return Attached((len(target.layers),), config.vocab_size, open_sequence, model)


def _attach_mtp(folder: Path, target: Module, target_vocab_size: int, named: str) -> Attached:
    model = load_mtp(folder, target, named)
    parts = final_norm_of(target, named), embedding_of(target, named), head_of(target, named)
    open_sequence = partial(FeatureSequence, MTPReader(model, *parts, target_vocab_size))
    return Attached((len(target.layers),), target_vocab_size, open_sequence, model)


def _check_width(hidden_size: int, target: Module, named: str) -> None:
    if (width := width_of(target, named)) != hidden_size:
        raise ModelError(
            f"{named} reads hidden states of a width of {hidden_size}, and those of this target have {width}"
        )
