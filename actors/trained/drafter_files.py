"""Files of drafters: what those of several kinds have in common, as Speculators and transformers write them."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize as quantize_modules
from mlx_lm.utils import dequantize_model

from actors.mlx.model import quantize_weights, weights_of
from protocol.errors import ModelError
from protocol.reprs import listed

# How MLX quantises without biases, by bits and group size.
_MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
_AFFINE_BITS, _AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# Endings of the names of weights that something other than MLX has quantised.
_OF_OTHERS = (".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed", ".weight_scale_2")
_NUM_NAMED = 4  # how many names a message has at most


@attrs.frozen
class DrafterFiles:
    """The folder of a drafter."""

    folder: Path  # with `config.json` and the weights
    config: Mapping[str, Any]  # what `config.json` says
    named: str = "the drafter"  # in messages
    quantize: Mapping[str, Any] | None = None  # `bits`, `group_size` and `mode` for the weights once they are read

    @classmethod
    def read(cls, folder: Path, named: str = "the drafter", quantize: Mapping[str, Any] | None = None) -> DrafterFiles:
        """Read `config.json`. Raises: ModelError: there is none, or it is damaged."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{named} in {folder} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{named} in {folder} cannot be read: its config.json has no settings by name")
        return cls(folder, config, named, quantize)

    def weights(self, pattern: str = "*.safetensors") -> dict[str, mx.array]:
        """The arrays in the safetensors, by name; lazy. Raises: ModelError: there are none, or a file is damaged."""
        return {name: value for arrays, _ in self.weights_and_metadata(pattern) for name, value in arrays.items()}

    def weights_and_metadata(self, pattern: str = "*.safetensors") -> list[tuple[dict[str, mx.array], dict[str, str]]]:
        """For each file, its arrays by name, and its metadata; otherwise as `weights`."""
        try:
            loaded: Any = [mx.load(str(f), return_metadata=True) for f in sorted(self.folder.glob(pattern))]
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self.named} in {self.folder} cannot be read: {error}") from error
        if not any(arrays for arrays, _ in loaded):
            raise ModelError(f"there are no weights ({pattern}) of {self.named} in {self.folder}")
        return list(loaded)

    def fill(self, module: Module, weights: Mapping[str, mx.array]) -> None:
        """Load weights into a module and evaluate them; quantised layers as the shapes of their arrays tell, or, on the
        CPU, in float32, in which MLX multiplies several times faster. Raises: ModelError: they do not fit.
        """
        if foreign := next((name for name in weights if name.endswith(_OF_OTHERS)), None):
            how = self.config.get("quantization_config")
            method = how.get("quant_method") if isinstance(how, Mapping) else None
            raise ModelError(
                f"the weights of {self.named} are quantised in a way that MLX does not have ({method or foreign}); "
                "give the drafter that was not quantised, and quantize with it if it is to be smaller"
            )

        def settings(path: str, layer: Module) -> bool | dict[str, Any]:
            scales = weights.get(f"{path}.scales")
            if scales is None or not hasattr(layer, "to_quantized"):
                return False
            packed, has_biases = weights[f"{path}.weight"], f"{path}.biases" in weights
            width = layer.weight.shape[-1]
            group_size, bits = width // scales.shape[-1], 32 * packed.shape[-1] // width
            is_affine = has_biases and bits in _AFFINE_BITS and group_size in _AFFINE_GROUPS
            mode = "affine" if is_affine else _MODES.get((bits, group_size))
            if mode is None:
                raise ModelError(
                    f"{path} of {self.named} has {bits} bits in groups of {group_size}, in which MLX quantises nothing"
                )
            return {"bits": bits, "group_size": group_size, "mode": mode}

        quantize_modules(module, class_predicate=settings)
        if misfit := _misfit(weights_of(module), weights):
            raise ModelError(f"{self.named} in {self.folder} is not what its configuration says: {misfit}")
        module.load_weights(list(weights.items()))
        if self.quantize is not None:
            quantize_weights(module, **self.quantize)
        elif mx.default_device() == mx.cpu and any(name.endswith(".scales") for name in weights):
            dequantize_model(module)
            module.set_dtype(mx.float32)
        mx.eval(module.state)


def _misfit(own: Mapping[str, mx.array], weights: Mapping[str, mx.array]) -> str:
    """How weights differ from those that a module has; empty if names and shapes are the same."""
    if missing := own.keys() - weights.keys():
        return f"it has no {listed(sorted(missing), _NUM_NAMED)}"
    if superfluous := weights.keys() - own.keys():
        return f"it has {listed(sorted(superfluous), _NUM_NAMED)} as well"
    for name, value in own.items():
        if value.shape != weights[name].shape:
            return f"{name} is {weights[name].shape}, and should be {value.shape}"
    return ""


