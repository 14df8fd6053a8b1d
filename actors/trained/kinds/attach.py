"""Attaches a trained drafter of any kind to its target: the registry of the kinds that can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module

from actors.trained.drafter_files import DrafterFiles, check_named_target
from actors.trained.kinds.dflash import attach_dflash
from actors.trained.kinds.eagle3 import attach_eagle3
from actors.trained.kinds.gemma4_assistant import attach_gemma4_assistant
from actors.trained.kinds.medusa import attach_medusa
from actors.trained.kinds.mtp import attach_mtp
from actors.trained.kinds.recognition import kind_of
from actors.trained.kinds.target_parts import Attached
from protocol.errors import ModelError

# By the name from `kind_of`: loads a drafter's files, and attaches it to mlx-lm's model, given the width of its logits.
_KINDS: dict[str, Callable[[DrafterFiles, Module, int], Attached]] = {
    "EAGLE-3": attach_eagle3,
    "P-EAGLE": attach_eagle3,
    "MTP": attach_mtp,
    "Medusa": attach_medusa,
    "DFlash": attach_dflash,
    "DFlash 2": attach_dflash,
    "DSpark": attach_dflash,
    "Gemma 4's assistant": attach_gemma4_assistant,
}
SUPPORTED = tuple(_KINDS)


def attach(
    folder: Path,
    target: Module,
    target_vocab_size: int,
    named: str,
    *,
    is_targets_own: bool = False,
    quantize: Mapping[str, Any] | None = None,
) -> Attached:
    """Load the drafter in a folder, of the kind that its `config.json` says, and attach it to mlx-lm's model, whose
    weights are evaluated and whose logits have a width of `target_vocab_size`. Messages call the drafter `named`.

    If `is_targets_own`, the folder is the target's, and the drafter the MTP layer in it. To `quantize` its weights
    takes `bits`, `group_size` and `mode`.

    Raises: ModelError: it cannot be loaded, or was made for another target; the message says what differs.
    """
    files = DrafterFiles.read(folder, named, quantize)
    check_named_target(files.config, target, named)
    kind = "MTP" if is_targets_own else kind_of(files.config)
    if kind not in _KINDS:
        raise ModelError(
            f"{named} is no trained drafter of a kind that can be used ({', '.join(_KINDS)}), but "
            f"{kind or 'none at all'}"
        )
    return _KINDS[kind](files, target, target_vocab_size)
