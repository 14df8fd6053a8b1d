"""mlx-lm's model of a GGUF file, with weights in the names and the order of the original model."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize as quantize_modules
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters

from actors.mlx.model import quantize_weights, weights_of
from protocol.errors import ModelError
from protocol.reprs import shown
from runtime.loading.device import physical_memory
from runtime.loading.gguf.architectures import (
    ROPE_TENSORS,
    Architecture,
    architecture_of,
    config_of,
    dtype_of,
    is_on_cpu,
)
from runtime.loading.gguf.blocks import GROUP_SIZE, floats_of, packed
from runtime.loading.gguf.container import AGAIN, Container, read
from runtime.loading.gguf.vocabulary import tokenizer_of


def load_gguf(
    path: Path,
    *,
    adapter: Path | None = None,
    quantize: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
) -> tuple[Module, TokenizerWrapper]:
    """Load a GGUF model, by the path of any part, and its tokenizer, with the weights evaluated on the calling thread.

    Blocks that MLX can express stay quantised; all others become floats, which `quantize` quantises. On the CPU all
    become float32 if that takes at most half of its memory: MLX multiplies quantised weights there as slowly as no BLAS
    does, and each further token in a pass costs as much as the first. `model_config` replaces values of the
    configuration; it may have "dtype", of the activations, and "expand", whether all blocks become floats.

    Raises: ModelError: the file is damaged, or has something that cannot be loaded; the message names it.
    """
    container = read(path)
    name, architecture = architecture_of(container)
    config = config_of(container) | dict(model_config or {})
    expands = _expands(container, config.pop("expand", None))
    dtype = dtype_of(container, architecture, config.pop("dtype", None))
    tokenizer = tokenizer_of(container, tokenizer_config)
    module = importlib.import_module(f"mlx_lm.models.{architecture.model_type}")
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    names = _names_of(name, config, model)
    packable = {} if expands else dict(model.named_modules())
    weights, bits = _weights(container, architecture, config, names, packable, dtype)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    quantize_modules(
        model,
        GROUP_SIZE,
        class_predicate=lambda name, _: {"group_size": GROUP_SIZE, "bits": bits[name]} if name in bits else False,
    )
    _check(container, model, weights, names)
    model.eval()
    model.load_weights(list(weights.items()))
    if quantize is not None:
        quantize_weights(model, **quantize, is_partly=True)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
        model.eval()
    mx.eval(model.parameters())
    return model, tokenizer


def _expands(container: Container, wanted: Any) -> bool:
    if wanted is not None:
        if not isinstance(wanted, bool):
            raise ModelError(f"expand, in the model_config of a GGUF model, must be true or false, got {shown(wanted)}")
        return wanted
    num_values = sum(math.prod(tensor.shape) for tensor in container.tensors.values())
    return is_on_cpu() and 4 * num_values <= physical_memory() // 2


def _names_of(name: str, config: Mapping[str, Any], model: Module) -> dict[str, str]:
    """mlx-lm's names of modules, by those in the file."""
    arch = next(arch for arch, arch_name in MODEL_ARCH_NAMES.items() if arch_name == name)
    table: TensorNameMap = get_tensor_name_map(arch, config["num_hidden_layers"])
    names = {}
    for leaf in weights_of(model):
        ours = leaf.rpartition(".")[0]
        # gguf's table knows the names of transformers.
        if (found := table.get_name(ours.replace("switch_mlp", "experts"))) is not None:
            names[found] = ours
    return names


def _weights(
    container: Container,
    architecture: Architecture,
    config: Mapping[str, Any],
    names: Mapping[str, str],
    packable: Mapping[str, Module],
    dtype: mx.Dtype,
) -> tuple[dict[str, mx.array], dict[str, int]]:
    """The weights by mlx-lm's names, and the bits of the modules that are quantised."""
    weights: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in container.tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue
        their, _, kind = tensor.name.rpartition(".")
        if (ours := names.get(their)) is None:
            raise ModelError(
                f"{container.named} has the tensor {tensor.name}, which is of no use to mlx-lm's "
                f"{config['model_type']}; give the model in Hugging Face layout"
            )
        num_heads = heads.get(their.rpartition(".")[2]) if architecture.is_permuted else None
        if kind == "weight" and hasattr(packable.get(ours), "to_quantized") and (blocks := packed(tensor, dtype)):
            bits[ours] = blocks.bits
            parts = {"weight": blocks.weight, "scales": blocks.scales, "biases": blocks.biases}
        else:
            # Rounded last, so that a norm's offset costs no precision.
            values = floats_of(tensor, mx.float32 if architecture.norm_offset else dtype)
            if architecture.norm_offset and their.endswith("norm"):
                values = values - architecture.norm_offset
            parts = {kind: values.astype(dtype)}
        for part, values in parts.items():
            weights[f"{ours}.{part}"] = values if num_heads is None else _halves(values, num_heads)
        # Tensor by tensor, so that no more than one is in memory twice.
        mx.eval(list(parts.values()))
    return weights, bits


def _halves(rows: mx.array, num_heads: int) -> mx.array:
    """Rows of each head that were stored as pairs, in the order of the original model: first halves, then second."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _check(container: Container, model: Module, weights: Mapping[str, mx.array], names: Mapping[str, str]) -> None:
    theirs = {ours: their for their, ours in names.items()}
    path = container.named
    for leaf, value in weights_of(model).items():
        module, _, kind = leaf.rpartition(".")
        named = f"{theirs.get(module, module)}.{'weight' if kind in ('scales', 'biases') else kind}"
        if (found := weights.get(leaf)) is None:
            raise ModelError(f"{path} has no tensor {named}; {AGAIN}, or give another conversion of the model")
        if found.shape != value.shape:
            shape = list((container.tensors.get(named) or found).shape)
            raise ModelError(
                f"{path} has the tensor {named} in the shape {shape}, which does not fit its metadata: mlx-lm's "
                f"{leaf} is {list(value.shape)}; give another conversion of the model"
            )
