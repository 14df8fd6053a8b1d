"""DFlash: layers that draft a block of tokens in one pass, from hidden states of their target.

A block is the last token of a text, its *anchor*, and mask tokens after it. Each position attends to the whole block,
and to the *context*: keys and values made of the target's features before the anchor. Embedding and head are the
target's; a drafter with a reduced vocabulary has a head of its own.

Source: Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Files:
those of the authors (https://github.com/z-lab/dflash) and of Speculators
(https://github.com/vllm-project/speculators). DFlash 2 and DSpark add what `actors.trained.kinds.block_heads` has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from actors.trained.drafter_files import (
    DrafterFiles,
    check_feature_layers,
    complete,
    reading_config,
    split_heads,
    target_ids_of,
    widened,
)
from actors.trained.kinds.block_heads import AcceptanceHead, BlockConvolution, CandidateSelector, MarkovHead, convolved
from actors.trained.kinds.recognition import kind_of
from actors.trained.kinds.target_parts import Attached, Layer, check_target, embedding_of, head_of
from actors.trained.shared_reading import ReadingPart, SharedPass, SharedReading
from actors.trained.trained_sequence import ContextSequence
from protocol.errors import ModelError

# Weights of the target that Speculators may have saved along.
_OF_TARGET = ("verifier_norm.", "verifier_lm_head.", "embed_tokens.", "t2d")
_CONFIDENCE = "confidence_head."
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


@attrs.frozen
class LayerReach:
    """What the positions of a block attend to in a layer."""

    window: int | None = None  # positions of the context that are seen; None for all
    slides: bool = False  # the window ends at each position of the block, not at the anchor for all of them
    is_causal: bool = False  # a position sees only those before it in the block

    def mask(self, num_context: int, num_block: int) -> mx.array | None:
        """(num_block, num_context + num_block): what is seen; None if all is."""
        if self.window is None and not self.is_causal:
            return None
        query = num_context + mx.arange(num_block)[:, None]
        key = mx.arange(num_context + num_block)
        seen = mx.ones((num_block, num_context + num_block), mx.bool_)
        if self.window is not None:
            seen = mx.abs(query - key) < self.window if self.slides else seen & (key >= num_context - self.window)
        return seen & (key <= query) if self.is_causal else seen


@attrs.frozen
class DFlashConfig:
    """The configuration of a drafter."""

    hidden_size: int  # of the target, too
    layer: Mapping[str, Any]  # further settings of its layers, by their names in a `config.json` of Qwen 3
    reaches: tuple[LayerReach, ...]
    vocab_size: int  # width of the target's logits
    draft_vocab_size: int
    block_size: int  # the anchor included
    mask_token_id: int  # the target's
    feature_layers: tuple[int, ...]
    # Whether each position predicts the token after it, the anchor's included; otherwise each but the anchor's predicts
    # the token that stands there.
    drafts_from_anchor: bool = False
    num_target_layers: int | None = None  # None if the files do not say
    embedding_scale: float = 1.0  # of the target's embeddings
    logit_scale: float = 1.0
    logit_cap: float | None = None  # bound of the scaled logits, by tanh
    markov: tuple[int, str] | None = None  # rank and form of DSpark's `MarkovHead`
    selector: tuple[int, int] | None = None  # rank and number of candidates of DFlash 2's `CandidateSelector`
    convolution: tuple[int, int] | None = None  # kernel and group size of DFlash 2's `BlockConvolution`
    estimates_acceptance: bool = False
    estimates_by_token: bool = False  # from the token before, too

    @property
    def num_foreseen(self) -> int:
        """How many tokens a block predicts."""
        return self.block_size - (0 if self.drafts_from_anchor else 1)


def read_config(config: Mapping[str, Any]) -> DFlashConfig:
    """The configuration from a drafter's `config.json`. Raises: ModelError: some is missing, or not supported."""
    of_speculators = "transformer_layer_config" in config
    kind = kind_of(config) or "DFlash"
    is_second = kind == "DFlash 2"
    flags: Mapping[str, Any] = {**config, **(config.get("dflash_config") or {})}
    layer = dict(config["transformer_layer_config"] if of_speculators else flags)
    of_authors: Mapping[str, Any] = {} if of_speculators else flags
    hidden_size, vocab_size = complete(layer)
    with reading_config():
        if of_speculators:
            mask_token_id, block_size = config["mask_token_id"], config["block_size"]
            feature_layers = tuple(config["aux_hidden_state_layer_ids"])
        else:
            mask_token_id, block_size = of_authors["mask_token_id"], of_authors.get("block_size", 16)
            # The authors name the layer that gives the hidden state, not the one that it enters.
            feature_layers = tuple(layer_id + 1 for layer_id in of_authors["target_layer_ids"])
        markov = _markov(flags) if kind == "DSpark" else None
        drafts_from_anchor = bool(flags.get("sample_from_anchor", kind == "DSpark"))
        # In DSpark's own files, the size of a block is the number of predicted tokens, and in some one more.
        counts_predicted = kind == "DSpark" and not of_speculators
        if counts_predicted and drafts_from_anchor == bool(of_authors.get("dspark_bonus_anchor", False)):
            block_size += -1 if drafts_from_anchor else 1
        found = DFlashConfig(
            hidden_size=hidden_size,
            layer={name: layer[name] for name in _LAYER}
            | {name: layer.get(name, _MAY_LACK[name]) for name in _MAY_LACK},
            reaches=tuple(_reaches(kind, of_speculators, layer, config)),
            vocab_size=vocab_size,
            draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
            block_size=int(block_size),
            mask_token_id=int(mask_token_id),
            feature_layers=feature_layers,
            drafts_from_anchor=drafts_from_anchor,
            num_target_layers=of_authors.get("num_target_layers"),
            embedding_scale=float(of_authors.get("input_embedding_scale", 1.0)),
            logit_scale=float(of_authors.get("output_multiplier", 1.0)),
            logit_cap=of_authors.get("final_logit_softcapping") or None,
            markov=markov,
            selector=(int(flags["selector_rank"]), int(flags["selector_top_k"])) if is_second else None,
            convolution=(int(flags["conv_kernel_size"]), int(flags["conv_group_size"])) if is_second else None,
            estimates_acceptance=kind == "DSpark" and bool(flags.get("enable_confidence_head", of_speculators)),
            estimates_by_token=markov is not None and bool(flags.get("confidence_head_with_markov", True)),
        )
    if (activation := layer.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"a DFlash drafter with the activation {activation!r} is not supported; one with 'silu' is")
    num_layers = found.num_target_layers
    if num_layers is not None and num_layers in feature_layers:
        raise ModelError(
            "a DFlash drafter that reads the normalised output of its target's last layer is not supported"
        )
    if found.block_size < 2:
        raise ModelError(f"the drafter's blocks must have 2 tokens or more, got {found.block_size}")
    return found