@contextmanager
def reading_config() -> Iterator[None]:
    """Raises: ModelError: a setting that is read inside the block is missing, or of a wrong type."""
    try:
        yield
    except KeyError as missing:
        raise ModelError(f"the drafter's configuration has no {missing}") from missing
    except TypeError as error:
        raise ModelError(f"the drafter's configuration cannot be read: {error}") from error


def complete(layer: dict[str, Any]) -> tuple[int, int]:
    """Put settings of layers where mlx-lm looks: transformers 5 nests rotary ones. Returns: hidden and vocabulary size.

    Raises: ModelError: some are missing, or layers differ.
    """
    rope = layer.pop("rope_parameters", None)
    if rope:
        if any(isinstance(value, dict) for value in rope.values()):
            raise ModelError("a drafter whose layers have different rotary embeddings is not supported")
        if "rope_theta" in rope:
            layer["rope_theta"] = rope["rope_theta"]
        if layer.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
            layer["rope_scaling"] = rope
    layer.setdefault("rope_theta", 10_000.0)
    layer.setdefault("max_position_embeddings", 2048)
    layer.setdefault("tie_word_embeddings", False)
    with reading_config():
        hidden_size, vocab_size = int(layer["hidden_size"]), int(layer["vocab_size"])
        layer.setdefault("head_dim", hidden_size // int(layer["num_attention_heads"]))
    return hidden_size, vocab_size


def check_feature_layers(ids: Sequence[int], num_layers: int) -> None:
    """Raises: ModelError: a target lacks some of these layers. Its number of layers means the output of the last."""
    if len(set(ids)) != len(ids) or not all(0 <= layer <= num_layers for layer in ids):
        raise ModelError(
            f"the drafter reads what enters layers {', '.join(map(str, ids))} of its target, which has {num_layers}; "
            "it was made for another one"
        )


def target_ids_of(offsets: mx.array | None, draft_vocab_size: int, vocab_size: int, folder: Path) -> mx.array | None:
    """(draft_vocab_size,) int32: the target's id for each of a drafter's, by the differences that a file has as `d2t`;
    None if the vocabularies are the same. Raises: ModelError: `d2t` is missing, or cannot be meant for them.
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
    """(…, draft_vocab_size) logits to (…, vocab_size), by the target's ids; -inf for ids that a drafter lacks; lazy."""
    if target_ids is None:
        return logits
    nothing = mx.full((*logits.shape[:-1], vocab_size), -mx.inf, dtype=logits.dtype)
    return mx.put_along_axis(nothing, mx.broadcast_to(target_ids, logits.shape), logits, axis=-1)


def split_heads(projected: mx.array, num_heads: int, norm: Module | None = None) -> mx.array:
    """(B, T, heads · width) → (B, heads, T, width), normalised if there is a norm; lazy."""
    split = projected.reshape(*projected.shape[:2], num_heads, -1)
    return (split if norm is None else norm(split)).swapaxes(1, 2)


def check_named_target(config: Mapping[str, Any], target: Module, named: str) -> None:
    """Raises: ModelError: the target is of another kind than a drafter's `config.json` names in Speculators' form.
    Names of models are not compared: conversions and fine-tuned models have others.
    """
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    if not isinstance(verifier, Mapping):
        return
    architectures = verifier.get("architectures")
    wanted = {_family(str(name)) for name in (architectures if isinstance(architectures, list) else ())}
    module = type(target).__module__.rpartition(".")[2]
    given = {_family(str(name)) for name in (module, getattr(getattr(target, "args", None), "model_type", module))}
    # Only if mlx-lm knows the named kinds: another name may mean the same kind.
    known = {_family(module.name) for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    if wanted and wanted <= known and not wanted & given:
        made_for = f" ({name})" if (name := verifier.get("name_or_path")) else ""
        raise ModelError(
            f"{named} was made for a target of the kind {' or '.join(map(str, architectures or ()))}{made_for}, and "
            f"this one is a {module}"
        )


def _family(name: str) -> str:
    """What all names of a kind of models have in common, such as `Qwen3MoeForCausalLM` and `qwen3_moe`."""
    spelled = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|_text)$", "", name)
    return spelled.replace("_", "").lower()
