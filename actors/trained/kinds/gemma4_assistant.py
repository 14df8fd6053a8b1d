"""Gemma 4's assistants: layers that draft token by token, and attend to keys and values of their target.

An assistant's sliding layers attend to keys and values of the target's last sliding layer that makes its own, its full
layers to those of the last such full one. A step reads the embedding of a token, and beside it what the target's head
reads at the position before. Where the target has not computed that position yet, the output of the step before stands
for it; the keys and values, and the position of the step, stay the same.

Features are the inputs of these two layers, and the output of the last layer. The target's own projections make keys
and values of them once more. So features are rows by position, as those of other drafters, and can be sent.

Sources: transformers (https://github.com/huggingface/transformers, `models/gemma4_assistant`), vLLM
(https://github.com/vllm-project/vllm, `v1/spec_decode/gemma4.py`) and mlx-vlm (https://github.com/Blaizzy/mlx-vlm,
`mlx_vlm/speculative/drafters/gemma4_assistant`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma4_text
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from actors.prefix_cache import common_length, pack
from actors.trained.drafter_files import DrafterFiles, reading_config
from actors.trained.kinds.target_parts import Attached, Layer, check_target, embedding_of, final_norm_of
from actors.trained.shared_reading import SharedReading
from actors.trained.trained_sequence import ContextSequence
from protocol.errors import ModelError

KeysAndValues = tuple[mx.array, mx.array]  # keys and values, (1, heads, n, width of a head) each
_EMBEDDING, _HEAD, _ORDERING = "embed_tokens.", "lm_head.", "masked_embedding.token_ordering"
_SLIDING = "sliding_attention"


@attrs.frozen
class Gemma4AssistantConfig:
    """The configuration of an assistant."""

    args: gemma4_text.ModelArgs  # of its layers
    target_hidden_size: int
    # For the head of assistants of small targets: the number of groups of tokens, all of one size, and how many groups
    # have logits; None for a plain head.
    ordered: tuple[int, int] | None
    ties_head: bool  # the files have the head's weights under the name of an embedding, which has no other use


def read_config(config: Mapping[str, Any]) -> Gemma4AssistantConfig:
    """The configuration from an assistant's `config.json`. Raises: ModelError: some is missing, or not supported."""
    with reading_config():
        text = {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False} | config["text_config"]
        vocab_size = int(text["vocab_size"])
        ordered = None
        if config.get("use_ordered_embeddings"):
            ordered = int(config["num_centroids"]), int(config["centroid_intermediate_top_k"])
        found = Gemma4AssistantConfig(
            args=gemma4_text.ModelArgs.from_dict(text | {"num_kv_shared_layers": text["num_hidden_layers"]}),
            target_hidden_size=int(config["backbone_hidden_size"]),
            ordered=ordered,
            ties_head=bool(config.get("tie_word_embeddings", True)),
        )
    if ordered is not None:
        num_groups, num_chosen = ordered
        if not 1 <= num_chosen <= num_groups or vocab_size % num_groups != 0:
            raise ModelError(
                f"the drafter's configuration chooses {num_chosen} of {num_groups} groups of its {vocab_size} tokens; "
                "groups must be of one size, and 1 or more of them be chosen"
            )
    return found


