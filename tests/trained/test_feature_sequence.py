"""A text of a trained drafter: whatever comes when, what is read in the end is what features and tokens say."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest

from actors.trained.drafter_files import DrafterFiles
from actors.trained.feature_sequence import FeatureSequence
from actors.trained.kinds.eagle3 import Eagle3Reader, load_eagle3
from protocol.errors import RewindError

CASES = sorted(path for path in (Path(__file__).parent / "eagle3").iterdir() if path.is_dir())
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def reader(request: pytest.FixtureRequest) -> Eagle3Reader:
    return Eagle3Reader(load_eagle3(DrafterFiles.read(request.param)))


TOKENS = tuple(mx.random.randint(0, 96, (NUM_TOKENS,), key=mx.random.key(1)).tolist())
FEATURES = mx.random.normal((NUM_TOKENS, 96), key=mx.random.key(2))


def logits_from_the_start(reader: Eagle3Reader, num_tokens: int) -> mx.array:
    """The logits after some tokens, all of which are read with features."""
    cache = reader.make_cache()
    _, logits = reader.read(reader.project(FEATURES[: num_tokens - 1]), mx.array(TOKENS[1:num_tokens]), cache)
    return logits[-1]


def close(found: mx.array, expected: mx.array) -> bool:
    """Whether logits are the same, those of ids that the drafter lacks included."""
    return bool(mx.all((found == expected) | (mx.abs(found - expected) < 1e-3)))


def test_ids_that_the_drafter_lacks_are_never_likely(reader: Eagle3Reader) -> None:
    logits = logits_from_the_start(reader, 5)
    assert logits.shape == (96,)
    assert int(mx.isfinite(logits).sum()) == 40


@pytest.mark.parametrize("seed", range(12))
def test_committed_text_is_read_with_features_however_it_came(reader: Eagle3Reader, seed: int) -> None:
    draws = random.Random(seed)
    sequence = FeatureSequence(reader)
    num_committed = num_given = 0
    while num_committed < NUM_TOKENS:
        # A verdict: some tokens, whose features come with it but for the last one's, and sometimes a little later.
        num_committed = min(NUM_TOKENS, num_committed + draws.randint(1, 5))
        if draws.random() < 0.8 and num_committed - 1 > num_given:
            sequence.give(num_given, FEATURES[num_given : num_committed - 1])
            num_given = num_committed - 1
        keep = sequence.rewind(min(sequence.length, num_committed))
        if keep < num_committed:
            sequence.feed(TOKENS[keep:num_committed], draws.randint(0, 1))
        sequence.check(num_committed)
        # The drafter goes on ahead, rightly or wrongly.
        for ahead in range(draws.randint(0, 3)):
            right = num_committed + ahead < NUM_TOKENS and draws.random() < 0.7
            token = TOKENS[num_committed + ahead] if right else 7
            assert sequence.feed((token,), 1) is not None
            if not right:
                break
    sequence.give(num_given, FEATURES[num_given : NUM_TOKENS - 1])
    keep = sequence.rewind(min(sequence.length, NUM_TOKENS - 1))
    logits = sequence.feed(TOKENS[keep:], 1)
    assert logits is not None
    assert close(logits[-1], logits_from_the_start(reader, NUM_TOKENS))
    sequence.close()


def test_what_is_drafted_ahead_reads_its_own_hidden_states(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    sequence.give(0, FEATURES[:5])
    sequence.rewind(0)
    sequence.feed(TOKENS[:6], 0)
    ahead = [sequence.feed((token,), 1) for token in TOKENS[6:9]]
    cache = reader.make_cache()
    hidden, _ = reader.read(reader.project(FEATURES[:5]), mx.array(TOKENS[1:6]), cache)
    for found, token in zip(ahead, TOKENS[6:9], strict=True):
        assert found is not None
        hidden, expected = reader.read(hidden[-1:], mx.array([token]), cache)
        assert close(found[-1], expected[-1])
    # No token needs to be read again before features for it come.
    assert sequence.length == 9
    sequence.give(5, FEATURES[5:7])
    assert sequence.length == 6
    # Hidden states from before stand for what has no features yet: one pass.
    assert sequence.rewind(9) == 6
    again = sequence.feed(TOKENS[6:9], 3)
    assert again is not None
    assert again.shape == (3, 96)
    assert sequence.length == 9


def test_a_text_whose_beginning_has_no_features_is_read_from_where_they_begin(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    sequence.feed(TOKENS[:8], 0)
    assert sequence.length == 8
    sequence.give(3, FEATURES[3:10])
    assert sequence.length == 4
    keep = sequence.rewind(8)
    logits = sequence.feed(TOKENS[keep:11], 1)
    assert logits is not None
    sequence.check(11)
    cache = reader.make_cache()
    _, expected = reader.read(reader.project(FEATURES[3:10]), mx.array(TOKENS[4:11]), cache)
    assert close(logits[-1], expected[-1])
    # It stays so.
    assert sequence.length == 11
    assert sequence.reusable_length(11, 11) == 0


def test_after_a_gap_a_text_is_read_from_where_features_begin_again(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    sequence.give(0, FEATURES[:5])
    sequence.rewind(0)
    sequence.feed(TOKENS[:6], 0)
    sequence.reuse(sequence.reusable_length(6, 6))
    sequence.give(8, FEATURES[8:12])
    # Only then is it seen that those of positions 5 to 7 will not come.
    assert sequence.rewind(6) == 0
    logits = sequence.feed(TOKENS[:13], 1)
    cache = reader.make_cache()
    _, expected = reader.read(reader.project(FEATURES[8:12]), mx.array(TOKENS[9:13]), cache)
    assert logits is not None
    assert close(logits[-1], expected[-1])
    assert sequence.take_state(TOKENS[:13]) is None


def test_what_was_committed_last_is_read_once_the_text_is_over(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    sequence.give(0, FEATURES[:5])
    sequence.rewind(0)
    sequence.feed(TOKENS[:6], 0)
    sequence.feed((7, 8), 1)  # drafted, wrongly
    sequence.give(5, FEATURES[5:11])
    assert sequence.settle((*TOKENS[:6], 7, 8), TOKENS[:14]) == TOKENS[:12]
    sequence.check(12)
    # So the features of the next turn follow without a gap.
    sequence.reuse(sequence.reusable_length(12, 20))
    sequence.give(11, FEATURES[11:])
    keep = sequence.rewind(12)
    assert keep == 12
    logits = sequence.feed(TOKENS[keep:], 1)
    assert logits is not None
    assert close(logits[-1], logits_from_the_start(reader, NUM_TOKENS))


def test_reuse_keeps_what_was_read_with_features(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    sequence.give(0, FEATURES[:9])
    sequence.rewind(0)
    sequence.feed(TOKENS[:10], 0)
    sequence.feed(TOKENS[10:12], 1)
    assert sequence.reusable_length(12, 12) == 10
    sequence.reuse(7)
    sequence.check(7)
    with pytest.raises(RewindError, match="asked to rewind to 9"):
        sequence.rewind(9)


@pytest.mark.parametrize("num_common", [7, 9])
@pytest.mark.parametrize("start", [4, 7])
def test_another_text_is_read_with_its_own_features(reader: Eagle3Reader, num_common: int, start: int) -> None:
    sequence = FeatureSequence(reader)
    sequence.give(0, FEATURES[:15])
    sequence.rewind(0)
    sequence.feed(TOKENS[:16], 0)
    sequence.give(15, FEATURES[15:17])
    # The other one goes its own way after the tokens that both share; its beginning is reused less far.
    tokens = (*TOKENS[:num_common], *TOKENS[: 20 - num_common])
    features = mx.concatenate([FEATURES[:num_common], mx.random.normal((20 - num_common, 96), key=mx.random.key(9))])
    assert sequence.reusable_length(num_common, 19) == num_common
    sequence.reuse(7)
    assert sequence.awaits_features
    # The target may have reused less, or more.
    begin = start if num_common == 7 else start + 2
    sequence.give(begin, features[begin:19])
    assert not sequence.awaits_features
    keep = sequence.rewind(sequence.length)
    logits = sequence.feed(tokens[keep:], 1)
    cache = reader.make_cache()
    _, expected = reader.read(reader.project(features[:19]), mx.array(tokens[1:20]), cache)
    assert logits is not None
    assert close(logits[-1], expected[-1])


def test_a_text_goes_on_without_copying_what_came_before(reader: Eagle3Reader) -> None:
    sequence = FeatureSequence(reader)
    features = mx.random.normal((300, 96), key=mx.random.key(4))
    pieces: list[mx.array] = []
    for start in range(0, 300, 3):
        sequence.give(start, features[start : start + 3])
        sequence.rewind(sequence.length)
        pieces = sequence._fresh.pieces if start == 150 else pieces
    assert sequence._fresh.end == 300
    assert len(pieces) > 2
    assert all(found is piece for found, piece in zip(sequence._fresh.pieces, pieces[:-1], strict=False))
