"""Draft models that were trained for one target, and what they can be told by: the config.json beside their weights.

They read hidden states of their target and are no language models by themselves. The runtime cannot use them yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Keys that only such a config has, and what it is then.
_KEYS = {
    "medusa_num_heads": "Medusa",
    "medusa_num_layers": "Medusa",
    "dflash_config": "DFlash",
    "eagle_config": "EAGLE",
    "eagle_aux_hidden_state_layer_ids": "EAGLE-3",
}
# Words in the names of architectures and model types, in small letters; the longer ones first.
_WORDS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa", "dflash": "DFlash"}


def trained_drafter(config: Mapping[str, Any]) -> str | None:
    """What kind of trained drafter a config.json describes, such as "EAGLE-3"; None for a language model.

    Args:
        config: of which anything may be missing or of a wrong type.
    """
    speculator = config.get("speculators_model_type")
    architectures = config.get("architectures")
    names = [config.get("model_type"), speculator, *(architectures if isinstance(architectures, list) else ())]
    spelled = " ".join(name.lower() for name in names if isinstance(name, str)).replace("-", "").replace("_", "")
    for word, kind in _WORDS.items():
        if word in spelled:
            return kind
    for key, kind in _KEYS.items():
        if key in config:
            return kind
    return None if speculator is None else f"Speculators' {speculator}"


def trained_drafter_at(directory: Path) -> str | None:
    """What kind of trained drafter is in a directory; None for a language model, or where nothing can be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong
    return trained_drafter(config) if isinstance(config, dict) else None


def refusal(name: str, kind: str) -> str:
    """What to tell whoever names one as `draft`."""
    return (
        f"draft {name!r} is a drafter trained for its target ({kind}), which cannot be used yet; give a small language "
        'model of the same vocabulary, or "ngram"'
    )
