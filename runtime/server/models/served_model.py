"""The description of a model that a server can load, and the error of a load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import OutriderError, SettingsError
from runtime.loading.model_spec import ModelSpec


@attrs.frozen
class ServedModel:
    """A model that a server can load.

    Attributes:
        name: what requests call it.
        target: as for `runtime.open`, but not a model that is already built.
        draft: likewise; None for plain decoding.
        draft_name: the drafter's name in reports, or None.
        options: options of `runtime.open`, without `trace` and `defaults`.
        settings: settings of each request that has no others, by name.
        idle_s: seconds after its last request at which it is unloaded, >= 0; None for never.
        num_bytes: of its weights, by the sizes of its files; 0 if unknown.
        is_pinned: whether it stays loaded for good: also when its target has failed, which ends the server.
    """

    name: str
    target: str | Path | ModelSpec
    draft: str | Path | ModelSpec | None = None
    draft_name: str | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    idle_s: float | None = None
    num_bytes: int = 0
    is_pinned: bool = False


class ModelLoadError(OutriderError):
    """A model cannot be loaded; the error of the load is the cause."""


class ConfigFileError(SettingsError):
    """Something is wrong in the file of a server's models; the message names file, table and key."""

    is_of_file = True
