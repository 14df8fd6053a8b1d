"""EAGLE-3: a decoder layer that drafts from hidden states of its target.

Position i reads the token at position i + 1 of the text, and the target's *features* at position i: the hidden states
that enter three of its layers, side by side, or what its head reads. It predicts the token at position i + 2. Where the
target has not computed a position yet, the drafter's own hidden state stands for the features.

P-EAGLE predicts several tokens in one pass: after the last position with features come rows that read a mask token and
a hidden state of its own, and each predicts one token further on.

Sources: Li, Wei, Zhang and Zhang 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840; for P-EAGLE, Speculators' `models/peagle`. Files: those of the authors
(https://github.com/SafeAILab/EAGLE), of SpecForge (https://github.com/sgl-project/SpecForge), of NVIDIA, and of
Speculators (https://github.com/vllm-project/speculators).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from actors.mlx.model import weights_of
from actors.trained.depth_sequence import DepthSequence, Masks, ModulePass
from actors.trained.drafter_files import (
    DrafterFiles,
    check_feature_layers,
    complete,
    reading_config,
    target_ids_of,
    widened,
)
from actors.trained.kinds.recognition import kind_of
from actors.trained.kinds.target_parts import Attached, Layer, check_target, embedding_of, final_norm_of
from protocol.errors import ModelError

# By `model_type`: the arguments of a layer and the layer.
_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (llama.ModelArgs, llama.TransformerBlock),
    "qwen3": (qwen3.ModelArgs, qwen3.TransformerBlock),
}
# How the names of a layer's weights begin in the authors' files, and in Speculators'.
_AUTHORS_LAYER, _LAYER = "midlayer.", "layers.0."
# Weights of the target that Speculators may have saved along.
_OF_TARGET = ("verifier_norm.", "verifier_lm_head.", "t2d")
_EMBEDDING = "embed_tokens."
_NUM_DEPTHS = 8  # tokens that P-EAGLE predicts if the files do not say: Speculators' default


@attrs.frozen
class Eagle3Config:
    """The configuration of an EAGLE-3 drafter."""

    architecture: Literal["llama", "qwen3"]  # of its layers
    layer: Mapping[str, Any]  # as mlx-lm's `ModelArgs` takes it
    draft_vocab_size: int
    vocab_size: int  # width of the target's logits
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None  # ascending; None for the default, see `feature_layers_of`
    reads_output: bool = False  # the features are what the target's head reads
    normalizes_residual: bool = False  # the residual is the normalised hidden state
    normalizes_features: Literal["whole", "each"] | None = None  # all of a position together, or each layer's
    normalizes_output: bool = False  # the hidden state that goes on is the normalised one
    mask_token_id: int = 0  # the target's id of the tokens that P-EAGLE puts after the text
    num_parallel: int = 0  # how many of them; 0 for EAGLE-3

    @property
    def hidden_size(self) -> int:
        """Width of the drafter's hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def num_feature_layers(self) -> int:
        """How many hidden states of the target a position's features are."""
        if self.reads_output:
            return 1
        return 3 if self.feature_layers is None else len(self.feature_layers)

    def feature_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target with `num_layers` whose inputs are the features. Raises: ModelError: it lacks some."""
        if self.reads_output:
            return (num_layers,)
        ids = (2, num_layers // 2, num_layers - 3) if self.feature_layers is None else self.feature_layers
        check_feature_layers(ids, num_layers)
        return ids


def read_config(config: Mapping[str, Any]) -> Eagle3Config:
    """The configuration from a drafter's `config.json`. Raises: ModelError: some is missing, or not supported."""
    speculators = "transformer_layer_config" in config
    layer = dict(config["transformer_layer_config"] if speculators else config)
    architecture = layer.get("model_type", "llama")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"an EAGLE-3 drafter with layers of the kind {architecture!r} is not supported; those of "
            f"{' and '.join(_ARCHITECTURES)} are"
        )
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ModelError("an EAGLE-3 drafter with sliding windows is not supported")
    # NVIDIA's files have the flags inside.
    flags = {**config, **(config.get("eagle_config") or {})}
    if flags.get("norm_before_fc") and flags.get("fc_norm"):
        raise ModelError("the drafter's configuration has both norm_before_fc and fc_norm, which exclude each other")
    hidden_size, vocab_size = complete(layer)
    mask_token_id, num_parallel = _masks(config) if kind_of(config) == "P-EAGLE" else (0, 0)
    found = Eagle3Config(
        architecture=architecture,
        layer=layer,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        vocab_size=vocab_size,
        target_hidden_size=int(config.get("target_hidden_size") or hidden_size),
        feature_layers=_entered(flags.get("eagle_aux_hidden_state_layer_ids"), is_of_speculators=speculators),
        reads_output=flags.get("use_aux_hidden_state") is False,
        normalizes_residual=bool(flags.get("norm_before_residual", False)),
        normalizes_features="whole" if flags.get("norm_before_fc") else "each" if flags.get("fc_norm") else None,
        normalizes_output=bool(flags.get("norm_output", False)),
        mask_token_id=mask_token_id,
        num_parallel=num_parallel,
    )
    if found.reads_output and found.target_hidden_size != hidden_size:
        raise ModelError(
            f"the drafter's configuration has a width of {hidden_size}, and reads the target's output "
            f"(use_aux_hidden_state is false), which has {found.target_hidden_size}; the two must be the same"
        )
    return found


