"""Suggestions of what drafts for a target: what fits on this disk, then what is known on the hub.

That is drafters trained for the target, by the table in `known_drafters.json`, and small models of its family. Nothing
here uses the network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from huggingface_hub.errors import CacheNotFound, HFValidationError
from tokenizers import Tokenizer

from actors.trained.kinds.attach import SUPPORTED
from actors.trained.kinds.recognition import kind_of
from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown, shown_path

# Largest size of a draft model relative to the target. A larger one takes too much time to gain much.
MAX_SIZE_RATIO = 1 / 3
# What the names of conversions of a model have after its own.
_CONVERSION = r"(-(\d+bit|bf16|fp16|fp8|mxfp4|mxfp8|nvfp4|dwq|qat|mlx|dynamic))*"


@attrs.frozen
class Suggestion:
    """A draft model, or a trained drafter, that fits a target.

    Attributes:
        model: the value for `draft`: a hub id or a path.
        is_on_disk: whether it is on this disk, so that nothing is downloaded.
        is_checked: whether its vocabulary was compared with the target's, token by token. True for a model on the
            disk; a model on the hub, and a trained drafter, is checked when it is opened.
        num_bytes: size of its weights; approximate for a model on the hub, None for a trained drafter there.
        kind: of a trained drafter, such as "EAGLE-3"; None for a language model.
    """

    model: str
    is_on_disk: bool
    is_checked: bool
    num_bytes: int | None
    kind: str | None = None

    @property
    def described(self) -> str:
        """The suggestion as a phrase."""
        if self.num_bytes is None:
            return f"{self.model} ({self.kind}, trained for this model, from the hub)"
        size = f"{self.num_bytes / 1e6:,.0f} MB"
        if self.kind is not None:
            return f"{self.model} ({size}, on this disk, {self.kind}, trained for a model of this shape)"
        if self.is_on_disk:
            return f"{self.model} ({size}, on this disk, the same vocabulary)"
        return f"{self.model} (about {size} from the hub, of the same family)"


def suggest_draft(target: str | os.PathLike[str], *, cache_dir: str | Path | None = None) -> tuple[Suggestion, ...]:
    """What can draft for a target, the best first.

    Searches Hugging Face's cache and, if the target is a directory, the directories beside it. A trained drafter fits
    if it was made for a model of the target's shape. A model fits if it has the target's vocabulary and at most a third
    of its size; smaller models come first. Trained drafters and models from the tables that are not on the disk follow.

    Args:
        target: a path, or a hub id that was downloaded.
        cache_dir: Hugging Face's cache; None for the default one.

    Returns: the suggestions; empty if nothing fits.

    Raises:
        SettingsError: the target is neither a path nor a hub id.
        ModelError: the target is not on this disk, or has no readable config.json.
    """
    directory = _directory(target, cache_dir)
    config = _config(directory)
    if config is None:
        raise ModelError(
            f"target {shown_path(os.fspath(target))} has no config.json that can be read; give a directory with a model"
        )
    max_bytes = _num_bytes(directory) * MAX_SIZE_RATIO
    vocabulary, shape = _vocabulary(directory), _shape(config)
    found, trained = [], []
    for name, candidate in _on_disk(directory, cache_dir):
        other, num_bytes = _config(candidate), _num_bytes(candidate)
        if other is None or candidate == directory or num_bytes == 0:
            continue
        if (kind := kind_of(other)) is not None:
            if kind in SUPPORTED and shape is not None and _shape(other) == shape:
                trained.append(Suggestion(name, is_on_disk=True, is_checked=False, num_bytes=num_bytes, kind=kind))
        elif "model_type" in other and num_bytes <= max_bytes and _agree(vocabulary, _vocabulary(candidate)):
            found.append(Suggestion(name, is_on_disk=True, is_checked=True, num_bytes=num_bytes))
    found = [*trained, *sorted(found, key=lambda suggestion: suggestion.num_bytes or 0)]
    present = {suggestion.model for suggestion in found} | {os.fspath(target)}
    for name, kind in known_drafters(os.fspath(target)):
        if name not in present:
            found.append(Suggestion(name, is_on_disk=False, is_checked=False, num_bytes=None, kind=kind))
    for small in small_models(str(config.get("model_type")), _vocab_size(config)):
        if small.model not in present and small.num_megabytes * 1e6 <= max_bytes:
            found.append(
                Suggestion(small.model, is_on_disk=False, is_checked=False, num_bytes=small.num_megabytes * 10**6)
            )
    return tuple(found)


# --- what is on the disk --------------------------------------------------------------------------


def _directory(target: Any, cache_dir: str | Path | None) -> Path:
    if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
        raise SettingsError(f"target must be a path or a hub id, got {shown(target)}")
    path = Path(target).expanduser()
    with suppress(OSError):  # such as a name that is too long for a path
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
    """(name, directory) of each model on the disk."""
    if "snapshots" not in target.parts:
        # A directory that cannot be read has no candidates.
        with suppress(OSError):
            for beside in sorted(target.parent.iterdir()):
                if (beside / "config.json").is_file():
                    yield str(beside), beside.resolve()
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except (CacheNotFound, OSError):
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        # The revision that opening by name uses.
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


def _shape(config: dict[str, Any]) -> tuple[int, int] | None:
    """Width and vocabulary of a model, or of the target that a drafter was trained for; None if it does not say."""
    inner = config.get("text_config") or config.get("transformer_layer_config") or config
    width = config.get("target_hidden_size") or config.get("backbone_hidden_size")
    width = width or (inner.get("hidden_size") if isinstance(inner, dict) else None)
    vocab_size = inner.get("vocab_size") if isinstance(inner, dict) else None
    return (width, vocab_size) if isinstance(width, int) and isinstance(vocab_size, int) else None


def _num_bytes(directory: Path) -> int:
    """Size of the weights in a directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token; None if there is no readable tokenizer."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exception for every fault of a file
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


