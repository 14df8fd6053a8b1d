"""What the files of several kinds of drafters have in common, as Speculators and transformers write them."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module

from protocol.errors import ModelError


def flatten_rope(layer: dict[str, Any]) -> None:
    """Put the settings of the rotary embedding where mlx-lm looks for them: transformers 5 nests them.

    Args:
        layer: the configuration of a layer, which is changed.

    Raises: ModelError: layers have different ones.
    """
    rope = layer.pop("rope_parameters", None)
    if rope:
        if any(isinstance(value, dict) for value in rope.values()):
            raise ModelError("a drafter whose layers have different rotary embeddings is not supported")
        layer.setdefault("rope_theta", rope.get("rope_theta"))
        if layer.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
            layer["rope_scaling"] = rope
    layer.setdefault("rope_theta", 10_000.0)
    layer.setdefault("max_position_embeddings", 2048)
    layer.setdefault("tie_word_embeddings", False)


def read_weights(folder: Path) -> dict[str, mx.array]:
    """The arrays in a folder's safetensors, by name; lazy.

    Raises: ModelError: there are none, or a file is damaged.
    """
    weights: dict[str, mx.array] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            weights |= mx.load(str(file))  # type: ignore[arg-type]
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the drafter in {folder} cannot be read: {error}") from error
    if not weights:
        raise ModelError(f"there are no weights (*.safetensors) in {folder}")
    return weights


def check_feature_layers(ids: Sequence[int], num_layers: int) -> None:
    """Raise an error if a target does not have the layers whose inputs a drafter reads.

    Args:
        ids: of the layers; the number of layers stands for what the last one gives.
        num_layers: of the target.

    Raises: ModelError: it does not.
    """
    if len(set(ids)) != len(ids) or not all(0 <= layer <= num_layers for layer in ids):
        raise ModelError(
            f"the drafter reads what enters layers {', '.join(map(str, ids))} of its target, which has {num_layers}; "
            "it was made for another one"
        )


def target_ids_of(offsets: mx.array | None, draft_vocab_size: int, vocab_size: int, folder: Path) -> mx.array | None:
    """The target's id of each id of a drafter's, from the differences of the two ids that a file has as `d2t`.

    Returns: (draft_vocab_size,) int32; None if the vocabularies are the same.
    Raises: ModelError: they differ, and there are no differences, or not as many; or an id is not the target's.
    """
    if draft_vocab_size == vocab_size:
        return None
    if offsets is None:
        raise ModelError(
            f"the drafter in {folder} has {draft_vocab_size} tokens and its target {vocab_size}, but nothing (d2t) "
            "says which is which"
        )
    if offsets.shape != (draft_vocab_size,):
        raise ModelError(
            f"the drafter in {folder} has {draft_vocab_size} tokens, and d2t says for {offsets.size} which they are"
        )
    ids = mx.arange(draft_vocab_size) + offsets.astype(mx.int32)
    # An index out of bounds would write to other memory.
    if not bool(mx.all((ids >= 0) & (ids < vocab_size))):
        raise ModelError(f"d2t of the drafter in {folder} names ids that its target, with {vocab_size}, does not have")
    return ids


def widened(logits: mx.array, target_ids: mx.array | None, vocab_size: int) -> mx.array:
    """Logits by the target's ids, -inf for those that a drafter lacks.

    Args:
        logits: (n, draft_vocab_size).
        target_ids: see `target_ids_of`.
        vocab_size: the target's.

    Returns: (n, vocab_size), lazy.
    """
    if target_ids is None:
        return logits
    nothing = mx.full((logits.shape[0], vocab_size), -mx.inf, dtype=logits.dtype)
    return mx.put_along_axis(nothing, mx.broadcast_to(target_ids, logits.shape), logits, axis=-1)


def check_named_target(config: Mapping[str, Any], target: Module, named: str) -> None:
    """Raise an error if a drafter's `config.json` names a target of another kind, as Speculators has it.

    The name of the target is no reason: conversions and fine-tuned models have other names.

    Args:
        config: the drafter's.
        target: mlx-lm's model.
        named: the drafter, for messages.

    Raises: ModelError: the target is of another kind.
    """
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    if not isinstance(verifier, Mapping):
        return
    architectures = verifier.get("architectures")
    wanted = {_family(str(name)) for name in (architectures if isinstance(architectures, list) else ())}
    module = type(target).__module__.rpartition(".")[2]
    given = {_family(str(name)) for name in (module, getattr(getattr(target, "args", None), "model_type", module))}
    # Only kinds that mlx-lm has: others may be other names of the same.
    if wanted and wanted <= _known_families() and not wanted & given:
        made_for = f" ({name})" if (name := verifier.get("name_or_path")) else ""
        raise ModelError(
            f"{named} was made for a target of the kind {' or '.join(map(str, architectures or ()))}{made_for}, and "
            f"this one is a {module}"
        )


def _family(name: str) -> str:
    """What the names of a kind of models have in common: `Qwen3MoeForCausalLM` and `qwen3_moe`."""
    spelled = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|_text)$", "", name)
    return spelled.replace("_", "").lower()


@cache
def _known_families() -> frozenset[str]:
    return frozenset(_family(module.name) for module in pkgutil.iter_modules(mlx_lm.models.__path__))
