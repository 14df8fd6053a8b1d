"""The models that a server can load, and the TOML file that describes them, with a table for each (docs/server.md).

Everything that can be checked without a model is checked as the file is read, and an error names file, table and key.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import attrs

from protocol.argument_aliases import meant
from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown, shown_path
from protocol.settings import DRAFT_WORDS, settings_from
from protocol.validation import is_number
from runtime.engine.opening import OPTIONS, check_open
from runtime.loading.model_files import folder_of, num_bytes_in
from runtime.loading.model_spec import ModelSpec


@attrs.frozen
class ServedModel:
    """A model that a server can load."""

    name: str  # what requests call it
    target: str | Path | ModelSpec
    draft: str | Path | ModelSpec | None = None
    draft_name: str | None = None  # in reports
    options: Mapping[str, Any] = attrs.field(factory=dict)  # of `runtime.open`, without `trace` and `defaults`
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # of each request that has no others, by name
    idle_s: float | None = None  # seconds after its last request at which it is unloaded, >= 0; None for never
    num_bytes: int = 0  # of its weights, by the sizes of its files; 0 if unknown
    # Whether it stays loaded for good: also when its target has failed, which ends the server.
    is_pinned: bool = False


class ConfigFileError(SettingsError):
    """Something is wrong in the file of a server's models; the message names file, table and key."""

    is_of_file = True


# Options of `open` that a model cannot have here, and what to use instead.
_NOT_HERE = {"trace": "the server keeps timelines itself", "defaults": "use the table `settings`"}
_OPTIONS = tuple(name for name in OPTIONS if name not in _NOT_HERE)

_MAX_NAME_LENGTH = 200


def read_models(path: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> list[ServedModel]:
    """The models that a file describes, in its order; `options` and `settings` are for models that have no others.

    A relative path is taken from the file's folder, if it exists there.

    Raises: ConfigFileError: the file cannot be read, or something in it is wrong.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError among them
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigFileError(f"{shown_path(path)} cannot be read: {reason}; give a TOML file with models") from error
    place = _Place(path)
    _check_keys(place, content, ("idle_seconds", "models"))
    idle_s = _idle_s(place, content)
    tables = content.get("models")
    if not isinstance(tables, dict) or not tables:
        place.fail("models", f"must be tables such as [models.coder], at least one, got {shown(tables)}")
    shared = ServedModel("", "", options=options, settings=settings, idle_s=idle_s)
    return [_model(place, name, table, shared) for name, table in tables.items()]


@attrs.frozen
class _Place:
    """A place in the file, for messages: the top, or a table."""

    path: str
    table: str = ""

    def fail(self, key: str, why: str) -> NoReturn:
        """Raises: ConfigFileError: about a key here."""
        table = f", {self.table}" if self.table else ""
        raise ConfigFileError(f"{shown_path(self.path)}{table}, {key}: {why}")

    @contextmanager
    def reporting(self, key: str) -> Iterator[None]:
        """Name this place and a key in the error of a check."""
        try:
            yield
        except OutriderError as error:
            self.fail(key, str(error))


def _model(file: _Place, name: str, table: Any, shared: ServedModel) -> ServedModel:
    place = _Place(file.path, f"[models.{name}]" if name.isidentifier() else f"[models.{shown(name)}]")
    if not name or not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
        file.fail("models", f"a name must have 1 to {_MAX_NAME_LENGTH} printable characters, got {shown(name)}")
    if not isinstance(table, dict):
        file.fail(f"models.{name}", f"must be a table, got {shown(table)}")
    _check_keys(place, table, ("target", "draft", "idle_seconds", "settings", *_OPTIONS))
    if "target" not in table:
        place.fail("target", "is missing; give a path or a hub id")
    target = _source(place, "target", table["target"])
    draft = _source(place, "draft", table["draft"]) if "draft" in table else None
    for key, checked in (("target", None), ("draft", draft)):
        with place.reporting(key):
            check_open(target, checked, {})
    own = {name: value for name, value in table.items() if name in _OPTIONS}
    for number, key in enumerate(own):
        # Together with those before it, since some exclude each other.
        with place.reporting(key):
            check_open(target, None, {**shared.options, **dict(list(own.items())[: number + 1])})
    settings = table.get("settings", {})
    if not isinstance(settings, dict):
        place.fail("settings", f"must be a table of settings, got {shown(settings)}")
    with place.reporting("settings"):
        settings_from({**shared.settings, **settings})
    return ServedModel(
        name,
        target,
        draft,
        table["draft"]["path"] if isinstance(table.get("draft"), dict) else table.get("draft"),
        {**shared.options, **own},
        {**shared.settings, **settings},
        _idle_s(place, table) if "idle_seconds" in table else shared.idle_s,
        sum(num_bytes_of(model) for model in (target, draft) if model is not None),
    )


def _source(place: _Place, key: str, given: Any) -> str | ModelSpec:
    fields = tuple(field.name for field in attrs.fields(ModelSpec))
    table = given if isinstance(given, dict) else {"path": given}
    if not (isinstance(table.get("path"), str) and table["path"]):
        place.fail(key, f"must be a path or a hub id, or a table with one as `path`, got {shown(given)}")
    _check_keys(_Place(place.path, f"{place.table}, {key}"), table, fields)
    beside = {name: _found(place, str(table[name])) for name in ("path", "adapter_path") if name in table}
    if table.keys() == {"path"}:
        return beside["path"]
    with place.reporting(key):
        return ModelSpec(**{**table, **beside})


def _check_keys(place: _Place, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key in known:
            continue
        if key in _NOT_HERE:
            place.fail(key, f"is not a model's; {_NOT_HERE[key]}")
        near = meant(key, known)
        hint = f"the keys are {', '.join(known)}" if near is None else f"did you mean {near!r}?"
        place.fail(key, f"there is no such key; {hint}")


def _idle_s(place: _Place, table: Mapping[str, Any]) -> float | None:
    seconds = table.get("idle_seconds")
    if seconds is None:
        return None
    if not is_number(seconds) or not 0 <= seconds < math.inf:
        why = f"must be a number of seconds of at least 0, got {shown(seconds)}; leave it out to keep models loaded"
        place.fail("idle_seconds", why)
    return float(seconds)


def _found(place: _Place, model: str) -> str:
    beside = Path(place.path).parent / model
    return str(beside) if model not in DRAFT_WORDS and beside.exists() else model


def num_bytes_of(source: str | os.PathLike[str] | ModelSpec) -> int:
    """The bytes of a model's weights, by the sizes of its files; 0 for one that has none or is not on this machine."""
    folder = folder_of(source)
    return 0 if folder is None else num_bytes_in(folder)