def _masks(config: Mapping[str, Any]) -> tuple[int, int]:
    """The id of P-EAGLE's mask token, and how many of them come after the text."""
    mask_token_id = config.get("mask_token_id", config.get("ptd_token_id"))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    num_depths = methods[0].get("speculative_tokens", _NUM_DEPTHS)
    if not isinstance(mask_token_id, int):
        raise ModelError(f"a P-EAGLE drafter must say which token its mask is (mask_token_id), got {mask_token_id}")
    if not isinstance(num_depths, int) or num_depths < 2:
        raise ModelError(f"a P-EAGLE drafter must foresee 2 tokens or more (speculative_tokens), got {num_depths}")
    return mask_token_id, num_depths - 1


def _entered(ids: Any, *, is_of_speculators: bool) -> tuple[int, ...] | None:
    """The layers whose inputs a configuration means; None if it names none. Most files name the layer that a hidden
    state enters; SpecForge's the layer that gives it, beginning with 1, whose output enters layer 2, the paper's first.
    """
    if not ids:
        return None
    names_outputs = not is_of_speculators and ids[0] == 1
    return tuple(int(layer) + names_outputs for layer in ids)


class Eagle3(Module):
    """The drafter's weights and forward pass."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        arguments, block = _ARCHITECTURES[config.architecture]
        with reading_config():
            args = arguments.from_dict({"model_type": config.architecture, **config.layer})
        hidden_size = config.hidden_size
        if not config.reads_output:
            self.fc = Linear(config.num_feature_layers * config.target_hidden_size, hidden_size, bias=False)
        self.layers = [block(args) for _ in range(args.num_hidden_layers)]
        # The first layer attends to embeddings and hidden states side by side.
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = attention[name]
            attention[name] = Linear(2 * hidden_size, narrow.weight.shape[0], bias="bias" in narrow)
        self.hidden_norm = RMSNorm(hidden_size, eps=args.rms_norm_eps)
        self.norm = RMSNorm(hidden_size, eps=args.rms_norm_eps)
        self.lm_head = Linear(hidden_size, config.draft_vocab_size, bias=False)
        if config.num_parallel > 0:
            self.mask_hidden = mx.zeros((1, 1, config.num_feature_layers * config.target_hidden_size))
        if config.normalizes_features == "whole":
            self.input_norm = RMSNorm(config.num_feature_layers * config.target_hidden_size, eps=args.rms_norm_eps)
        elif config.normalizes_features == "each":
            self.fc_norm = [
                RMSNorm(config.target_hidden_size, eps=args.rms_norm_eps) for _ in range(config.num_feature_layers)
            ]

    def project(self, features: mx.array) -> mx.array:
        """(…, layers · target's hidden size) features to (…, hidden size) hidden states; lazy."""
        if self.config.normalizes_features == "whole":
            features = self.input_norm(features)
        elif self.config.normalizes_features == "each":
            parts = mx.split(features, len(self.fc_norm), axis=-1)
            features = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        projected: mx.array = features if self.config.reads_output else self.fc(features)
        return projected

    def __call__(self, hidden: mx.array, embedded: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process positions after the cached ones: (B, W, hidden size) projected features or own hidden states, and
        embeddings of the tokens one position further on. Returns: hidden states for the next positions, and (B, W,
        draft_vocab_size) logits; lazy.
        """
        mask = create_attention_mask(embedded, cache[0])

        def attend(index: int, inputs: mx.array) -> mx.array:
            attended: mx.array = self.layers[index].self_attn(inputs, mask, cache[index])
            return attended

        return self.step(hidden, embedded, attend)

    def step(
        self, hidden: mx.array, embedded: mx.array, attend: Callable[[int, mx.array], mx.array]
    ) -> tuple[mx.array, mx.array]:
        """As `__call__`, with the caller's attention: from a layer's index and (B, W, width) inputs to its output."""
        normalized = self.hidden_norm(hidden)
        residual = normalized if self.config.normalizes_residual else hidden
        inputs = mx.concatenate([self.layers[0].input_layernorm(embedded), normalized], axis=-1)
        for index, layer in enumerate(self.layers):
            if index > 0:
                residual, inputs = hidden, layer.input_layernorm(hidden)
            attended = residual + attend(index, inputs)
            hidden = attended + layer.mlp(layer.post_attention_layernorm(attended))
        normalized = self.norm(hidden)
        return normalized if self.config.normalizes_output else hidden, self.lm_head(normalized)


@attrs.frozen
class LoadedEagle3:
    """A drafter that was loaded."""

    model: Eagle3
    target_ids: mx.array | None  # see `target_ids_of`
    embedding: Any  # its own, of the target's vocabulary, quantised or not; None if it reads the target's


class Eagle3Reader:
    """An EAGLE-3 drafter with its target's embedding and vocabulary; see `FeatureReader`."""

    def __init__(self, loaded: LoadedEagle3, embed: Layer | None = None, final_norm: Layer | None = None) -> None:
        """`embed` is the target's, for a drafter without one; `final_norm`, for one that reads what the head reads."""
        own: Any = loaded.embedding
        if own is not None:
            # An index out of bounds would read other memory.
            self._embed: Layer = lambda tokens: own(mx.minimum(tokens, own.weight.shape[0] - 1))
        else:
            assert embed is not None
            self._embed = embed
        self._loaded, self._final_norm = loaded, final_norm
        config = loaded.model.config
        self.vocab_size, self.feature_width = config.vocab_size, config.num_feature_layers * config.target_hidden_size

    def project(self, features: mx.array) -> mx.array:
        return self._loaded.model.project(features if self._final_norm is None else self._final_norm(features))

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self._loaded.model.layers]

    @property
    def masks(self) -> Masks | None:
        """P-EAGLE's."""
        model = self._loaded.model
        config = model.config
        if config.num_parallel == 0:
            return None
        return Masks(config.num_parallel, config.mask_token_id, lambda: model.project(model.mask_hidden[0]))

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        # The embedding may have another dtype than the drafter: the target's, or one that was not cast with it.
        embedded = self._embed(tokens).astype(hidden.dtype)
        given, logits = self._loaded.model(hidden, embedded, cache)
        return given, widened(logits, self._loaded.target_ids, self.vocab_size)


def load_eagle3(files: DrafterFiles) -> LoadedEagle3:
    """A drafter from its folder. Raises: ModelError: a file is missing or damaged, or the weights do not fit."""
    config = read_config(files.config)
    named = {_renamed(name): value for name, value in files.weights().items() if not name.startswith(_OF_TARGET)}
    of_embedding = {name: named.pop(name) for name in [*named] if name.startswith(_EMBEDDING)}
    if config.draft_vocab_size == config.vocab_size and not any(name.startswith("lm_head.") for name in named):
        named |= {name.replace(_EMBEDDING, "lm_head."): value for name, value in of_embedding.items()}
    target_ids = target_ids_of(named.pop("d2t", None), config.draft_vocab_size, config.vocab_size, files.folder)
    model = Eagle3(config)
    files.fill(model, named)
    embedding = None
    if of_embedding:
        holder: Any = Module()
        holder.embed_tokens = Embedding(of_embedding["embed_tokens.weight"].shape[0], config.hidden_size)
        files.fill(holder, of_embedding)
        embedding = holder.embed_tokens
    return LoadedEagle3(model, target_ids, embedding)


def attach_eagle3(files: DrafterFiles, target: Module, target_vocab_size: int) -> Attached:
    """See `TrainedDrafter`."""
    loaded = load_eagle3(files)
    config = loaded.model.config
    feature_layers = config.feature_layers_of(len(target.layers))
    embed = None if loaded.embedding is not None else embedding_of(target, files.named)
    known = max(config.vocab_size, config.mask_token_id + 1)
    check_target(files, target, target_vocab_size, hidden_size=config.target_hidden_size, vocab_size=known)
    final_norm = final_norm_of(target, files.named) if config.reads_output else None
    arrays = [] if loaded.target_ids is None else [loaded.target_ids]
    if loaded.embedding is not None:
        arrays += weights_of(loaded.embedding).values()
    reader = Eagle3Reader(loaded, embed, final_norm)
    passes = ModulePass.each([reader])
    return Attached(
        feature_layers,
        config.vocab_size,
        partial(DepthSequence, passes, reader.masks),
        loaded.model,
        config.draft_vocab_size,
        tuple(arrays),
        passes,
    )


def _renamed(name: str) -> str:
    name = name.replace(_AUTHORS_LAYER, _LAYER) if name.startswith(_AUTHORS_LAYER) else name
    # In the files, the norm of the hidden states belongs to the first layer; here, to the drafter.
    return name.replace(_LAYER + "hidden_norm", "hidden_norm")