_LAYER = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
    "rope_theta", "max_position_embeddings",
)  # fmt: skip
_MAY_LACK: dict[str, Any] = {
    "attention_bias": False,
    "attention_sink_bias": False,
    "rope_is_neox_style": True,
    "rope_scaling": None,
}


def _markov(flags: Mapping[str, Any]) -> tuple[int, str] | None:
    form = flags.get("markov_head_type", "vanilla")
    if form not in ("vanilla", "gated", "rnn"):
        raise ModelError(
            f"a DSpark drafter with a markov_head_type of {form!r} is not supported; one with 'vanilla', 'gated' or "
            "'rnn' is"
        )
    rank = int(flags.get("markov_rank", 0))
    return (rank, form) if rank > 0 else None


def _reaches(kind: str, of_speculators: bool, layer: Mapping[str, Any], config: Mapping[str, Any]) -> list[LayerReach]:
    layer_types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    window, is_causal = layer.get("sliding_window"), layer.get("is_causal")
    whole = LayerReach()
    if of_speculators:
        sliding = LayerReach(window, is_causal=not config.get("sliding_window_non_causal", False))
    elif kind == "DFlash":
        if "sliding_attention" in layer_types:
            window = layer["sliding_window"]
        whole = LayerReach(is_causal=bool(is_causal))
        sliding = LayerReach(window, slides=True, is_causal=is_causal is None or bool(is_causal))
    else:  # the whole block has one window, unless positions see only those before them
        is_causal = bool(layer.get("causal", layer.get("dflash_query_causal", is_causal)))
        window = layer.get("swa_window_size", window)
        whole = LayerReach(is_causal=is_causal)
        sliding = LayerReach(window, slides=True, is_causal=True) if is_causal else LayerReach(window and window - 1)
    return [sliding if layer_type == "sliding_attention" else whole for layer_type in layer_types]


