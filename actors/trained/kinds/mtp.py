"""MTP: a decoder layer that comes with a target, and predicts the token after the next.

Position t of the layer reads the hidden state that the target's head reads at position t, and the embedding of the
token at position t + 1. It predicts the token at position t + 2. Where the target has not computed a position yet, the
layer's own hidden state stands for the target's. Embedding and head are the target's, or the layer's own.

Of several layers, layer k reads at position t the hidden state that the layer before it gave there, and the token at
position t + 1 + k; the last one drafts all further tokens.

The weights are in the target's own files, where mlx-lm drops them, or in a folder of their own: under the same names,
or as mlx-vlm writes them, which leaves out the beginnings of the names, and adds the 1 that norms in Qwen's files lack.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2; for what lies around the
decoder layer in each family, vLLM (https://github.com/vllm-project/vllm, `vllm/model_executor/models/*_mtp.py`); for
several layers, the report, and SGLang's pull request 18564 (https://github.com/sgl-project/sglang), which does the same
for Step 3.5; for folders of their own, mlx-vlm (https://github.com/Blaizzy/mlx-vlm, `mlx_vlm/speculative/drafters`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import (
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    mimo,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    step3p5,
)
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import MODEL_REMAPPING

from actors.trained.depth_sequence import DepthSequence, ModulePass
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.target_parts import Attached, Layer, embedding_of, final_norm_of, head_of
from protocol.errors import ModelError


def _one_layer(args: Mapping[str, Any], config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """One layer with full attention, and with experts if the family has any."""
    dense = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return {"num_hidden_layers": 1, "full_attention_interval": 1, **dense}


@attrs.frozen
class _Family:
    """What lies around the decoder layer in a family, and where."""

    module: Any  # mlx-lm's, with the family's classes
    prefix: str  # pattern of the beginning of the names of all weights; empty where mlx-vlm has left it out
    embedding_norm: str  # the rest of the name of each of these four
    hidden_norm: str
    projection: str
    output_norm: str
    # The arguments of a model to change, so that its layers are those of MTP; by all of them, the configuration, and
    # the number of the layer.
    changes: Callable[[Mapping[str, Any], Mapping[str, Any], int], Mapping[str, Any]] = _one_layer
    layers: str = ""  # pattern of what stands before the names of a decoder layer's weights, after the prefix
    hidden_first: bool = False  # the hidden state is the first half of what is projected
    normalizes_output: bool = True  # the hidden state that goes on is the normalised one
    norms_from_one: bool = False  # the original files have the weights of norms minus one
    renamed: tuple[tuple[str, str], ...] = ()  # patterns in names, and what the rest of the family has in their place
    brings_own: bool = False  # an embedding and a head beside the layer are its own, not copies of the target's
    inner: str = "model"  # where the class has its layers
    is_chain: bool = True  # each layer reads the output of the one before it; otherwise only the first is used


def _nemotron_layers(args: Mapping[str, Any], config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    pattern = config.get("mtp_hybrid_override_pattern") or [
        nemotron_h.ModelArgs._block_type_to_char.get(kind, kind) for kind in config.get("mtp_layers_block_type") or ()
    ]
    if not pattern or set(pattern) - {"*", "E", "-"}:
        raise ModelError(
            "the configuration of an MTP layer of Nemotron-H must say in mtp_hybrid_override_pattern which layers it "
            f"has, of attention (*), experts (E) and dense ones (-), got {''.join(pattern) or None!r}"
        )
    return {"hybrid_override_pattern": list(pattern), "num_hidden_layers": len(pattern)}


def _step_layer(args: Mapping[str, Any], config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The layer of this number: lists of settings by layer go on after the target's layers."""
    number = max(number, int(args["num_hidden_layers"]))
    lists = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
    changed = {
        name: [value[number]] for name in lists if isinstance(value := args.get(name), list) and number < len(value)
    }
    with_experts = str(number) in str(args.get("moe_layers_enum") or "").split(",")
    return {"num_hidden_layers": 1, "moe_layers_enum": "0" if with_experts else None} | changed


