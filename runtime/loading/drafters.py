"""What can draft for a target, without the network: in folders, then in tables of known drafters and small models."""

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
from huggingface_hub import parse_local_safetensors_file_metadata, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, SafetensorsParsingError
from tokenizers import Tokenizer

from actors.trained.drafter_model import SUPPORTED
from actors.trained.kinds.mtp import names_a_layer
from actors.trained.kinds.recognition import kind_of
from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown, shown_path
from protocol.settings import MTP
from runtime.loading.gguf.names import is_gguf, models_among
from runtime.loading.model_files import config_in, folder_of, num_bytes_in
from runtime.loading.named_models import SMOLLM2_DRAFT

# Largest size of a draft model relative to the target. A larger one takes too much time to gain much.
MAX_SIZE_RATIO = 1 / 3
# What configurations call the numbers of layers and of features.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_WIDTH = ("hidden_size", "d_model", "n_embd", "model_dim")
# What the names of conversions of a model have after its own.
_CONVERSION = r"(-(\d+bit|bf16|fp16|fp8|mxfp4|mxfp8|nvfp4|dwq|qat|mlx|dynamic))*"


@attrs.frozen
class Suggestion:
    """A draft model, or a trained drafter, that fits a target.

    Attributes:
        model: the value for `draft`: a hub id, a path or "mtp".
        folder: where it is on this disk, so that nothing is downloaded; None for one on the hub.
        num_bytes: size of its weights; approximate for a model on the hub, None for a trained drafter there and "mtp".
        kind: of a trained drafter, such as "EAGLE-3"; None for a language model.
        parameters, licence: of a trained drafter on the hub, as the hub says them, such as "0.5B"; None if not known.
    """

    model: str
    folder: Path | None
    num_bytes: int | None
    kind: str | None = None
    parameters: str | None = None
    licence: str | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether it is on this disk."""
        return self.folder is not None

    @property
    def is_checked(self) -> bool:
        """Whether its vocabulary was compared with the target's, token by token. A model on the hub, and a trained
        drafter, is checked when it is opened.
        """
        return self.is_on_disk and self.kind is None

    @property
    def described(self) -> str:
        """The suggestion as a phrase."""
        size = "" if self.num_bytes is None else f"{self.num_bytes / 1e6:,.0f} MB"
        if self.model == MTP:
            return f"{MTP} (the MTP layer in the model's own files)"
        if self.is_on_disk:
            fit = "the same vocabulary" if self.kind is None else f"{self.kind}, trained for a model of this shape"
            return f"{self.model} ({size}, on this disk, {fit})"
        if self.kind is None:
            return f"{self.model} (about {size} from the hub, of the same family)"
        parameters = self.parameters and f"{self.parameters} parameters"
        licence = self.licence and f"licence {self.licence}"
        parts = self.kind, "trained for this model", parameters, "from the hub", licence
        return f"{self.model} ({', '.join(filter(None, parts))})"


def suggest_draft(target: str | os.PathLike[str], *, cache_dir: str | Path | None = None) -> tuple[Suggestion, ...]:
    """What can draft for a target, the best first; empty if nothing fits.

    First comes the MTP layer in the target's own files, if there is one. Then what is bundled, in Hugging Face's cache
    and, if the target is a path, beside it: trained drafters made for a model of the target's shape,
    those known for the target first; then models with the target's vocabulary and at most a third of its size, smaller
    ones first. Last come trained drafters and models from the tables that are not on the disk. A model with the
    target's numbers of layers and of features is a copy of it, such as a quantised one, and drafts no faster.

    Args:
        target: a path, or a hub id that was downloaded.
        cache_dir: Hugging Face's cache; None for the default one.

    Raises:
        SettingsError: the target is neither a path nor a hub id.
        ModelError: the target is not on this disk, or has no readable config.json.
    """
    if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
        raise SettingsError(f"target must be a path or a hub id, got {shown(target)}")
    if (folder := folder_of(target, cache_dir)) is None:
        raise ModelError(
            f"target {shown_path(os.fspath(target))} is not on this disk; give a directory, or open it once"
        )
    directory = folder.resolve()
    if (config := config_in(directory)) is None:
        raise ModelError(
            f"target {shown_path(os.fspath(target))} has no config.json that can be read; give a directory with a model"
        )
    max_bytes = num_bytes_in(directory) * MAX_SIZE_RATIO
    vocabulary, shape, sizes = _vocabulary(directory), _shape(config), _layers_and_width(config)
    found, trained, known = [], [], list(known_drafters(os.fspath(target)))
    for name, candidate in _on_disk(directory, cache_dir):
        num_bytes = num_bytes_in(candidate)
        if num_bytes == 0 or candidate == directory or (other := config_in(candidate)) is None:
            continue
        if (kind := kind_of(other)) is not None:
            if kind in SUPPORTED and shape is not None and _shape(other) == shape:
                trained.append(Suggestion(name, candidate, num_bytes, kind))
            continue
        is_copy = sizes is not None and _layers_and_width(other) == sizes
        is_fit = "model_type" in other and num_bytes <= max_bytes and not is_copy
        if is_fit and _agree(vocabulary, _vocabulary(candidate)):
            found.append(Suggestion(name, candidate, num_bytes))
    made_for_it = {_model_name(suggestion.model) for suggestion in known}
    found = [
        *([Suggestion(MTP, directory, None, "MTP")] if _has_mtp(directory, config) else ()),
        *sorted(trained, key=lambda suggestion: _model_name(suggestion.model) not in made_for_it),
        *sorted(found, key=lambda suggestion: suggestion.num_bytes or 0),
    ]
    present = {suggestion.model for suggestion in found} | {os.fspath(target)}
    found += [suggestion for suggestion in known if suggestion.model not in present]
    inner = config.get("text_config")
    vocab_size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    small = small_models(str(config.get("model_type")), vocab_size if isinstance(vocab_size, int) else 0, sizes)
    found += [each for each in small if each.model not in present and (each.num_bytes or 0) <= max_bytes]
    return tuple(found)


def _on_disk(target: Path, cache_dir: str | Path | None) -> Iterator[tuple[str, Path]]:
    """(name, directory) of each model on the disk."""
    yield str(SMOLLM2_DRAFT), SMOLLM2_DRAFT
    if "snapshots" not in target.parts:
        # A directory that cannot be read has no candidates.
        with suppress(OSError):
            for beside in sorted(target.parent.iterdir()):
                # Unlike `Path.is_file`, `isfile` is false where access is denied.
                if os.path.isfile(beside / "config.json") or (models_among([beside.name]) == [beside.name]):
                    yield str(beside), beside.resolve()
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except (CacheNotFound, OSError, ValueError):  # ValueError: the cache is not a directory
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        # The revision that opening by name uses.
        current = [revision for revision in repository.revisions if "main" in revision.refs]
        if repository.repo_type == "model" and current:
            yield repository.repo_id, current[0].snapshot_path.resolve()


def _shape(config: dict[str, Any]) -> tuple[int, int] | None:
    """Width and vocabulary of a model, or of the target that a drafter was trained for; None if it does not say."""
    inner = config.get("text_config") or config.get("transformer_layer_config") or config
    width = config.get("target_hidden_size") or config.get("backbone_hidden_size")
    width = width or (inner.get("hidden_size") if isinstance(inner, dict) else None)
    vocab_size = inner.get("vocab_size") if isinstance(inner, dict) else None
    return (width, vocab_size) if isinstance(width, int) and isinstance(vocab_size, int) else None


def _layers_and_width(config: dict[str, Any]) -> tuple[int, int] | None:
    """Numbers of layers and of features of a model; None if its configuration does not say."""
    inner = config.get("text_config")
    values = config | inner if isinstance(inner, dict) else config
    layers, width = (next(map(values.get, filter(values.get, names)), None) for names in (_LAYERS, _WIDTH))
    return (layers, width) if isinstance(layers, int) and isinstance(width, int) else None


def _has_mtp(directory: Path, config: dict[str, Any]) -> bool:
    """Whether the weights of a model in a directory include those of an MTP layer."""
    model_type = str(config.get("model_type"))
    for file in directory.glob("*.safetensors"):
        with suppress(OSError, SafetensorsParsingError):
            if names_a_layer(parse_local_safetensors_file_metadata(file).tensors, model_type):
                return True
    return False


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token; None if there is no readable tokenizer."""
    if is_gguf(directory):
        from runtime.loading.gguf.container import read

        try:
            tokens = read(directory, with_tensors=False).get("tokenizer.ggml.tokens", list, [])
        except ModelError:
            return None
        return {token: id for id, token in enumerate(tokens)}
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    except Exception:  # tokenizers raises plain Exception for every fault of a file
        return None
    return vocabulary