# By text, keys and values of its context: (1, heads, n, width of a head) each.
Contexts = Sequence[tuple[mx.array, mx.array]]


class DFlashAttention(Module):
    """Attention of blocks, each to its context and itself."""

    def __init__(self, config: DFlashConfig, reach: LayerReach) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        layer, width = config.layer, config.hidden_size
        head_dim, bias = int(layer["head_dim"]), bool(layer["attention_bias"])
        self._num_heads, self._num_kv_heads = int(layer["num_attention_heads"]), int(layer["num_key_value_heads"])
        self._scale, self._reach = head_dim**-0.5, reach
        self.q_proj = Linear(width, self._num_heads * head_dim, bias=bias)
        self.k_proj = Linear(width, self._num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(width, self._num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(self._num_heads * head_dim, width, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps=layer["rms_norm_eps"])
        self.k_norm = RMSNorm(head_dim, eps=layer["rms_norm_eps"])
        if layer["attention_sink_bias"]:
            self.attention_sink_bias = mx.zeros(self._num_heads)
        self.rope = initialize_rope(
            head_dim,
            base=layer["rope_theta"],
            traditional=not layer["rope_is_neox_style"],
            scaling_config=layer["rope_scaling"],
            max_position_embeddings=layer["max_position_embeddings"],
        )

    def keys_and_values(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """(B, n, hidden size) → (B, heads, n, width of a head) each, without positions; lazy."""
        keys = split_heads(self.k_proj(hidden), self._num_kv_heads, self.k_norm)
        return keys, split_heads(self.v_proj(hidden), self._num_kv_heads)

    def __call__(self, blocks: mx.array, positions: Sequence[int], contexts: Contexts) -> mx.array:
        """Texts share the projections. Attention reads no weights, so that of each text is computed by itself."""
        queries = split_heads(self.q_proj(blocks), self._num_heads, self.q_norm)
        parts = (mx.split(part, len(positions)) for part in (queries, *self.keys_and_values(blocks)))
        attended = [self._attend(*each) for each in zip(*parts, positions, contexts, strict=True)]
        result: mx.array = self.o_proj(mx.concatenate(attended).swapaxes(1, 2).reshape(*blocks.shape[:2], -1))
        return result

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, position: int, context: tuple[mx.array, mx.array]
    ) -> mx.array:
        """(1, heads, n, width of a head) of one text."""
        own = self.rope(keys, offset=position), values
        all_keys, all_values = (mx.concatenate([*pair], axis=2) for pair in zip(context, own, strict=True))
        mask = self._reach.mask(context[0].shape[2], queries.shape[2])
        return mx.fast.scaled_dot_product_attention(
            self.rope(queries, offset=position),
            all_keys,
            all_values,
            scale=self._scale,
            mask=mask,
            sinks=self.get("attention_sink_bias"),
        )


class DFlashLayer(Module):
    """A decoder layer."""

    def __init__(self, config: DFlashConfig, reach: LayerReach) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        eps = config.layer["rms_norm_eps"]
        self.self_attn = DFlashAttention(config, reach)
        self.mlp = MLP(config.hidden_size, int(config.layer["intermediate_size"]))
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps)
        if config.convolution is not None:
            self.attention_conv = BlockConvolution(*config.convolution, config.hidden_size)
            self.mlp_conv = BlockConvolution(*config.convolution, config.hidden_size)

    def __call__(self, blocks: mx.array, positions: Sequence[int], contexts: Contexts) -> mx.array:
        """(B, n, hidden size) of blocks of B texts, whose anchors are at these positions; lazy."""
        attend = partial(self.self_attn, positions=positions, contexts=contexts)
        attended = blocks + _mixed(attend, self.input_layernorm(blocks), self.get("attention_conv"))
        return attended + _mixed(self.mlp, self.post_attention_layernorm(attended), self.get("mlp_conv"))


def _mixed(sublayer: Layer, hidden: mx.array, convolution: BlockConvolution | None) -> mx.array:
    if convolution is None:
        return sublayer(hidden)
    before, after = convolution.kernels(hidden)
    return convolved(sublayer(convolved(hidden, before)), after)


class DFlash(Module):
    """The drafter's weights; `DFlashReader` runs them."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        hidden_size, eps = config.hidden_size, config.layer["rms_norm_eps"]
        self.fc = Linear(len(config.feature_layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.layers = [DFlashLayer(config, reach) for reach in config.reaches]
        self.norm = RMSNorm(hidden_size, eps=eps)
        if config.draft_vocab_size != config.vocab_size:
            self.lm_head = Linear(hidden_size, config.draft_vocab_size, bias=False)
        if config.markov is not None:
            self.markov_head = MarkovHead(*config.markov, config.vocab_size, config.draft_vocab_size, hidden_size)
        if config.estimates_acceptance:
            rank = config.markov[0] if config.markov is not None and config.estimates_by_token else 0
            self.confidence_head = AcceptanceHead(hidden_size + rank)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(*config.selector, config.vocab_size, hidden_size)


@attrs.frozen(eq=False)
class Anchor:
    """A text's part in the pass of a block."""

    token: int  # its last id
    position: int  # of that
    cache: list[Any]  # those of the context, of which the first `num_context` positions are read
    num_context: int


@attrs.frozen
class DraftBlock:
    """What the pass of a block gave."""

    position: int  # of the anchor
    anchor: int  # its id
    logits: mx.array  # (num_foreseen, its vocabulary), lazy
    hidden: mx.array  # (num_foreseen, width), lazy


class DFlashReader(SharedPass[Anchor]):
    """A drafter with its target's embedding and head; see `ContextReader`. The result of its pass is a `DraftBlock`."""

    def __init__(
        self, model: DFlash, target_ids: mx.array | None, target_vocab_size: int, embed: Layer, head: Layer
    ) -> None:
        """Make a reader. `head` is the target's, or that of the reduced vocabulary; see `target_ids_of`."""
        self._model, self._target_ids, self._embed, self._head = model, target_ids, embed, head
        config = model.config
        self.vocab_size, self.num_foreseen = target_vocab_size, config.num_foreseen
        self.feature_width = len(config.feature_layers) * config.hidden_size

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self._model.layers]

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        hidden = self._model.hidden_norm(self._model.fc(features))[None]
        for layer, of_layer in zip(self._model.layers, cache, strict=True):
            keys, values = layer.self_attn.keys_and_values(hidden)
            of_layer.update_and_fetch(layer.self_attn.rope(keys, offset=position), values)

    def alone(self, part: Anchor) -> DraftBlock:
        [block] = self.together([part])
        return block

    def together(self, parts: Sequence[Anchor]) -> list[DraftBlock]:
        config = self._model.config
        tokens = [[part.token] + [config.mask_token_id] * (config.block_size - 1) for part in parts]
        hidden = self._embed(mx.array(tokens)) * config.embedding_scale
        positions = [part.position for part in parts]
        for index, layer in enumerate(self._model.layers):
            contexts = [
                tuple(each[..., : part.num_context, :] for each in (part.cache[index].keys, part.cache[index].values))
                for part in parts
            ]
            hidden = layer(hidden, positions, contexts)
        hidden = self._model.norm(hidden)[:, -config.num_foreseen :]
        logits = self._head(hidden) * config.logit_scale
        if config.logit_cap is not None:
            logits = mx.tanh(logits / config.logit_cap) * config.logit_cap
        return [DraftBlock(part.position, part.token, logits[row], hidden[row]) for row, part in enumerate(parts)]

    def acceptance_after(self, block: DraftBlock, tokens: Sequence[int], num_rows: int) -> mx.array | None:
        """See `FeatureInput.acceptance`; for the logits of `read_after`."""
        if (head := self._model.get("confidence_head")) is None:
            return None
        inputs = [block.hidden[: len(tokens)][-num_rows:]]
        if self._model.config.estimates_by_token:
            inputs.append(self._model.markov_head.embedded(tokens[-num_rows:]))
        given: mx.array = head(*inputs)
        return given

    def read_after(self, block: DraftBlock, tokens: Sequence[int], num_rows: int) -> mx.array:
        """(num_rows, V) logits after the last of `tokens`, which begin with the anchor; lazy."""
        length = len(tokens)
        logits, head = block.logits[:length], self._model.get("markov_head") or self._model.get("candidate_selector")
        given = logits[-num_rows:] if head is None else head(logits, block.hidden[:length], tokens, num_rows)
        return widened(given, self._target_ids, self.vocab_size)