_NEXTN = _Family(
    deepseek_v3,
    r"model\.layers\.(\d+)\.|model\.|",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    normalizes_output=False,
    renamed=(
        (r"\b(?:mtp_block|transformer)\.", ""),
        (r"shared_head_norm\.", "shared_head.norm."),
        (r"shared_head\.output\.", "shared_head.head."),
        (r"^lm_head\.", "model.shared_head.head."),
    ),
)
_QWEN = _Family(
    qwen3_next,
    r"(?:.+\.)?mtp\.|",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    layers=r"layers\.(\d+)\.",
    norms_from_one=True,
)
# By the name of mlx-lm's module.
_FAMILIES: dict[str, _Family] = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": attrs.evolve(_NEXTN, module=glm4_moe),
    "glm4_moe_lite": attrs.evolve(_NEXTN, module=glm4_moe_lite, brings_own=True),
    "mimo": _Family(
        mimo,
        r"model\.mtp_layers\.(\d+)\.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
        # Its published files have one layer, and its successors do not chain theirs.
        is_chain=False,
    ),
    "nemotron_h": _Family(
        nemotron_h,
        r"(?:.+\.)?mtp\.|",
        "layers.0.enorm",
        "layers.0.hnorm",
        "layers.0.eh_proj",
        "final_layernorm",
        _nemotron_layers,
        layers=r"layers\.(\d+)\.",
        renamed=((r"layers\.\d+\.final_layernorm\.", "final_layernorm."),),
        inner="backbone",
    ),
    "qwen3_5": attrs.evolve(_QWEN, module=qwen3_5),
    "qwen3_5_moe": attrs.evolve(_QWEN, module=qwen3_5_moe),
    "qwen3_next": _QWEN,
    "step3p5": attrs.evolve(_NEXTN, module=step3p5, changes=_step_layer, norms_from_one=True, brings_own=True),
}
# An embedding and a head in a layer's files.
_EMBEDDING, _HEAD = "embed_tokens.", "shared_head.head."
_OF_TARGET = (_EMBEDDING, _HEAD, "lm_head.")
_EXPERT = re.compile(r"(?P<before>.*\.)experts\.(?P<number>\d+)\.(?P<after>.+)")
# Endings of names that only weights converted to MLX have.
_CONVERTED = (".scales", ".switch_mlp.gate_proj.weight", ".switch_mlp.fc1.weight")


class MTP(Module):
    """The layer, with what lies around it."""

    def __init__(self, family: _Family, small: Any, args: Mapping[str, Any]) -> None:
        """Make a layer with random weights; `small` is a model of the target's class whose layers are those of MTP."""
        super().__init__()  # type: ignore[no-untyped-call]
        hidden_size, eps = int(args["hidden_size"]), float(args.get("rms_norm_eps", args.get("layer_norm_epsilon")))
        self.hidden_first, self.normalizes_output = family.hidden_first, family.normalizes_output
        self.window = args["sliding_window"] if getattr(small.layers[0], "is_sliding", False) else None
        self.quant_predicate = getattr(small, "quant_predicate", None) or (lambda path, layer: True)
        self.embedding_norm = RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.projection = Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = list(small.layers)
        self.output_norm = RMSNorm(hidden_size, eps=eps)


def _attends(layer: Module) -> bool:
    return getattr(layer, "block_type", "*") == "*"


class MTPReader:
    """An MTP layer with its target's norm, embedding and head; see `FeatureReader`."""

    def __init__(self, model: MTP, final_norm: Layer, embed: Layer, head: Layer, vocab_size: int) -> None:
        self._model, self._final_norm = model, final_norm
        self._embed: Layer = model.get("embedding", embed)
        self._head: Layer = model.get("head", head)
        self.vocab_size, self.feature_width = vocab_size, model.output_norm.weight.shape[0]

    def project(self, features: mx.array) -> mx.array:
        return self._final_norm(features)

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for layer in self._model.layers if _attends(layer)]

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        model = self._model
        halves = [model.embedding_norm(self._embed(tokens)), model.hidden_norm(hidden)]
        given = model.projection(mx.concatenate(halves[::-1] if model.hidden_first else halves, axis=-1))
        # An array, since attention to latent keys adds it to the scores.
        mask = create_attention_mask(given, cache[0], window_size=model.window, return_array=True)
        caches = iter(cache)
        for layer in model.layers:
            given = layer(given, mask, next(caches) if _attends(layer) else None)
        normalized = model.output_norm(given)
        return normalized if model.normalizes_output else given, self._head(normalized)


