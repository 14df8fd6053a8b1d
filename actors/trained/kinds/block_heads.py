"""What DSpark and DFlash 2 add to DFlash's blocks.

Sources: Speculators (https://github.com/vllm-project/speculators, `models/dspark`) for DSpark, mlx-vlm
(https://github.com/Blaizzy/mlx-vlm, `mlx_vlm/speculative/drafters`) for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear


class MarkovHead(Module):
    """The head of DSpark: adds to the logits what a matrix of low rank makes of the token before. The form "gated" has
    a gate that reads the hidden state, "rnn" a state that goes on from position to position, "vanilla" neither.
    """

    def __init__(self, rank: int, form: str, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._form = form
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size, bias=False)
        if form == "gated":
            self.gate_proj = Linear(hidden_size + rank, rank)
        elif form == "rnn":
            self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank)

    def embedded(self, tokens: Sequence[int]) -> mx.array:
        result: mx.array = self.markov_w1(_ids(tokens, self.markov_w1))
        return result

    def __call__(self, logits: mx.array, hidden: mx.array, before: Sequence[int], num_rows: int) -> mx.array:
        """(num_rows, V) logits of the last positions of a block, lazy; from (n, V) logits and (n, hidden size) hidden
        states of the first n positions, and the token before each of them.
        """
        rows = len(before) if self._form == "rnn" else num_rows
        embedded, hidden = self.embedded(before[-rows:]), hidden[-rows:]
        if self._form == "gated":
            embedded = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, embedded], axis=-1))) * embedded
        elif self._form == "rnn":
            state, given = mx.zeros_like(embedded[:1]), []
            for row in range(rows):
                joint = self.joint_proj(
                    mx.concatenate([state, embedded[row : row + 1], hidden[row : row + 1]], axis=-1)
                )
                gate, candidate, output = mx.split(joint, 3, axis=-1)
                state = mx.sigmoid(gate) * state + (1.0 - mx.sigmoid(gate)) * mx.tanh(candidate)
                given.append(mx.tanh(output))
            embedded = mx.concatenate(given[-num_rows:])
        result: mx.array = logits[-num_rows:] + self.markov_w2(embedded)
        return result


class AcceptanceHead(Module):
    """DSpark's estimate of its own acceptance: one minus the total variation from the target's distribution."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.proj = Linear(num_inputs, 1)

    def __call__(self, *inputs: mx.array) -> mx.array:
        """(n,) in [0, 1], from (n, width) hidden states, and embeddings of the tokens before if these are read."""
        return mx.sigmoid(self.proj(mx.concatenate([*inputs], axis=-1))[:, 0].astype(mx.float32))


class CandidateSelector(Module):
    """The selector of DFlash 2: decides between a position's likeliest tokens by how they follow the one before."""

    def __init__(self, rank: int, num_candidates: int, vocab_size: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_candidates = num_candidates
        self.predecessor_codebook = Embedding(vocab_size, rank)
        self.successor_codebook = Embedding(vocab_size, rank)
        self.hidden_projection = Linear(hidden_size, rank, bias=False)

    def __call__(self, logits: mx.array, hidden: mx.array, before: Sequence[int], num_rows: int) -> mx.array:
        """As `MarkovHead.__call__`; -inf for tokens that are no candidates."""
        logits, hidden = logits[-num_rows:], hidden[-num_rows:]
        candidates = mx.argpartition(logits, -self._num_candidates, axis=-1)[:, -self._num_candidates :]
        follows = self.predecessor_codebook(_ids(before[-num_rows:], self.predecessor_codebook))
        follows = (follows * self.hidden_projection(hidden))[:, None] * self.successor_codebook(candidates)
        scores = mx.take_along_axis(logits, candidates, axis=-1) + follows.sum(axis=-1)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), candidates, scores, axis=-1)


def _ids(tokens: Sequence[int], embedding: Module) -> mx.array:
    # An index out of bounds would read other memory.
    return mx.minimum(mx.array([*tokens]), embedding.weight.shape[0] - 1)


class BlockConvolution(Module):
    """The convolutions of DFlash 2, which mix a sublayer's input, and its output, with those of positions before. A
    part of the kernels depends on the hidden state that the sublayer reads; groups of channels share it.
    """

    def __init__(self, kernel_size: int, group_size: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_size = group_size
        self.base_kernel = mx.zeros((2, kernel_size, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)

    def kernels(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """(…, n, hidden size) hidden states to (…, n, kernel size, hidden size) kernels before and after; lazy."""
        moved = self.kernel_projection(hidden).reshape(*hidden.shape[:-1], 2, self.base_kernel.shape[1], -1)
        both = self.base_kernel.astype(hidden.dtype) + mx.repeat(moved, self._group_size, axis=-1)
        return both[..., 0, :, :], both[..., 1, :, :]


def convolved(hidden: mx.array, kernel: mx.array) -> mx.array:
    """(…, n, hidden size) hidden states mixed with those before, by (…, n, kernel size, hidden size) kernels; lazy."""
    num_rows, size = kernel.shape[-3:-1]
    padded = mx.pad(hidden, [*[(0, 0)] * (hidden.ndim - 2), (size - 1, 0), (0, 0)])
    shifted = [padded[..., size - 1 - offset : size - 1 - offset + num_rows, :] for offset in range(size)]
    return (kernel * mx.stack(shifted, axis=-2)).sum(axis=-2)
