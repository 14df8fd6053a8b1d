"""The files of a model: where they are, what is wrong with them, and the sampling settings that they recommend."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from actors.trained.kinds.recognition import kind_of
from actors.workers.worker import JobError
from protocol.errors import ModelError, OutriderError, SettingsError
from protocol.reprs import excerpt, shown_path
from protocol.settings import settings_from
from runtime.loading.gguf.names import in_repository, is_gguf, parts_of
from runtime.loading.model_spec import ModelSpec
from runtime.loading.named_models import named_model

# Weights in other formats.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.npz", "*.safetensors")
# A file of safetensors begins with the length of its header.
_LENGTH_BYTES = 8
# That of the library safetensors; the first bytes of any other file give a larger number.
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "

# What the files of a tokenizer are called, beside its configuration.
_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")


# Settings with a value at which they change nothing; the same names as in the file.
_NEUTRAL = {"temperature": None, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


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
    if (named := named_model(source.path if isinstance(source, ModelSpec) else source)) is not None:
        return named.target
    path = Path(str(source)).expanduser()
    with suppress(OSError):  # such as a name that is too long for a path
        if path.is_dir() or (is_gguf(path) and path.is_file()):
            return path
    revision = source.revision if isinstance(source, ModelSpec) else None
    try:
        repository, name = in_repository(str(source)) if is_gguf(source) else (str(source), "config.json")
        found = try_to_load_from_cache(repository, name, cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    return Path(found) if is_gguf(source) else Path(found).parent


def config_in(folder: Path) -> dict[str, Any] | None:
    """What config.json, or a GGUF file's metadata, says; None if it cannot be read: loading the model tells why."""
    if not is_gguf(folder):
        return _settings_in(folder / "config.json")
    # PyPI `gguf` takes a quarter of a second to import.
    from runtime.loading.gguf.architectures import config_of
    from runtime.loading.gguf.container import read

    try:
        return config_of(read(folder))
    except ModelError:
        return None


def _settings_in(file: Path) -> dict[str, Any] | None:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def num_bytes_in(folder: Path) -> int:
    """Size of the weights in a folder, or of a GGUF file."""
    if is_gguf(folder):
        parts = [folder.with_name(name) for name in parts_of(folder.name)]
        return sum(part.stat().st_size for part in parts if part.is_file())
    # In Hugging Face's cache a file may be a link to one that is gone.
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """The settings that generation_config.json in a model's folder gives, by name; empty if there is no such file. A
    value that is no valid setting is left out. If `do_sample` is false, decoding is greedy; if true, the temperature is
    1 unless the file says another.
    """
    if folder is None or (file := _settings_in(folder / "generation_config.json")) is None:
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


def defaults_message(model: str, defaults: Mapping[str, Any], given: Container[str]) -> str | None:
    """The defaults that a model's files set, without the `given` ones, as a message; None if none is left."""
    used = {name: value for name, value in defaults.items() if name not in given and value is not None}
    listed = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in used.items())
    return f"{model}: its generation_config.json sets {listed} (--generation-config none ignores it)" if used else None


def _is_valid(name: str, value: Any) -> bool:
    try:
        settings_from({name: value})
    except SettingsError:
        return False
    return True


def check_folder(role: str, name: str, folder: Path) -> None:
    """Check the files of a model, which the user calls `name`, without loading it. Raises: ModelError: it is no folder,
    has no readable weights, or is of a family that mlx-lm does not have.
    """
    if not folder.is_dir():
        raise ModelError(f"{role} {shown_path(name)} is a file; give a directory in Hugging Face layout")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{role} {shown_path(name)} has no config.json; give a directory in Hugging Face layout")
    config = config_in(folder)
    if config is None or kind_of(config) is not None:
        return  # loading reports what is wrong; or a trained drafter, whose files have other names
    if (fault := next(chain(_faults_of_family(config), _faults_of_weights(folder)), None)) is not None:
        raise ModelError(f"cannot load {role} {shown_path(name)}: {fault}")


def _faults_of_family(config: dict[str, Any]) -> Iterator[str]:
    family = config.get("model_type")
    if not isinstance(family, str) or "model_file" in config:
        return
    remapped = {*MODEL_REMAPPING, *(each for each, _ in MODEL_ARCHITECTURE_REMAPPING)}
    with suppress(ImportError, ValueError):  # of a name that no module can have
        if family in remapped or find_spec(f"mlx_lm.models.{family}") is not None:
            return
    yield (
        f"its model_type is {excerpt(family)}, which mlx-lm {version('mlx-lm')}, the version installed here, does not "
        "know; give a model of another family"
    )


def _faults_of_weights(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
        beside = f", only {others[0]}, which mlx-lm does not read" if others else ""
        yield f"it has no weights: no file model*.safetensors{beside}; copy or download them"
    for file in files:
        if (fault := _fault_of_safetensors(file)) is not None:
            yield f"{shown_path(str(file))} {fault}"


def _fault_of_safetensors(file: Path) -> str | None:
    """What is wrong with a file of weights, by its header and its size."""
    again = "copy or download it again"
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as opened:
            length = opened.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(length, "little")
            if length.startswith(_LFS_POINTER):
                return "is a pointer of Git LFS in the place of the weights; run `git lfs pull` in its folder"
            if num_bytes == 0:
                return f"is empty, with 0 bytes; {again}"
            begin = _LENGTH_BYTES + header_bytes
            if header_bytes > _MAX_HEADER_BYTES:
                return f"is not a file of safetensors; {again}"
            if num_bytes < begin:
                return f"is cut off: it has {num_bytes:,} bytes, and its header alone {begin:,}; {again}"
            header = json.loads(opened.read(header_bytes))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        end = begin + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"is not a file of safetensors; {again}"
    return None if num_bytes >= end else f"is cut off: it has {num_bytes:,} of {end:,} bytes; {again}"


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
    if (config := config_in(folder)) is not None:
        yield from _faults_of_family(config)
    yield from _faults_of_weights(folder)
    if "tokenizer" in said and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        yield NO_TOKENIZER


NO_TOKENIZER = (
    "it has no tokenizer; copy tokenizer.json, or the files that the original model has in its place, into its folder"
)
