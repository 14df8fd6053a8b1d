"""Trained drafters (EAGLE, Medusa and the like) in folders and on the hub."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from huggingface_hub import hf_hub_download, snapshot_download

from actors.trained.kinds.attach import SUPPORTED
from actors.trained.kinds.recognition import kind_of, nearest_to
from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown_path
from runtime.loading.model_spec import ModelSpec

# The files of a drafter.
_FILES = ["*.json", "*.safetensors", "*.pt"]


def trained_drafter_at(directory: Path) -> str | None:
    """The kind of trained drafter in a directory; None for a language model, or if the config cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    return kind_of(config) if isinstance(config, dict) else None


def trained_drafter_on_the_hub(spec: ModelSpec) -> Path | None:
    """Download the trained drafter that a hub id names; for a language model, only its configuration is.

    Returns: the folder of its files; None for a language model, or if the hub cannot be asked.

    Raises: as `check_trained_drafter`.
    """
    name = str(spec)
    try:
        config = hf_hub_download(name, "config.json", revision=spec.revision)
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    if check_trained_drafter(spec, Path(config).parent) is None:
        return None
    return Path(snapshot_download(name, revision=spec.revision, allow_patterns=_FILES))


def check_trained_drafter(spec: ModelSpec, directory: Path) -> str | None:
    """The kind of the trained drafter in a directory; None for a language model.

    Raises:
        ModelError: it is of a kind that cannot be used.
        SettingsError: it is asked for with what only a language model has.
    """
    if (kind := trained_drafter_at(directory)) is None:
        return None
    if kind not in SUPPORTED:
        raise ModelError(
            f"draft {str(spec)!r} is a drafter trained for its target, of the kind {kind}, which cannot be used; "
            f'nearest to it is {nearest_to(kind)}; or draft with "ngram"'
        )
    check_of_weights(spec, kind)
    return kind


def check_of_weights(spec: ModelSpec, kind: str) -> None:
    """Raise an error if a trained drafter is asked for with what only a language model has.

    Raises: SettingsError: it is.
    """
    # No code comes with a drafter, so that it may be trusted as the target's is.
    plain = attrs.evolve(spec, revision=None, quantize=None, trust_remote_code=False)
    if not plain.is_plain:
        raise SettingsError(
            f"draft {shown_path(str(spec))} is a drafter trained for its target ({kind}), and takes no adapter and no "
            "options of mlx-lm; leave out all but revision and quantize"
        )