def _agree(ours: dict[str, int] | None, theirs: dict[str, int] | None) -> bool:
    """Whether common ids stand for the same tokens."""
    if ours is None or theirs is None:
        return False
    by_id = {id: token for token, id in ours.items()}
    common = {by_id[id] == token for token, id in theirs.items() if id in by_id}
    return common == {True}


@cache
def _table(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))
    return rows


def known_drafters(target: str) -> Iterator[Suggestion]:
    """The drafters on the hub that are known to be trained for a model, by the model's path or hub id."""
    name = _model_name(target)
    for source in _table("known_drafters"):
        for trained_for, drafters in source["drafters"].items():
            if re.fullmatch(re.escape(trained_for) + _CONVERSION, name, re.IGNORECASE):
                for drafter, facts in drafters.items():
                    yield Suggestion(drafter, None, None, facts["kind"], facts.get("parameters"), facts.get("licence"))


def _model_name(model: str) -> str:
    """The name of a model without its owner, by its path or hub id."""
    parts = Path(model).parts
    if parts[-2:-1] == ("snapshots",):  # a folder in Hugging Face's cache, below one such as "models--owner--name"
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else ""


def small_models(model_type: str, vocab_size: int, target_sizes: tuple[int, int] | None = None) -> Iterator[Suggestion]:
    """The small models of a family whose vocabulary has `vocab_size` embedding rows, padding included, the smallest
    first, but for copies of the target, by its numbers of layers and of features. Vocabularies are checked when they
    are opened.
    """
    for family in _table("small_models"):
        low, high = family["vocab_sizes"]
        if model_type in family["model_types"] and low <= vocab_size <= high:
            for model, facts in family["models"].items():
                if (facts["layers"], facts["width"]) != target_sizes:
                    yield Suggestion(model, None, facts["megabytes"] * 10**6)
