"""The sampling settings that a model's authors recommend: its generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.settings import settings_from

# Settings with a value at which they change nothing; the same names as in the file.
_NEUTRAL = {"temperature": None, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """The settings that generation_config.json in a model's folder gives, by name; empty if there is no such file.

    `"do_sample": false` is greedy decoding. If it is true, the temperature is 1 unless the file says another. A value
    that is no valid setting is left out.
    """
    if folder is None:
        return {}
    try:
        file = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(file, dict):
        return {}
    found = {name: file[name] for name, neutral in _NEUTRAL.items() if file.get(name) not in (None, neutral)}
    found = {name: value for name, value in found.items() if _is_valid(name, value)}
    if file.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    elif file.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    if "repetition_penalty" in found:
        found["repetition_context_size"] = None  # as in transformers, the whole text
    return found


def said_of(defaults: Mapping[str, Any], given: Container[str]) -> str | None:
    """What to tell users of a model's defaults, without those for which settings were given; None if none are left."""
    used = {name: value for name, value in defaults.items() if name not in given and value is not None}
    listed = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in used.items())
    return f"its generation_config.json sets {listed} (--generation-config none ignores it)" if used else None


def _is_valid(name: str, value: Any) -> bool:
    try:
        settings_from({name: value})
    except SettingsError:
        return False
    return True
