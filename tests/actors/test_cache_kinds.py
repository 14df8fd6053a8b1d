"""A new cache class needs a kind, and nothing else: with it, its texts are rewound, saved, copied and shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cache_subjects import ATOL, TEXT
from completions import ids
from mlx_lm.models.base import create_causal_mask
from models import Wrapped, greedy, llama, near, prompt_of

import runtime
from actors.mlx.cache_kinds import KINDS, CacheKind
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.row_caches import RowKVCache
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import recall, record
from actors.model import Feed, Fork, RewindMode


class PairsCache:
    """Keys and values in one array, which is replaced by each pass."""

    def __init__(self) -> None:
        self.pairs: Any = None  # (2, B, heads, tokens, width of a head)
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        new = mx.stack([keys, values])
        self.pairs = new if self.pairs is None else mx.concatenate([self.pairs, new], axis=3)
        self.offset = self.pairs.shape[3]
        return self.pairs[0], self.pairs[1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return create_causal_mask(N, self.offset, window_size=window_size)

    def empty(self) -> bool:
        return self.pairs is None

    @property
    def state(self) -> tuple[Any, int]:
        return self.pairs, self.offset

    @property
    def nbytes(self) -> int:
        return 0 if self.pairs is None else int(self.pairs.nbytes)

    @classmethod
    def from_state(cls, state: tuple[Any, int]) -> PairsCache:
        made = cls()
        made.pairs, made.offset = state
        return made


class PairsRows(RowKVCache):
    """Rows of `PairsCache`s."""

    def join(self, single: PairsCache, length: int) -> None:
        if length > 0:
            super().join(SimpleNamespace(keys=single.pairs[0], values=single.pairs[1]), length)
        single.pairs = None

    def leave(self, row: int, length: int, single: PairsCache) -> None:
        left = SimpleNamespace()
        super().leave(row, length, left)
        single.pairs, single.offset = mx.stack([left.keys, left.values]), length


class PairsKind(CacheKind):
    """All that there is to know."""

    cache_class = PairsCache
    always_trims = True
    kept = ("pairs", "offset")
    can_be_row = True

    def trim(self, layer: PairsCache, num_tokens: int) -> None:
        layer.offset -= num_tokens
        layer.pairs = layer.pairs[..., : layer.offset, :]

    def check_state(self, state: Any, like: PairsCache, longer: PairsCache) -> None:
        self._require_length(state[0].shape[3] == state[1])

    def row_cache(self, layer: PairsCache) -> PairsRows:
        return PairsRows()


class WithPairs(Wrapped):
    def make_cache(self) -> list[Any]:
        return [PairsCache() for _ in self.layers]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, PairsCache, PairsKind())


def read(sequence: MLXSequence, tokens: list[int]) -> mx.array:
    logits = sequence.feed(tuple(tokens), len(tokens))
    assert logits is not None
    return logits


def fork_of(sequence: MLXSequence) -> Fork:
    assert sequence.fork_point is not None
    return sequence.fork_point()


def expected(tokens: list[int]) -> mx.array:
    return llama()(mx.array([tokens]))[0]


def same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=0, atol=ATOL))


@pytest.mark.parametrize("rewind", ["auto", "trim", "checkpoint"])
async def test_with_a_kind_a_cache_is_rewound_in_each_mode(rewind: Any) -> None:
    model: nn.Module = WithPairs(llama())
    prompt = prompt_of(9)
    async with runtime.open((model, None), (near(llama(), noise=0.05), None), rewind=rewind) as rt:
        completion = await rt.generate(prompt, max_tokens=24, lookahead=3)
    assert ids(completion) == greedy(llama(), prompt, 24)
    assert 0 < completion.statistics.accepted < completion.statistics.proposed
    assert completion.statistics.n1_rounds == 0


def test_with_a_kind_a_cache_is_saved_in_a_file() -> None:
    sequence = MLXModel(WithPairs(llama()), CacheOptions()).open_sequence(beside_another=False)
    read(sequence, TEXT[:9])
    state = sequence.take_state(tuple(TEXT[:9]))
    assert state is not None
    assert {layer.kind for layer in state.layers} == {"PairsCache"}
    other = MLXModel(WithPairs(llama()), CacheOptions()).open_sequence(beside_another=False)
    other.put_state(recall(record(state, "target")))
    assert same(read(other, TEXT[9:14]), expected(TEXT[:14])[9:])


def test_with_a_kind_a_cache_is_copied() -> None:
    sequence = MLXModel(WithPairs(llama()), CacheOptions()).open_sequence(beside_another=False)
    read(sequence, TEXT[:9])
    copies = [fork() for fork in [fork_of(sequence)] * 2]
    read(sequence, TEXT[40:50])
    for copy in copies:
        assert same(read(copy, TEXT[9:14]), expected(TEXT[:14])[9:])


def test_with_a_kind_a_cache_is_a_row_beside_others() -> None:
    model = MLXModel(WithPairs(llama()), CacheOptions())
    assert model.sharing_obstacle() is None
    texts = [TEXT[:9], TEXT[20:25]]
    sequences = [model.open_sequence(beside_another=False) for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        read(sequence, text[:-1])
        assert sequence.prepare(3, len(text) - 1) is RewindMode.TRIM
    drafted = [(*text[-1:], 1, 2) for text in texts]
    logits = model.feed_together([Feed(one, fed, 3) for one, fed in zip(sequences, drafted, strict=True)])
    for sequence, text, rows in zip(sequences, texts, logits, strict=True):
        assert sequence.is_row
        assert same(rows, expected([*text, 1, 2])[-3:])
        sequence.rewind(len(text))
        assert same(read(sequence, TEXT[60:63]), expected([*text, *TEXT[60:63]])[-3:])
        assert not sequence.is_row


def test_without_a_kind_the_same_cache_can_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, PairsCache)
    sequence = MLXModel(WithPairs(llama()), CacheOptions()).open_sequence(beside_another=False)
    assert sequence.prepare(1, 0) is RewindMode.SINGLE
    assert same(read(sequence, TEXT[:9]), expected(TEXT[:9]))
    assert sequence.take_state(tuple(TEXT[:9])) is None
    assert sequence.fork_point is None
    assert not sequence.can_be_row
