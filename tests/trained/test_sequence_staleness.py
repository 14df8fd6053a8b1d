"""The staleness that texts of trained drafters report: how many hidden states of their own they have read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from actors.trained.depth_sequence import DepthSequence
from actors.trained.kinds.medusa import HeadSequence

WIDTH, VOCAB = 3, 5


class Counting:
    """A reader that counts the tokens of its passes."""

    vocab_size, feature_width = VOCAB, WIDTH

    def __init__(self) -> None:
        self.passes: list[int] = []

    def project(self, features: mx.array) -> mx.array:
        return features

    def make_cache(self) -> list[Any]:
        return []

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        self.passes.append(tokens.shape[0])
        return hidden, mx.ones((tokens.shape[0], VOCAB))


def features(num: int) -> mx.array:
    return mx.ones((num, WIDTH))


def test_each_token_ahead_of_the_features_adds_one_until_they_come():
    reader = Counting()
    sequence = DepthSequence([reader])
    sequence.give(0, features(4))
    sequence.feed((1, 1, 1, 1, 1), 1)  # the last one is read with the features of the one before
    assert (sequence.num_given, sequence.staleness) == (4, 0)
    for staleness in (1, 2, 3):
        sequence.feed((2,), 1)
        assert sequence.staleness == staleness
    assert reader.passes == [4, 1, 1, 1]
    sequence.rewind(6)
    assert sequence.staleness == 1
    sequence.give(4, features(1))
    sequence.feed((2, 3), 1)
    assert (sequence.num_given, sequence.staleness) == (5, 2)
    sequence.give(5, features(2))
    sequence.feed((4,), 1)
    assert (sequence.num_given, sequence.staleness) == (7, 1)
    # What is stale is read again, in one pass, with the drafter's own hidden states where features are missing.
    assert reader.passes[4:] == [2, 1, 3]


def test_a_pass_that_is_timed_computes_something():
    reader = Counting()
    sequence = DepthSequence([reader])
    sequence.give_nothing(20)
    sequence.feed((0,) * 8, 0)
    rows = sequence.feed((0, 0), 2)
    assert sum(reader.passes) == 9  # all but the first, which nothing comes before
    assert rows is not None
    assert rows.tolist() == [[1.0] * VOCAB] * 2


def test_a_head_that_passes_over_positions_is_as_stale_as_they_are_many():
    heads = [lambda hidden: mx.ones((hidden.shape[0], VOCAB))] * 3
    sequence = HeadSequence(lambda given: given, heads, WIDTH, VOCAB)
    sequence.give(0, features(4))
    found = []
    for _ in range(7):
        sequence.feed((1,), 1)
        found.append(sequence.staleness)
    # The first head reads the features of the position before the last token.
    assert found == [0, 0, 0, 0, 0, 1, 2]
    sequence.give(4, features(2))
    sequence.rewind(6)
    sequence.feed((1,), 1)
    assert (sequence.num_given, sequence.staleness) == (6, 0)