class BlockSequence(ContextSequence):
    """The pass over a block, whose anchor is the last committed token, drafts all tokens after a text."""

    def __init__(self, reader: DFlashReader) -> None:
        super().__init__(reader)
        self._reader = reader
        self._block: DraftBlock | None = None
        # For each part of a feed's logits: its number of rows, and the estimates for them.
        self._estimates: list[tuple[int, mx.array | None]] = []

    @property
    def foreseen(self) -> int:
        return self.num_given + 1 + self._reader.num_foreseen

    def _drop_drafts(self) -> None:
        self._block = None

    def reading(self, tokens: tuple[int, ...], num_logits: int) -> SharedReading[mx.array | None]:
        self._estimates.clear()
        logits = yield from super().reading(tokens, num_logits)
        has_estimates = any(estimate is not None for _, estimate in self._estimates)
        of_rows = [mx.zeros(num_rows) if given is None else given for num_rows, given in self._estimates]
        self.acceptance = mx.concatenate(of_rows) if has_estimates else None
        return logits

    def _logits(self, position: int) -> SharedReading[mx.array]:
        block = yield from self._block_for(position)
        index = 0 if block is None else position - block.position
        if block is None or index >= self._reader.num_foreseen:
            self._estimates.append((1, None))
            return mx.zeros((1, self._reader.vocab_size))
        end = min(index + len(self._tokens) - position, self._reader.num_foreseen)
        read = block, self._tokens[block.position : block.position + end], end - index
        self._estimates.append((end - index, self._reader.acceptance_after(*read)))
        return self._reader.read_after(*read)

    def _block_for(self, position: int) -> SharedReading[DraftBlock | None]:
        """The block that predicts the token after a position; None if there are no features before that position."""
        begin = min(position, self._end)
        if begin <= self._begin:
            return None
        last = self._block
        if last is not None and self._tokens[last.position : last.position + 1] == [last.anchor]:
            # Before the end of the features, blocks follow each other without overlap, as in drafting: a block is used
            # for all tokens that it predicts. From there on, a block must begin at the end.
            follows = 0 <= position - last.position < self._reader.num_foreseen
            if last.position == begin or (begin < self._end and follows):
                return last
        part = Anchor(self._tokens[begin], begin, self._cache, begin - self._begin)
        self._block = yield ReadingPart(self._reader, part)
        return self._block


