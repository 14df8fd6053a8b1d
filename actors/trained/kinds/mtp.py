"""MTP: a decoder layer that a target brings along, and that predicts the token after the next.

Position t of the layer reads the hidden state that the target's head reads at position t, and the embedding of the
token at position t + 1. It predicts the token at position t + 2. Where the target has not computed a position yet, the
layer's own hidden state stands for the target's. Embedding and head are the target's.

The weights lie in the target's own files, where mlx-lm drops them, or in a folder of their own under the same names.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2; for what lies around the
decoder layer in each family, vLLM (https://github.com/vllm-project/vllm, `vllm/model_executor/models/*_mtp.py`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import deepseek_v3, glm4_moe, mimo, qwen3_5, qwen3_5_moe, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from actors.trained.kinds.target_parts import Layer
from protocol.errors import ModelError


@attrs.frozen
class _Family:
    """What lies around the decoder layer in a family, and where.

    Attributes:
        prefix: pattern of the beginning of the names of all weights.
        embedding_norm, hidden_norm, projection, output_norm: the rest of their names.
        layer: what stands before the names of the decoder layer's weights, after the prefix.
        hidden_first: whether the hidden state is the first half of what is projected.
        normalizes_output: whether the hidden state that goes on is the normalised one.
        norms_from_one: whether the files have the difference of a norm's weights to one.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    layer: str = ""
    hidden_first: bool = False
    normalizes_output: bool = True
    norms_from_one: bool = False


_NEXTN = _Family(r"model\.layers\.\d+\.", "enorm", "hnorm", "eh_proj", "shared_head.norm", normalizes_output=False)
_QWEN = _Family(
    r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.", norms_from_one=True
)
_MIMO = _Family(
    r"model\.mtp_layers\.0\.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
)
# By the name of mlx-lm's module: the family, and the module.
_FAMILIES: dict[str, tuple[_Family, Any]] = {
    "deepseek_v3": (_NEXTN, deepseek_v3),
    "glm4_moe": (_NEXTN, glm4_moe),
    "mimo": (_MIMO, mimo),
    "qwen3_5": (_QWEN, qwen3_5),
    "qwen3_5_moe": (_QWEN, qwen3_5_moe),
    "qwen3_next": (_QWEN, qwen3_next),
}
# Arguments of a model whose one layer is of the kind that MTP has: full attention, and experts if it has any.
_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# Weights of the target that a layer's files may have once more.
_OF_TARGET = ("shared_head.head.", "embed_tokens.", "lm_head.")
_EXPERT = re.compile(r"(?P<before>.*\.)experts\.(?P<number>\d+)\.(?P<after>.+)")