def _agree(ours: dict[str, int] | None, theirs: dict[str, int] | None) -> bool:
    """Whether common ids stand for the same tokens; see `runtime.generation.text.check_vocabularies`."""
    if ours is None or theirs is None:
        return False
    by_id = {id: token for token, id in ours.items()}
    common = [(by_id[id], token) for token, id in theirs.items() if id in by_id]
    return bool(common) and all(mine == token for mine, token in common)


# --- trained drafters that are known ---------------------------------------------------------------


@cache
def _table() -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = json.loads(Path(__file__).with_name("known_drafters.json").read_text("utf-8"))
    return table


def known_drafters(target: str) -> Iterator[tuple[str, str]]:
    """(hub id, kind) of each drafter that is known to be trained for a model, by the model's path or hub id."""
    name = target.rstrip("/").rpartition("/")[2]
    for source in _table():
        for trained_for, drafters in source["drafters"].items():
            if re.fullmatch(re.escape(trained_for) + _CONVERSION, name, re.IGNORECASE):
                yield from drafters.items()


# --- small models of known families; their vocabularies are checked when they are opened -----------


@attrs.frozen
class SmallModel:
    """A small model that can draft.

    Attributes:
        model: its hub id.
        num_megabytes: approximate size of its weights.
    """

    model: str
    num_megabytes: int


@attrs.frozen
class Family:
    """Models that share a vocabulary.

    Attributes:
        model_types: values of `model_type` in config.json.
        vocab_sizes: smallest and largest number of embedding rows, padding included.
        small_models: the smallest first.
    """

    model_types: frozenset[str]
    vocab_sizes: tuple[int, int]
    small_models: tuple[SmallModel, ...]


FAMILIES = (
    Family(
        frozenset({"qwen3", "qwen3_moe"}),
        (151_936, 151_936),
        (SmallModel("mlx-community/Qwen3-0.6B-4bit", 335), SmallModel("mlx-community/Qwen3-1.7B-4bit", 970)),
    ),
    Family(
        frozenset({"qwen2"}),
        (151_936, 152_064),
        (
            SmallModel("mlx-community/Qwen2.5-0.5B-Instruct-4bit", 280),
            SmallModel("mlx-community/Qwen2.5-Coder-0.5B-Instruct-4bit", 280),
            SmallModel("mlx-community/Qwen2.5-1.5B-Instruct-4bit", 870),
        ),
    ),
    Family(
        frozenset({"llama"}),
        (128_256, 128_256),
        (SmallModel("mlx-community/Llama-3.2-1B-Instruct-4bit", 700),),
    ),
    Family(
        frozenset({"llama"}),
        (49_152, 49_152),
        (SmallModel("mlx-community/SmolLM2-135M-Instruct", 270),),
    ),
    Family(
        frozenset({"gemma3", "gemma3_text"}),
        (262_144, 262_208),
        (SmallModel("mlx-community/gemma-3-270m-it-4bit", 150), SmallModel("mlx-community/gemma-3-1b-it-4bit", 730)),
    ),
    Family(
        frozenset({"gemma2"}),
        (256_000, 256_000),
        (SmallModel("mlx-community/gemma-2-2b-it-4bit", 1470),),
    ),
    Family(
        frozenset({"lfm2", "lfm2_moe"}),
        (65_536, 65_536),
        (SmallModel("mlx-community/LFM2-350M-4bit", 200),),
    ),
)


def small_models(model_type: str, vocab_size: int) -> Iterator[SmallModel]:
    """The small models of a model's family, the smallest first; none if the family is not in the table."""
    for family in FAMILIES:
        low, high = family.vocab_sizes
        if model_type in family.model_types and low <= vocab_size <= high:
            yield from family.small_models
