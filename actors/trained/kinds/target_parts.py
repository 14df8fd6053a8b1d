"""Embedding, final norm and head of a target, wherever mlx-lm's classes keep them; and an attached drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from actors.trained.drafter_files import DrafterFiles
from actors.trained.shared_reading import SharedPass
from actors.trained.trained_sequence import TrainedSequence
from protocol.errors import ModelError

# (…) ids or (…, width) hidden states to (…, width) hidden states or (…, V) logits; lazy.
Layer = Callable[[mx.array], mx.array]

_EMBEDDINGS = (
    "embed_tokens", "wte", "tok_embeddings", "word_embeddings", "token_embeddings", "embeddings", "embedding",
    "embed_in",
)  # fmt: skip
_HEADS = ("lm_head", "output", "embed_out")
_FINAL_NORMS = (
    "norm", "ln_f", "final_layernorm", "norm_f", "embedding_norm", "output_norm", "final_layer_norm", "final_norm",
)  # fmt: skip


def embedding_of(target: Module, named: str) -> Layer:
    """The embedding of a target: (…) ids to (…, hidden size). Raises: ModelError: a `named` drafter finds none."""
    if (found := _embedding(target)) is None:
        raise ModelError(f"{named} reads its target's embedding, and none was found in {type(target).__name__}")
    return cast(Layer, found)


def final_norm_of(target: Module, named: str) -> Layer:
    """The norm between the last layer of a target and its head. Raises: ModelError: none is found."""
    norm: Layer | None = _first(_around_layers(target), _FINAL_NORMS)
    if norm is None:
        raise ModelError(f"{named} reads its target's final norm, and none was found in {type(target).__name__}")
    return norm


def head_of(target: Module, named: str) -> Layer:
    """The head: (…, hidden size) normalised hidden states to (…, V) logits. Raises: ModelError: none can be used."""
    head = _first((target, target.get("language_model"), target.get("model")), _HEADS)
    if isinstance(head, (AllToShardedLinear, QuantizedAllToShardedLinear)):
        raise ModelError(
            f"{named} reads its target's head, and that of {type(target).__name__} is sharded over several "
            "ranks; draft with a draft model or by prompt lookup"
        )
    if head is not None:
        return cast(Layer, head)
    # Where there is none, the embedding is the head, too.
    tied: Layer | None = getattr(_embedding(target), "as_linear", None)
    if tied is None:
        raise ModelError(f"{named} reads its target's head, and none was found in {type(target).__name__}")
    return tied


def width_of(target: Module, named: str) -> int:
    """The width of a target's hidden states, by its embedding; see `embedding_of`."""
    return embedding_of(target, named)(mx.array([0])).shape[-1]


def _embedding(target: Module) -> Any:
    model, text, transformer, backbone = (
        getattr(target, name, None) for name in ("model", "language_model", "transformer", "backbone")
    )
    return _first((model, getattr(text, "model", None), transformer, backbone, target), _EMBEDDINGS)


def _first(holders: Iterable[Any], names: Sequence[str]) -> Any:
    """The first module that one of the holders, some of which are None, has under one of the names."""
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((each for each in found if isinstance(each, Module)), None)


def _around_layers(target: Module) -> Iterator[Module]:
    """The module that has the layers of a model, and the one around it."""
    [first, *_] = target.layers
    modules = dict(target.named_modules())
    for path, module in modules.items():
        if any(isinstance(value, list) and any(item is first for item in value) for value in module.values()):
            yield module
            yield modules[path.rpartition(".")[0]]
            return


@attrs.frozen
class Attached:
    """A drafter, and what it reads of its target."""

    feature_layers: tuple[int, ...]  # of the target, whose inputs are recorded; see `FeatureRecorder`
    vocab_size: int  # width of the logits, whose ids are the target's
    open_sequence: Callable[[], TrainedSequence]
    module: Module
    num_draft_tokens: int  # how many of the target's tokens it can propose
    arrays: tuple[mx.array, ...] = ()  # weights that are not parameters of the module
    passes: Sequence[SharedPass[Any]] = ()  # those of its sequences that several texts can share


def check_target(
    files: DrafterFiles, target: Module, target_vocab_size: int, *, hidden_size: int, vocab_size: int
) -> None:
    """Raises: ModelError: a target has hidden states of another width than a drafter reads, or lacks tokens."""
    if (width := width_of(target, files.named)) != hidden_size:
        raise ModelError(
            f"{files.named} reads hidden states of a width of {hidden_size}, and those of this target have {width}"
        )
    if vocab_size > target_vocab_size:
        raise ModelError(
            f"{files.named} was made for a target with {vocab_size} tokens, and this one has {target_vocab_size}"
        )
