"""Attaches a trained drafter of any kind to its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.trained.drafter_files import check_feature_layers, check_named_target
from actors.trained.eagle3 import Eagle3Reader
from actors.trained.eagle3 import load as load_eagle3
from actors.trained.feature_sequence import FeatureSequence
from actors.trained.kinds.block_sequence import BlockSequence
from actors.trained.kinds.dflash import DFlashReader, is_dflash, load_dflash
from actors.trained.kinds.head_sequence import HeadSequence
from actors.trained.kinds.medusa import is_medusa, load_medusa
from actors.trained.kinds.mtp import MTPReader, is_mtp, load_mtp
from actors.trained.kinds.target_parts import embedding_of, final_norm_of, head_of, width_of
from protocol.errors import ModelError

# A text of a drafter, whatever its kind.
DrafterSequence = FeatureSequence | HeadSequence | BlockSequence


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
    open_sequence: Callable[[], DrafterSequence]
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
    check_named_target(config, target, named)
    if is_targets_own or is_mtp(config):
        attach_kind = _attach_mtp
    elif is_dflash(config):
        attach_kind = _attach_dflash
    else:
        attach_kind = _attach_medusa if is_medusa(config) else _attach_eagle3
    return attach_kind(folder, target, target_vocab_size, named)


def _attach_eagle3(folder: Path, target: Module, target_vocab_size: int, named: str) -> Attached:
    loaded = load_eagle3(folder)
    config = loaded.model.config
    feature_layers = config.feature_layers_of(len(target.layers))
    embed = None if loaded.embedding is not None else embedding_of(target, named)
    _check_width(config.target_hidden_size, target, named)
    _check_vocabulary(config.vocab_size, target_vocab_size, named)
    arrays = tuple(array for array in (loaded.target_ids, loaded.embedding) if array is not None)
    reader = Eagle3Reader(loaded, embed)
    return Attached(feature_layers, config.vocab_size, partial(FeatureSequence, reader), loaded.model, arrays)


def _attach_medusa(folder: Path, target: Module, target_vocab_size: int, named: str) -> Attached:
    model = load_medusa(folder)
    config = model.config
    _check_width(config.hidden_size, target, named)
    _check_vocabulary(config.vocab_size, target_vocab_size, named)
    # The heads read what the target's own head reads.
    open_sequence = partial(
        HeadSequence, final_norm_of(target, named), model.heads, config.hidden_size, config.vocab_size
    )
    return Attached((len(target.layers),), config.vocab_size, open_sequence, model)


def _attach_dflash(folder: Path, target: Module, target_vocab_size: int, named: str) -> Attached:
    model, target_ids = load_dflash(folder)
    config = model.config
    num_layers = len(target.layers)
    if config.num_target_layers not in (None, num_layers):
        raise ModelError(
            f"{named} was made for a target with {config.num_target_layers} layers, and this one has {num_layers}"
        )
    check_feature_layers(config.feature_layers, num_layers)
    _check_width(config.hidden_size, target, named)
    _check_vocabulary(max(config.vocab_size, config.mask_token_id + 1), target_vocab_size, named)
    head = head_of(target, named) if target_ids is None else model.lm_head
    reader = DFlashReader(model, target_ids, target_vocab_size, embedding_of(target, named), head)
    arrays = () if target_ids is None else (target_ids,)
    return Attached(config.feature_layers, target_vocab_size, partial(BlockSequence, reader), model, arrays)


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


def _check_vocabulary(vocab_size: int, target_vocab_size: int, named: str) -> None:
    if vocab_size > target_vocab_size:
        raise ModelError(
            f"{named} was made for a target with {vocab_size} tokens, and this one has {target_vocab_size}"
        )
