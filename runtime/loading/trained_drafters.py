"""Trained drafters (EAGLE, Medusa and the like), recognised by the config.json beside their weights.

A trained drafter reads hidden states of the one target that it was trained for, and is no language model by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download

from protocol.errors import ModelError

# The kinds that can be used.
SUPPORTED = {"EAGLE-3", "Medusa", "MTP", "DFlash"}

# The files of a drafter.
_FILES = ["*.json", "*.safetensors", "*.pt"]

# Keys that only the config of a trained drafter has, and its kind.
_KEYS = {
    "medusa_num_heads": "Medusa",
    "medusa_num_layers": "Medusa",
    "dflash_config": "DFlash",
    "eagle_config": "EAGLE",
    "eagle_aux_hidden_state_layer_ids": "EAGLE-3",
}
# Lower-case words in the names of architectures and model types, and the kind; the longer words first.
_WORDS = {
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "dflash2": "DFlash 2",
    "dflash": "DFlash",
    "mtp": "MTP",
}


def trained_drafter(config: Mapping[str, Any]) -> str | None:
    """The kind of trained drafter that a config.json describes, such as "EAGLE-3"; None for a language model.

    Args:
        config: the parsed file; any key may be missing, or its value of a wrong type.
    """
    speculator = config.get("speculators_model_type")
    architectures = config.get("architectures")
    names = [config.get("model_type"), speculator, *(architectures if isinstance(architectures, list) else ())]
    spelled = " ".join(name.lower() for name in names if isinstance(name, str)).replace("-", "").replace("_", "")
    if speculator == "mtp":
        return "Speculators' mtp"  # whose weights have other names
    for word, kind in _WORDS.items():
        if word in spelled:
            return kind
    for key, kind in _KEYS.items():
        if key in config:
            return kind
    return None if speculator is None else f"Speculators' {speculator}"


def trained_drafter_at(directory: Path) -> str | None:
    """The kind of trained drafter in a directory; None for a language model, or if the config cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    return trained_drafter(config) if isinstance(config, dict) else None


def trained_drafter_on_the_hub(name: str, revision: str | None = None) -> Path | None:
    """Download the trained drafter that a hub id names; for a language model, only its configuration is.

    Args:
        name: a hub id.
        revision: branch, tag or commit; None for the default branch.

    Returns: the folder of its files; None for a language model, or if the hub cannot be asked.
    Raises: ModelError: it is of a kind that cannot be used.
    """
    try:
        config = hf_hub_download(name, "config.json", revision=revision)
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    if (kind := trained_drafter_at(Path(config).parent)) is None:
        return None
    if kind not in SUPPORTED:
        raise ModelError(unsupported(name, kind))
    return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))


def unsupported(name: str, kind: str) -> str:
    """The error message for a `draft` that is a trained drafter."""
    return (
        f"draft {name!r} is a drafter trained for its target ({kind}), which cannot be used yet; give a small language "
        'model of the same vocabulary, or "ngram"'
    )