def load_dflash(files: DrafterFiles) -> tuple[DFlash, mx.array | None]:
    """A drafter from its folder, and its `target_ids_of`. Raises: ModelError: a file is missing or does not fit."""
    config = read_config(files.config)
    named = {name.removeprefix("model."): value for name, value in files.weights().items()}
    named = {
        f"{name}.weight" if name in _CODEBOOKS else name: value
        for name, value in named.items()
        if not name.startswith(_OF_TARGET)
    }
    target_ids = target_ids_of(named.pop("d2t", None), config.draft_vocab_size, config.vocab_size, files.folder)
    # The head is the target's, unless there are `target_ids`; estimates are read only if the configuration has them.
    left_out = [*(["lm_head."] if target_ids is None else []), *([] if config.estimates_acceptance else [_CONFIDENCE])]
    named = {name: value for name, value in named.items() if not name.startswith(tuple(left_out))}
    model = DFlash(config)
    files.fill(model, named)
    return model, target_ids


def attach_dflash(files: DrafterFiles, target: Module, target_vocab_size: int) -> Attached:
    """See `TrainedDrafter`."""
    model, target_ids = load_dflash(files)
    config = model.config
    num_layers, named = len(target.layers), files.named
    if config.num_target_layers not in (None, num_layers):
        raise ModelError(
            f"{named} was made for a target with {config.num_target_layers} layers, and this one has {num_layers}"
        )
    check_feature_layers(config.feature_layers, num_layers)
    known = max(config.vocab_size, config.mask_token_id + 1)
    check_target(files, target, target_vocab_size, hidden_size=config.hidden_size, vocab_size=known)
    head = head_of(target, named) if target_ids is None else model.lm_head
    reader = DFlashReader(model, target_ids, target_vocab_size, embedding_of(target, named), head)
    return Attached(
        config.feature_layers,
        target_vocab_size,
        partial(BlockSequence, reader),
        model,
        config.draft_vocab_size,
        () if target_ids is None else (target_ids,),
        passes=(reader,),
    )
