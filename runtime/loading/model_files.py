"""The files of a model: where they are, and what is wrong with them if the model cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from actors.workers.worker import JobError
from protocol.errors import ModelError, OutriderError
from protocol.reprs import shown_path
from runtime.loading.gguf.names import is_gguf, parts_of
from runtime.loading.model_spec import ModelSpec

# What the files of a tokenizer are called, beside its configuration.
_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")


def name_of(source: Any) -> str:
    """What messages call a model source."""
    if isinstance(source, tuple):
        return str(getattr(source[0], "source_name", type(source[0]).__name__))
    return str(source)


def folder_of(source: Any, cache_dir: str | Path | None = None) -> Path | None:
    """The folder, or the GGUF file, that a model source is loaded from; None if it was given as a model, or is not on
    this disk, nor in Hugging Face's cache at `cache_dir` (None: the default one).
    """
    if isinstance(source, tuple):
        return None
    path = Path(str(source)).expanduser()
    with suppress(OSError):  # such as a name that is too long for a path
        if path.is_dir() or (is_gguf(path) and path.is_file()):
            return path
    revision = source.revision if isinstance(source, ModelSpec) else None
    try:
        repository, name = str(source), "config.json"
        if is_gguf(source):
            owner, _, rest = repository.partition("/")
            repository, name = f"{owner}/{rest.partition('/')[0]}", rest.partition("/")[2]
        found = try_to_load_from_cache(repository, name, cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    return Path(found) if is_gguf(source) else Path(found).parent


def config_in(folder: Path) -> dict[str, Any] | None:
    """What config.json, or the metadata of a GGUF file, says; None if it cannot be read: loading the model reports what
    is wrong.
    """
    if is_gguf(folder):
        # PyPI `gguf` takes a quarter of a second to import.
        from runtime.loading.gguf.architectures import config_of
        from runtime.loading.gguf.container import read

        try:
            return config_of(read(folder))
        except ModelError:
            return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def num_bytes_in(folder: Path) -> int:
    """Size of the weights in a folder, or of a GGUF file."""
    if is_gguf(folder):
        parts = [folder.with_name(name) for name in parts_of(folder.name)]
        return sum(part.stat().st_size for part in parts if part.is_file())
    # In Hugging Face's cache a file may be a link to one that is gone.
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def load_error(role: str, source: Any, cause: BaseException | None) -> ModelError:
    """The error to raise for an exception of mlx-lm's, of any kind; `role` is "target" or "draft"."""
    if isinstance(source, tuple):
        reason = str(cause)
    elif (folder := folder_of(source)) is None:
        said = str(cause).removeprefix("Got: ").partition("\nAn error happened")[0]
        reason = f"there is no such folder, and from the Hugging Face hub it could not be fetched: {said}"
    else:
        reason = next(_faults(folder, str(cause)), None) or f"{type(cause).__name__}: {cause}"
    return ModelError(f"cannot load {role} {name_of(source)!r}: {reason}")


@contextmanager
def load_errors(role: str, source: Any) -> Iterator[None]:
    """If a job fails in the block, raise its `OutriderError`, or a `ModelError` whose cause is what the job raised."""
    try:
        yield
    except JobError as error:
        if isinstance(error.__cause__, OutriderError):
            raise error.__cause__ from None
        raise load_error(role, source, error.__cause__) from error.__cause__


def _faults(folder: Path, said: str) -> Iterator[str]:
    """What is wrong with the files of a model that cannot be loaded for mlx-lm's reason `said`."""
    for file in sorted(file for file in folder.glob("*.json") if file.is_file()):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield f"{shown_path(str(file))} cannot be read as JSON: {error}"
            continue
        if file.name == "config.json" and not (isinstance(content, dict) and "model_type" in content):
            yield f'{shown_path(str(file))} has no "model_type"; give a directory in Hugging Face layout'
    if "tokenizer" in said and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        yield NO_TOKENIZER


NO_TOKENIZER = (
    "it has no tokenizer; copy tokenizer.json, or the files that the original model has in its place, into its folder"
)