class MTPLayers(Module):
    """The layers of a drafter, that of the first token first."""

    def __init__(self, depths: list[MTP]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depths = depths


def load_mtp(files: DrafterFiles, target: Module) -> MTPLayers:
    """The MTP layers in the target's own folder, or in one with the layers alone, with the target's arguments. Raises:
    ModelError: the target's family has none, the files have none, or they are another target's.
    """
    model_type, named = type(target).__module__.rpartition(".")[2], files.named
    if model_type not in _FAMILIES:
        raise ModelError(
            f"{named} is an MTP layer, and those of {model_type} targets are not supported; those of "
            f"{', '.join(_FAMILIES)} are"
        )
    family = _FAMILIES[model_type]
    text_model: Any = target.get("language_model", target)
    args = vars(text_model.args)
    config = files.config.get("text_config") or files.config
    _check_target(config, model_type, args, named)
    hidden_size, depths = int(args["hidden_size"]), list[MTP]()
    for number, weights, is_converted in _weights(files, family):
        norm = weights.get(f"{family.hidden_norm}.weight")
        if norm is not None and norm.size != hidden_size:
            raise ModelError(
                f"{named} reads hidden states of a width of {norm.size}, and those of this target have {hidden_size}"
            )
        small = _small_model(family.module, cast(Any, target).args, family.changes(args, config, number))
        layer = re.compile(family.layers)
        behind_one = {int(found[1]) for name in weights if layer.groups and (found := layer.match(name))}
        if len(behind_one) > len(small.layers):
            raise ModelError(
                f"{named} has {len(behind_one)} layers behind one projection, and implementations disagree on how to "
                f"use them; one with {len(small.layers)} is supported"
            )
        model = MTP(family, small, args)
        for part, prefix in (("embedding", _EMBEDDING), ("head", _HEAD)) if family.brings_own else ():
            if (own := weights.get(f"{prefix}weight")) is None:
                continue
            # An index out of bounds would read other memory.
            if (num_ids := own.shape[0]) < args["vocab_size"]:
                raise ModelError(
                    f"the {part} of {named} has {num_ids} ids, and its target {args['vocab_size']}; it was made for "
                    "another one"
                )
            is_head = part == "head"
            model[part] = Linear(hidden_size, num_ids, bias=False) if is_head else Embedding(num_ids, hidden_size)
        files.fill(model, _named(family, small, weights, is_converted))
        depths.append(model)
    return MTPLayers(depths)


def names_a_layer(names: Iterable[str], model_type: str) -> bool:
    """Whether weights of these names, in the files of a model of this `model_type`, include an MTP layer."""
    family = _FAMILIES.get(MODEL_REMAPPING.get(model_type, model_type))
    return family is not None and any(_projection(family, _renamed(family, name)) for name in names)


def attach_mtp(files: DrafterFiles, target: Module, target_vocab_size: int) -> Attached:
    """See `TrainedDrafter`."""
    model = load_mtp(files, target)
    parts = final_norm_of(target, files.named), embedding_of(target, files.named), head_of(target, files.named)
    passes = ModulePass.each(MTPReader(layer, *parts, target_vocab_size) for layer in model.depths)
    open_sequence = partial(DepthSequence, passes)
    return Attached((len(target.layers),), target_vocab_size, open_sequence, model, target_vocab_size, passes=passes)


def _check_target(config: Mapping[str, Any], model_type: str, args: Mapping[str, Any], named: str) -> None:
    of_file = str(config.get("model_type", model_type)).removesuffix("_mtp").removesuffix("_text")
    # Sidecars have names of their own, such as "deepseek_mtp".
    if of_file in _FAMILIES and of_file != model_type:
        raise ModelError(f"{named} was made for a {of_file} target, and this one is a {model_type}")
    for name in ("hidden_size", "vocab_size"):
        if (found := config.get(name)) is not None and found != args[name]:
            raise ModelError(f"{named} was made for a target with {name} {found}, and this one has {args[name]}")


def _weights(files: DrafterFiles, family: _Family) -> list[tuple[int, dict[str, mx.array], bool]]:
    """The numbers of the MTP layers, their weights by their names after the prefix, and whether they are converted."""
    loaded: dict[str, mx.array] = {}
    formats: dict[str, str | None] = {}
    for arrays, metadata in files.weights_and_metadata():
        for given, value in arrays.items():
            name = _renamed(family, given)
            loaded[name], formats[name] = value, metadata.get("format")
    found = [match for name in loaded if (match := _projection(family, name))]
    if not found:
        raise ModelError(
            f"there are no weights of an MTP layer in {files.folder}: many conversions of a model leave it out; give "
            "the folder of the original model, or one with the layer alone, as draft"
        )
    left_out = ("lm_head.",) if family.brings_own else _OF_TARGET
    layers = []
    for projection_of in sorted(found, key=_number)[: None if family.is_chain else 1]:
        prefix = projection_of[1]
        weights = {
            name.removeprefix(prefix or "model."): value for name, value in loaded.items() if name.startswith(prefix)
        }
        is_converted = not prefix or any(name.endswith(_CONVERTED) for name in weights)
        kept = {name: value for name, value in weights.items() if not name.startswith(left_out)}
        layers.append((_number(projection_of), kept, is_converted or formats[projection_of[0]] == "mlx"))
    return layers


def _renamed(family: _Family, name: str) -> str:
    for pattern, other in family.renamed:
        name = re.sub(pattern, other, name)
    return name


def _projection(family: _Family, name: str) -> re.Match[str] | None:
    """The match, if a name is that of a layer's projection; it has the number of the layer, if the names have one."""
    return re.fullmatch(rf"({family.prefix}){re.escape(family.projection)}\.weight", name)


def _number(projection: re.Match[str]) -> int:
    """The number of a layer in the name of its projection; 0 without one."""
    return int(projection[2] or 0) if projection.re.groups > 1 else 0


def _small_model(module: Any, args: Any, changes: Mapping[str, Any]) -> Module:
    """A model of the target's class with the layers that MTP has. Its weights are never computed."""
    changed = copy.copy(args)
    if hasattr(args, "text_config"):
        changed.text_config = args.text_config | changes
    else:
        for name, value in changes.items():
            if hasattr(args, name):
                setattr(changed, name, value)
    return cast(Module, module.Model(changed))


def _named(family: _Family, small: Any, weights: Mapping[str, mx.array], is_converted: bool) -> dict[str, mx.array]:
    """Weights by the names of `MTP`, as mlx-lm's classes have them."""
    if family.norms_from_one and not is_converted:
        weights = {name: value + 1.0 if _is_norm(name, value) else value for name, value in weights.items()}
    around = {
        f"{family.embedding_norm}.": "embedding_norm.",
        f"{family.hidden_norm}.": "hidden_norm.",
        f"{family.projection}.": "projection.",
        f"{family.output_norm}.": "output_norm.",
        _EMBEDDING: "embedding.",
        _HEAD: "head.",
    }
    own: dict[str, mx.array] = {}
    of_layers: dict[str, mx.array] = {}
    layer = re.compile(family.layers)
    for name, value in weights.items():
        if before := next((before for before in around if name.startswith(before)), None):
            own[around[before] + name.removeprefix(before)] = value
        elif match := layer.match(name):
            of_layers[f"{family.inner}.layers.{match[1] if match.lastindex else 0}.{name[match.end() :]}"] = value
    if family.norms_from_one:
        # Qwen's classes take separate experts as a sign that norms lack one.
        of_layers = _stacked(of_layers)
    for name, value in _stacked(small.sanitize(of_layers)).items():
        own[name.removeprefix("language_model.").removeprefix(f"{family.inner}.")] = value
    return own


def _is_norm(name: str, value: mx.array) -> bool:
    return value.ndim == 1 and "norm" in name.removesuffix(".weight").rpartition(".")[2]


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
