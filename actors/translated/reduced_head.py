"""A draft model's head for part of its vocabulary: a large vocabulary makes it a fifth to two thirds of a small model.

The acceptance rules are exact for any distribution that drafts are drawn from, so a draft model may leave tokens out.
"""

from __future__ import annotations

import copy

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.trained.drafter_files import widened
from protocol.errors import ModelError

_LINEARS = Linear, QuantizedLinear
_EMBEDDINGS = Embedding, QuantizedEmbedding
_SPACES = "▁Ġ"  # how vocabularies write the space before a word


def reduce_head(model: Module, tokenizer: TokenizerWrapper | None, num_tokens: int, named: str) -> None:
    """Have a model compute logits for part of its vocabulary only; those of the other tokens are -inf from then on.

    The part is the first `num_tokens` ids, which are the most frequent tokens in vocabularies learnt by merging (BPE);
    single characters, which SentencePiece puts at the end; and the tokenizer's added tokens, such as the end of an
    answer. Raises: ModelError: no layer computes the model's logits alone; the model is left as it was.
    """
    before = _logits(model)
    vocab_size = before.size
    kept = {*range(num_tokens)}
    if tokenizer is not None:
        kept.update(tokenizer.get_added_vocab().values(), tokenizer.eos_token_ids)
        kept.update(id for piece, id in tokenizer.get_vocab().items() if len(piece.lstrip(_SPACES)) <= 1)
    kept &= {*range(vocab_size)}
    if len(kept) == vocab_size:
        return
    ids = mx.array(sorted(kept))
    for parent, name, layer in _candidates(model, vocab_size):
        head = copy.copy(layer)
        for part, value in layer.items():
            if isinstance(value, mx.array) and value.shape[0] == vocab_size:
                head[part] = value[ids]
        setattr(parent, name, _Head(head, layer if isinstance(layer, _EMBEDDINGS) else None, ids, vocab_size))
        if _is_reduced(_logits(model), before, ids):
            mx.eval(model.parameters())
            return
        setattr(parent, name, layer)
    raise ModelError(f"the vocabulary of {named} cannot be reduced: no layer computes its logits alone")


class _Head(Module):
    """A head for some tokens; a tied one is called to embed any token."""

    def __init__(self, head: Module, embedding: Module | None, ids: mx.array, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.head, self._ids, self._vocab_size = head, ids, vocab_size
        if embedding is not None:
            self.embedding = embedding

    def __call__(self, x: mx.array) -> mx.array:
        if "embedding" not in self:
            return widened(self.head(x), self._ids, self._vocab_size)
        embedded: mx.array = self.embedding(x)
        return embedded

    def as_linear(self, x: mx.array) -> mx.array:
        return widened(self.head.as_linear(x), self._ids, self._vocab_size)


def _logits(model: Module) -> mx.array:
    logits: mx.array = model(mx.array([[0]]))
    return logits[0, -1].astype(mx.float32)


def _candidates(model: Module, vocab_size: int) -> list[tuple[Module, str, Module]]:
    """The layers that may be the head, each with its parent and its name there; the likeliest first."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.children().items()
        if isinstance(child, (*_LINEARS, *_EMBEDDINGS)) and child["weight"].shape[0] == vocab_size
    ]
    return sorted(found, key=lambda each: each[1] != "lm_head")


def _is_reduced(after: mx.array, before: mx.array, ids: mx.array) -> bool:
    """Whether logits are as before for some ids, and lower for all others."""
    kept = before[ids]
    others = mx.put_along_axis(after, ids, mx.array(-mx.inf), axis=0)
    tolerance = 1e-2 * float(mx.max(mx.abs(kept)))
    return bool(mx.allclose(after[ids], kept, rtol=1e-2, atol=tolerance) and mx.all(others <= mx.min(kept)))