class MTP(Module):
    """The layer, with what lies around it."""

    def __init__(self, family: _Family, layer: Module, hidden_size: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden_first = family.hidden_first
        self._normalizes_output = family.normalizes_output
        self.embedding_norm = RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.projection = Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.output_norm = RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process positions after the cached ones.

        Args:
            hidden: (B, W, hidden size) normalised hidden states of the target, or the layer's own.
            embedded: (B, W, hidden size) embeddings of the tokens one position further on.
            cache: of the one layer.

        Returns: (B, W, hidden size) hidden states for the next positions, and for the head; lazy.
        """
        halves = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        inputs = self.projection(mx.concatenate(halves[::-1] if self._hidden_first else halves, axis=-1))
        # An array, since attention to latent keys adds it to the scores.
        mask = create_attention_mask(inputs, cache[0], return_array=True)
        given = self.layer(inputs, mask, cache[0])
        normalized = self.output_norm(given)
        return normalized if self._normalizes_output else given, normalized


class MTPReader:
    """An MTP layer with its target's norm, embedding and head; see `FeatureReader`.

    Attributes:
        vocab_size: the target's.
        feature_width: width of the target's hidden states.
    """

    def __init__(self, model: MTP, final_norm: Layer, embed: Layer, head: Layer, vocab_size: int) -> None:
        """Make a reader.

        Args:
            model: the layer.
            final_norm, embed, head: the target's; see `actors.trained.kinds.target_parts`.
            vocab_size: width of the head's logits.
        """
        self._model, self._final_norm, self._embed, self._head = model, final_norm, embed, head
        self.vocab_size, self.feature_width = vocab_size, model.output_norm.weight.shape[0]

    def project(self, features: mx.array) -> mx.array:
        return self._final_norm(features)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        given, normalized = self._model(hidden[None], self._embed(tokens)[None], cache)
        return given[0], self._head(normalized[0])


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an MTP layer in a folder of its own."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return any("mtp" in str(name).lower() for name in names)


def load_mtp(folder: Path, target: Module, named: str) -> MTP:
    """Load the MTP layer in a folder with safetensors: the target's own folder, or one with the layer alone.

    If there are several layers, the first is taken for every position.

    Args:
        folder: with its files, and `config.json`.
        target: mlx-lm's model, whose arguments are the layer's, too.
        named: the drafter, for messages.

    Raises: ModelError: the target's family has no such layer, or the files do not; or the layer is another target's.
    """
    model_type = type(target).__module__.rpartition(".")[2]
    if model_type not in _FAMILIES:
        raise ModelError(
            f"{named} is an MTP layer, and those of {model_type} targets are not supported; those of "
            f"{', '.join(_FAMILIES)} are"
        )
    family, module = _FAMILIES[model_type]
    text_model: Any = target.get("language_model", target)
    args = vars(text_model.args)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights, is_converted = _weights(folder, family)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the MTP layer in {folder} cannot be read: {error}") from error
    _check_target(config, model_type, args, named)
    if f"{family.projection}.weight" not in weights:
        raise ModelError(
            f"there are no weights of an MTP layer in {folder}: conversions to MLX drop them; give the folder of the "
            "original model, or one with the layer alone, as draft"
        )
    return _filled(family, _one_layer_model(module, target.args), weights, is_converted, args, named)


def _check_target(config: Mapping[str, Any], model_type: str, args: Mapping[str, Any], named: str) -> None:
    """Raise an error if the configuration beside a layer is not that of its target."""
    config = config.get("text_config") or config
    of_file = str(config.get("model_type", model_type)).removesuffix("_mtp").removesuffix("_text")
    # Sidecars have names of their own, such as "deepseek_mtp".
    if of_file in _FAMILIES and of_file != model_type:
        raise ModelError(f"{named} was made for a {of_file} target, and this one is a {model_type}")
    for name in ("hidden_size", "vocab_size"):
        if (found := config.get(name)) is not None and found != args[name]:
            raise ModelError(f"{named} was made for a target with {name} {found}, and this one has {args[name]}")


def _weights(folder: Path, family: _Family) -> tuple[dict[str, mx.array], bool]:
    """The weights of the first MTP layer, by their names after the prefix, and whether mlx-lm has converted them."""
    prefix = re.compile(family.prefix)
    loaded: dict[str, mx.array] = {}
    is_converted = False
    for file in sorted(folder.glob("*.safetensors")):
        arrays, metadata = mx.load(str(file), return_metadata=True)
        of_layer = {name: value for name, value in arrays.items() if prefix.match(name)}  # type: ignore[union-attr]
        is_converted |= bool(of_layer) and metadata.get("format") == "mlx"  # type: ignore[union-attr]
        loaded |= of_layer
    # Where the layer is one among the target's, the projection says which one.
    projections = sorted(name for name in loaded if name.endswith(f".{family.projection}.weight"))
    if not projections:
        return {}, is_converted
    first = projections[0].removesuffix(f"{family.projection}.weight")
    named = {name.removeprefix(first): value for name, value in loaded.items() if name.startswith(first)}
    return {name: value for name, value in named.items() if not name.startswith(_OF_TARGET)}, is_converted


def _one_layer_model(module: Any, args: Any) -> Module:
    """A model of the target's class with one layer of the kind that MTP has. Its weights are never computed."""
    changed = copy.copy(args)
    if hasattr(args, "text_config"):
        changed.text_config = args.text_config | _ONE_LAYER
    else:
        for name, value in _ONE_LAYER.items():
            if hasattr(args, name):
                setattr(changed, name, value)
    model: Module = module.Model(changed)
    return model


def _filled(
    family: _Family,
    small: Any,
    weights: Mapping[str, mx.array],
    is_converted: bool,
    args: Mapping[str, Any],
    named: str,
) -> MTP:
    around = {
        f"{family.embedding_norm}.weight": "embedding_norm.weight",
        f"{family.hidden_norm}.weight": "hidden_norm.weight",
        f"{family.projection}.weight": "projection.weight",
        f"{family.output_norm}.weight": "output_norm.weight",
    }
    own = {around[name]: value for name, value in weights.items() if name in around}
    if family.norms_from_one and not is_converted:
        own = {name: value + 1.0 if value.ndim == 1 else value for name, value in own.items()}
    of_layer = {
        name.removeprefix(family.layer): value
        for name, value in weights.items()
        if name not in around and name.startswith(family.layer)
    }
    own |= {f"layer.{name}": value for name, value in _sanitized(small, of_layer, is_converted).items()}
    hidden_size = int(args["hidden_size"])
    if (width := own["projection.weight"].shape[0]) != hidden_size:
        raise ModelError(
            f"{named} reads hidden states of a width of {width}, and those of this target have {hidden_size}"
        )
    model = MTP(family, small.layers[0], hidden_size, float(args["rms_norm_eps"]))
    try:
        model.load_weights(list(own.items()))
    except ValueError as error:
        raise ModelError(f"the weights of {named} do not fit its target: {error}") from error
    mx.eval(model.state)
    return model


def _sanitized(small: Any, weights: Mapping[str, mx.array], is_converted: bool) -> dict[str, mx.array]:
    """The weights of a layer as mlx-lm's class has them, by the conversion that the class brings."""
    layer = "model.layers.0."
    named = {layer + name: value for name, value in weights.items()}
    if not is_converted:
        # Qwen's classes look at such a weight to find out whether weights are converted already.
        named["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 2))
    given = {name: value for name, value in small.sanitize(named).items() if "linear_attn" not in name}
    own = {name.removeprefix("language_model.").removeprefix(layer): value for name, value in given.items()}
    return _stacked(own)


def _stacked(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights with those of single experts, if any are left, in one array each."""
    stacked: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        if (expert := _EXPERT.fullmatch(name)) is None:
            stacked[name] = value
        else:
            experts.setdefault(f"{expert['before']}switch_mlp.{expert['after']}", {})[int(expert["number"])] = value
    return stacked | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}
