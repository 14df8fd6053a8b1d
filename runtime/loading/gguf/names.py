"""Names of GGUF files: which one of a folder or a hub repository is the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import ModelError
from protocol.reprs import listed, shown_path

SUFFIX = ".gguf"

# Of a model split over several files, as llama.cpp's gguf-split names them.
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def is_gguf(name: object) -> bool:
    """Whether a path, or a file in a hub repository ("owner/name/file.gguf"), is named as a GGUF file."""
    return str(name).lower().endswith(SUFFIX)


def in_repository(name: str) -> tuple[str, str]:
    """The hub repository of a file "owner/name/file.gguf", and the file in it."""
    owner, repository, file = [*name.split("/", 2), "", ""][:3]
    return f"{owner}/{repository}", file


def parts_of(name: str) -> list[str]:
    """The names of all files of a model, the first one first, by the name of one of them."""
    if (match := _PART.fullmatch(name)) is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}{name[-len(SUFFIX) :]}" for number in range(1, count + 1)]


def stem_of(name: str) -> str:
    """What a model is called by the name of its file: without folder, suffix and number of the part."""
    base = re.split(r"[/\\]", name)[-1]
    return match["stem"] if (match := _PART.fullmatch(base)) else base[: -len(SUFFIX)]


def models_among(names: Iterable[str]) -> list[str]:
    """The GGUF files with a language model of its own: one name for each, the first part of those that are split."""
    files = [name for name in names if is_gguf(name) and "mmproj" not in name.lower()]  # an encoder for images
    return sorted({parts_of(name)[0] for name in files})


def only_model(named: str, names: Iterable[str], *, prefix: str) -> str | None:
    """The only model among files; None if there is none. Raises: ModelError: there are several, listed."""
    found = models_among(names)
    if len(found) > 1:
        raise ModelError(
            f"{named} has {len(found)} GGUF models: {listed(found, 12)}; name one, as in {prefix}{found[0]}"
        )
    return found[0] if found else None


def model_in(folder: Path, role: str) -> Path | None:
    """The GGUF file of a folder; None if it has safetensors, or no GGUF file. Raises: ModelError: it has several."""
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return None
    name = only_model(f"{role} {shown_path(str(folder))}", names, prefix=f"{folder}/")
    return None if name is None else folder / name