class OrderedHead(Module):
    """A head that chooses groups of tokens first."""

    def __init__(self, num_groups: int, num_chosen: int, vocab_size: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_groups, self._num_chosen = num_groups, num_chosen
        self.centroids = Linear(hidden_size, num_groups, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), mx.int32)  # ids, group after group

    def __call__(self, hidden: mx.array, embedding: Any) -> mx.array:
        """(n, hidden size) → (n, V) logits, -inf for tokens of groups that are not chosen; lazy."""
        chosen = mx.argpartition(self.centroids(hidden), -self._num_chosen, axis=-1)[:, -self._num_chosen :]
        tokens = self.token_ordering.reshape(self._num_groups, -1)[chosen].reshape(hidden.shape[0], -1)
        logits = (embedding(tokens) @ hidden[..., None]).squeeze(-1)
        nothing = mx.full((hidden.shape[0], self.token_ordering.size), -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(nothing, tokens, logits, axis=-1)


class Gemma4Assistant(Module):
    """The assistant's weights and forward pass."""

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        args, width = config.args, config.target_hidden_size
        self.config = config
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_projection = Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = Linear(args.hidden_size, width, bias=False)
        if config.ordered is not None:
            self.masked_embedding = OrderedHead(*config.ordered, args.vocab_size, args.hidden_size)

    def __call__(
        self, hidden: mx.array, embedded: mx.array, position: int, context: Mapping[str, KeysAndValues]
    ) -> tuple[mx.array, mx.array]:
        """Process successive positions, the last of which is `position`.

        Args:
            hidden, embedded: (n, target's hidden size) of the positions, and of the tokens one position further on.
            context: by type of layer, keys and values of the positions up to the last one, at least n.

        Returns: hidden states of the same shape, for the next positions, and (n, V) logits; lazy.
        """
        num_rows = hidden.shape[0]
        given = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[None]
        seen = {kind: self._seen(kind, num_rows, *arrays) for kind, arrays in context.items()}
        for layer in self.layers:
            *shared, mask = seen[layer.layer_type]
            given, _, _ = layer(given, mask, shared_kv=tuple(shared), offset=position + 1 - num_rows)
        normalized = self.norm(given)[0]
        head = self.get("masked_embedding")
        logits = self.embed_tokens.as_linear(normalized) if head is None else head(normalized, self.embed_tokens)
        return self.post_projection(normalized), logits

    def _seen(self, kind: str, num_rows: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, Any]:
        """The keys and values that the last `num_rows` positions see in a layer, and the mask."""
        window = self.config.args.sliding_window if kind == _SLIDING else None
        if window is not None:
            begin = max(0, keys.shape[2] - (window + num_rows - 1))
            keys, values = keys[..., begin:, :], values[..., begin:, :]
        mask = None if num_rows == 1 else create_causal_mask(num_rows, keys.shape[2] - num_rows, window_size=window)
        return keys, values, mask


@attrs.frozen
class _Writer:
    """Stands for the cache in a call of a target's attention: the keys and values that it makes become the context."""

    offset: int  # position of the first key
    context: KVCache
    dtype: mx.Dtype

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        both: KeysAndValues = self.context.update_and_fetch(keys.astype(self.dtype), values.astype(self.dtype))
        return both


class Gemma4AssistantReader:
    """An assistant with its target's embedding, final norm and projections; see `ContextReader`."""

    def __init__(self, model: Gemma4Assistant, sources: Mapping[str, Any], embed: Layer, final_norm: Layer) -> None:
        """Make a reader of the target's layers in `sources`, by type, and its embedding, scaled."""
        self._model, self._sources, self._embed, self._final_norm = model, sources, embed, final_norm
        self._dtype = model.norm.weight.dtype
        self.vocab_size = model.config.args.vocab_size
        self.feature_width = (len(sources) + 1) * model.config.target_hidden_size

    def make_cache(self) -> list[KVCache]:
        """One for each layer of the target that is attended to, and one with hidden states for keys."""
        return [KVCache() for _ in (*self._sources, "hidden states")]

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        *entered, given = mx.split(features, len(cache), axis=-1)
        for layer, inputs, context in zip(self._sources.values(), entered, cache, strict=False):
            # MLX is lazy: only the attention's keys and values are computed.
            layer.self_attn(layer.input_layernorm(inputs[None]), cache=_Writer(position, context, self._dtype))
        hidden = self._final_norm(given).astype(self._dtype)[None, None]
        cache[-1].update_and_fetch(hidden, hidden[..., :1])

    def read(
        self, tokens: Sequence[int], begin: int, num_context: int, cache: list[Any], hidden: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Read tokens, each with the hidden state of a position; the last of these is the last of the first
        `num_context` in the caches, which begin at `begin`. For one token, `hidden` may be given instead: (1, target's
        hidden size).
        """
        *contexts, states = cache
        if hidden is None:
            hidden = states.keys[0, 0, num_context - len(tokens) : num_context]
        # vLLM and mlx-vlm give a step this position, transformers the next.
        position = begin + num_context - 1
        context = {
            kind: (written.keys[..., :num_context, :], written.values[..., :num_context, :])
            for kind, written in zip(self._sources, contexts, strict=True)
        }
        return self._model(hidden, self._embed(mx.array([*tokens])).astype(self._dtype), position, context)


class Gemma4AssistantSequence(ContextSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: Gemma4AssistantReader) -> None:
        super().__init__(reader)
        self._reader = reader
        # From the first position without features on: the tokens read last, and the hidden state that each gave.
        self._own: list[tuple[int, mx.array]] = []

    def _drop_drafts(self) -> None:
        self._own.clear()

    def _logits(self, position: int) -> SharedReading[mx.array]:
        if position <= self._begin or self._begin == self._end:
            return mx.zeros((1, self._reader.vocab_size))
        if position < self._end:
            tokens = self._tokens[position : self._end]
            num_context = position - 1 + len(tokens) - self._begin
            return self._reader.read(tokens, self._begin, num_context, self._cache)[1]
        yield from ()
        tokens = self._tokens[self._end : position + 1]
        # The last token is read again, for its logits.
        num_known = common_length(pack(tokens[:-1]), pack([known for known, _ in self._own]))
        del self._own[num_known:]
        for token in tokens[num_known:]:
            hidden = self._own[-1][1] if self._own else None
            given, logits = self._reader.read([token], self._begin, self._end - self._begin, self._cache, hidden)
            self._own.append((token, given))
        return logits


def load_gemma4_assistant(files: DrafterFiles) -> Gemma4Assistant:
    """An assistant from its folder. Raises: ModelError: a file is missing or damaged, or the weights do not fit."""
    config = read_config(files.config)
    head, unused = (_EMBEDDING, _HEAD) if config.ties_head else (_HEAD, _EMBEDDING)
    named = {name.removeprefix("model."): value for name, value in files.weights().items()}
    named = {
        name.replace(head, _EMBEDDING) if name.startswith(head) else name: value
        for name, value in named.items()
        if not name.startswith(unused)
    }
    model = Gemma4Assistant(config)
    if (ordering := named.get(_ORDERING)) is not None:
        named[_ORDERING] = ordering = ordering.astype(mx.int32)
        # An index out of bounds would write to other memory.
        if sorted(ordering.tolist()) != [*range(ordering.size)]:  # type: ignore[type-var, arg-type]
            raise ModelError(f"{_ORDERING} of {files.named} in {files.folder} does not name each token once")
    files.fill(model, named)
    return model


def attach_gemma4_assistant(files: DrafterFiles, target: Module, target_vocab_size: int) -> Attached:
    """See `TrainedDrafter`."""
    text_model: Any = target.get("language_model", target)
    if type(text_model).__module__ != gemma4_text.__name__:
        family = type(text_model).__module__.rpartition(".")[2]
        raise ModelError(
            f"{files.named} attends to keys and values of a gemma4_text target, and this one is a {family}"
        )
    model = load_gemma4_assistant(files)
    width, vocab_size = model.config.target_hidden_size, model.config.args.vocab_size
    check_target(files, target, target_vocab_size, hidden_size=width, vocab_size=vocab_size)
    sources = _sources(model, text_model.layers, files.named)
    embedding, scale = embedding_of(target, files.named), text_model.model.embed_scale
    reader = Gemma4AssistantReader(
        model,
        {kind: text_model.layers[index] for kind, index in sources.items()},
        lambda tokens: embedding(tokens) * scale,
        final_norm_of(target, files.named),
    )
    return Attached(
        (*sources.values(), len(text_model.layers)),
        vocab_size,
        partial(Gemma4AssistantSequence, reader),
        model,
        vocab_size,
    )


def _sources(model: Gemma4Assistant, layers: Sequence[Any], named: str) -> dict[str, int]:
    """For each type of layer that an assistant has, the target's last layer of that type that makes keys and values."""
    last = {layer.layer_type: index for index, layer in enumerate(layers) if layer.self_attn.has_kv}
    found = {}
    for layer in model.layers:
        own, kind = layer.self_attn, layer.layer_type
        if kind not in last:
            raise ModelError(f"{named} attends to keys of a layer with {kind}, and this target has none")
        theirs = layers[last[kind]].self_attn
        if own.head_dim != theirs.head_dim or own.n_heads % theirs.n_kv_heads != 0:
            raise ModelError(
                f"{named} has {own.n_heads} heads of a width of {own.head_dim} in layers with {kind}, and attends to "
                f"this target's {theirs.n_kv_heads} of {theirs.head_dim}; it was made for another one"
            )
        found[kind] = last[kind]
    return found
