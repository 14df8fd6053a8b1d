"""Sharding: each rank loads its part of a model, and its passes exchange tensors in the order of the program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import sharded_load

from actors.mlx.cache_kinds import kind_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import weights_of
from protocol.errors import ModelError
from protocol.tensor import Tensor

_NUM_BLOCKS, _BLOCK_BYTES = 16, 4096  # what is sampled of each file of weights

_REPEATS_HEADS = ("qwen3_5",)  # families whose `shard` repeats key-value heads if there are fewer of them than ranks

# Attribute of a model that was sharded in place: digests of its weights from before that, by name.
_SHARDED = "_outrider_sharded"

_ORDERED = "Ordered"  # the beginning of the names of classes whose calls submit their collectives

# Whether they do at the moment, in this thread.
_submits = ContextVar("outrider_submits", default=True)


@attrs.frozen
class Shard:
    """One rank's part of a model, sharded and evaluated."""

    model: Module
    tokenizer: TokenizerWrapper | None
    parts: dict[str, str]  # by name, what all ranks that have it must agree on: digests of weights, kinds of caches


def load_shard(
    path_or_hub_id: str | Path, group: mx.distributed.Group, find_folder: Callable[[], Path | None], **options: Any
) -> Shard:
    """Load this rank's part of a model: tensor parallel, or as a stage of a pipeline if the model supports only that.
    `find_folder` returns where the files are afterwards. Raises: ModelError: its heads cannot be divided among the
    ranks; and whatever mlx-lm raises.
    """
    model, tokenizer = sharded_load(str(path_or_hub_id), **options)
    folder = find_folder()
    # Checked only now: the files of a hub id are here, and a pipeline, which divides no heads, is known to be one.
    if folder is not None and hasattr(model, "shard"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check_heads(str(path_or_hub_id), config, group.size())
    return Shard(_in_order(model), tokenizer, ({} if folder is None else _parts_of_files(folder)) | _kinds(model))


def shard_in_place(model: Module, tokenizer: TokenizerWrapper | None, group: mx.distributed.Group) -> Shard:
    """Shard a model that each rank has built with the same weights; the first call changes it. Raises: ModelError."""
    if (sharded := getattr(model, _SHARDED, None)) is None:
        # Before it is sharded: afterwards ranks have few weights in common.
        sharded = {name: _digest(weight) for name, weight in weights_of(model).items()}
        args = getattr(model, "args", None)
        if hasattr(model, "shard"):
            _check_heads(type(model).__module__, vars(args) if args is not None else {}, group.size())
            model.shard(group)
        elif hasattr(getattr(model, "model", None), "pipeline"):
            model.model.pipeline(group)
        else:
            raise ModelError(
                f"{type(model).__module__} can neither be sharded nor run as a pipeline; run it on one rank"
            )
        mx.eval(model)
        object.__setattr__(model, _SHARDED, sharded)  # a module takes a dictionary for one of parameters
    return Shard(_in_order(model), tokenizer, sharded | _kinds(model))


def is_sharded_in_place(model: Module) -> bool:
    """Whether `shard_in_place` has changed the model. Its passes then need all ranks."""
    return hasattr(model, _SHARDED)


def difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """How another rank's `Shard.parts` differ, as a clause; None if both are parts of one model."""
    common = own.keys() & other.keys()
    if not common and (own or other):
        return "it has loaded another model"
    name = next((name for name in sorted(common) if own[name] != other[name]), None)
    return None if name is None else f"its {name}: {other[name]} there, {own[name]} here"


def _check_heads(named: str, config: dict[str, Any], size: int) -> None:
    """Raise an error if attention heads cannot be divided evenly: mlx-lm would round, and give wrong logits."""
    config = config.get("text_config") or config
    names = ["num_attention_heads"]
    if not config.get("kv_lora_rank") and not str(config.get("model_type")).startswith(_REPEATS_HEADS):
        names.append("num_key_value_heads")
    for name in names:
        heads = config.get(name)
        if isinstance(heads, int) and heads % size != 0:
            raise ModelError(
                f"{named} has {name}={heads}, which cannot be divided among {size} ranks; use a number of ranks that "
                f"divides {heads}"
            )


def _in_order(model: Module) -> Module:
    """Have each pass of the model submit its collectives when it is called.

    All ranks must run the same ones in the same order, but MLX evaluates a graph in an order of its own, and only what
    somebody reads. The output of the last layer depends on all collectives.
    """
    modules = (module for _, module in model.named_modules() if module is not model)
    if (inner := next((module for module in modules if isinstance(module.get("layers"), list)), None)) is None:
        raise ModelError(f"{type(model).__module__} has no module with a list of layers; run it on one rank")
    _order(inner)
    # A head that is sharded is gathered by the model around it, and only rank 0 reads logits.
    sharded = AllToShardedLinear, QuantizedAllToShardedLinear
    if any(path.split(".")[-1] == "lm_head" and isinstance(head, sharded) for path, head in model.named_modules()):
        _order(model)
    return model


def _order(module: Module) -> None:
    base = type(module)
    if base.__name__.startswith(_ORDERED):
        return

    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        if _submits.get():
            mx.async_eval(result)
        return result

    module.__class__ = type(_ORDERED + base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


@contextmanager
def never_computed() -> Iterator[None]:
    """While in force, passes submit nothing: for a pass of this rank alone, made for the shapes of its caches."""
    token = _submits.set(False)
    try:
        yield
    finally:
        _submits.reset(token)


def _kinds(model: Module) -> dict[str, str]:
    """The kinds of caches. Stages of a pipeline with different ones would rewind to different lengths."""
    kinds = {kind_of(layer).name(layer) for layer in CacheOptions().make_cache(model)}
    return {"kinds of caches": ", ".join(sorted(kinds))}


def _digest(weight: mx.array) -> str:
    flat = weight.reshape(-1)
    sample = mx.contiguous(flat[:: max(1, flat.size // 256)])
    return hashlib.sha256(Tensor.of(sample).data).hexdigest()[:16]


def _parts_of_files(folder: Path) -> dict[str, str]:
    parts = {}
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(_NUM_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
        parts[path.name] = digest.hexdigest()[:16]
    return parts
