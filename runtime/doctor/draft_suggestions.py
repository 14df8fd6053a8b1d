"""Draft models for a target: those on the disk that are known to fit it, then those of its family on the hub.

Nothing here asks the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from huggingface_hub.errors import CacheNotFound, HFValidationError
from tokenizers import Tokenizer

from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown, shown_path
from runtime.doctor.draft_families import small_models
from runtime.loading.trained_drafters import trained_drafter

# A larger draft model takes so much of the target's time that there is little to win.
MOST_OF_THE_TARGET = 1 / 3


@attrs.frozen
class Suggestion:
    """A draft model that fits a target.

    Attributes:
        model: what to give as `draft`: a hub id, or a path.
        is_on_disk: whether it need not be downloaded.
        is_checked: whether its vocabulary was compared with the target's, token by token. It always was of a model on
            the disk; of one on the hub it will be when it is opened.
        num_bytes: of its weights; about, for one on the hub.
    """

    model: str
    is_on_disk: bool
    is_checked: bool
    num_bytes: int

    @property
    def described(self) -> str:
        """It in words."""
        size = f"{self.num_bytes / 1e6:,.0f} MB"
        if self.is_on_disk:
            return f"{self.model} ({size}, on this disk, the same vocabulary)"
        return f"{self.model} (about {size} from the hub, of the same family)"


def suggest_draft(target: str | os.PathLike[str], *, cache_dir: str | Path | None = None) -> tuple[Suggestion, ...]:
    """Draft models that fit a target, the best first.

    On the disk, Hugging Face's cache is looked through and, where the target is a directory, those beside it. A model
    fits that has the target's vocabulary and at most a third of its size; smaller ones come first. Behind them come
    those that a table has for the target's family and that are not on the disk.

    Args:
        target: a path, or a hub id that was downloaded.
        cache_dir: Hugging Face's cache; None for the usual one.

    Returns: what was found; empty where nothing fits.

    Raises:
        SettingsError: the target is neither a path nor a hub id.
        ModelError: it is not on this disk, or it has no config.json that can be read.
    """
    directory = _directory(target, cache_dir)
    config = _config(directory)
    if config is None:
        raise ModelError(
            f"target {shown_path(os.fspath(target))} has no config.json that can be read; give a directory with a model"
        )
    room = _num_bytes(directory) * MOST_OF_THE_TARGET
    vocabulary = _vocabulary(directory)
    found = []
    for name, candidate in _on_disk(directory, cache_dir):
        if vocabulary is None or candidate == directory or not 0 < (num_bytes := _num_bytes(candidate)) <= room:
            continue
        other = _config(candidate)
        if other is None or "model_type" not in other or trained_drafter(other) is not None:
            continue
        if _agree(vocabulary, _vocabulary(candidate)):
            found.append(Suggestion(name, is_on_disk=True, is_checked=True, num_bytes=num_bytes))
    found.sort(key=lambda suggestion: suggestion.num_bytes)
    present = {suggestion.model for suggestion in found} | {os.fspath(target)}
    for small in small_models(str(config.get("model_type")), _vocab_size(config)):
        if small.model not in present and small.num_megabytes * 1e6 <= room:
            found.append(
                Suggestion(small.model, is_on_disk=False, is_checked=False, num_bytes=small.num_megabytes * 10**6)
            )
    return tuple(found)


# --- what is on the disk --------------------------------------------------------------------------


def _directory(target: Any, cache_dir: str | Path | None) -> Path:
    if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
        raise SettingsError(f"target must be a path or a hub id, got {shown(target)}")
    path = Path(target).expanduser()
    with suppress(OSError):  # a name that is too long for a path, for one
        if path.is_dir():
            return path.resolve()
    try:
        config = try_to_load_from_cache(os.fspath(target), "config.json", cache_dir=cache_dir)
    except HFValidationError:
        config = None
    if not isinstance(config, str):
        raise ModelError(
            f"target {shown_path(os.fspath(target))} is not on this disk; give a directory, or open it once"
        )
    return Path(config).parent.resolve()


def _on_disk(target: Path, cache_dir: str | Path | None) -> Iterator[tuple[str, Path]]:
    """Models, by what they are named by, and where they are; each once."""
    if "snapshots" not in target.parts:
        # Whatever may not be read, is no candidate.
        with suppress(OSError):
            for beside in sorted(target.parent.iterdir()):
                if (beside / "config.json").is_file():
                    yield str(beside), beside.resolve()
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except (CacheNotFound, OSError):
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        # Of several revisions, the one that is opened by this name.
        current = [revision for revision in repository.revisions if "main" in revision.refs]
        if repository.repo_type == "model" and current:
            yield repository.repo_id, current[0].snapshot_path.resolve()


def _config(directory: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _vocab_size(config: dict[str, Any]) -> int:
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def _num_bytes(directory: Path) -> int:
    """Of the weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token; None where there is no tokenizer that can be read."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exception, whatever is wrong with a file
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


def _agree(ours: dict[str, int], theirs: dict[str, int] | None) -> bool:
    """Whether ids that both have stand for the same tokens; see `runtime.generation.text.check_vocabularies`."""
    if theirs is None:
        return False
    by_id = {id: token for token, id in ours.items()}
    common = [(by_id[id], token) for token, id in theirs.items() if id in by_id]
    return bool(common) and all(mine == token for mine, token in common)
