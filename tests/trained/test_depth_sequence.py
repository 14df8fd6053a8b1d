"""A text of a drafter that foresees several tokens from the same features: layers of MTP in a chain, and P-EAGLE."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from trained_drafters import mtp_readers, mtp_target_of

from actors.trained import depth_sequence
from actors.trained.depth_sequence import DepthSequence
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.eagle3 import Eagle3Reader, load_eagle3
from protocol.errors import RewindError
from protocol.messages import Features

NUM_TOKENS = 40
TOKENS = tuple(mx.random.randint(0, 48, (NUM_TOKENS,), key=mx.random.key(1)).tolist())  # type: ignore[arg-type]
ALL_FEATURES = mx.random.normal((NUM_TOKENS, 96), key=mx.random.key(2))


class Subject:
    """A drafter of which texts are made."""

    def __init__(self, case: Path) -> None:
        if case.parent.name == "mtp":
            self.modules: Any = mtp_readers(case, mtp_target_of(case))
            self.num_parallel, self.num_depths = 0, len(self.modules)
        else:
            loaded = load_eagle3(DrafterFiles.read(case))
            self.modules, self.num_parallel = [Eagle3Reader(loaded)], loaded.model.config.num_parallel
            self.num_depths = 1 + self.num_parallel
        self.features = ALL_FEATURES[:, : self.modules[0].feature_width]

    def sequence(self) -> DepthSequence:
        return DepthSequence(self.modules, self.num_parallel)

    def expected(self, tokens: tuple[int, ...], features: mx.array, begin: int = 0) -> mx.array:
        """The logits after a text that is read from the start, with the features of the positions from `begin` on."""
        sequence = self.sequence()
        sequence.give(begin, features)
        logits = sequence.feed(tokens, 1)
        assert logits is not None
        return logits[0]


@pytest.fixture(scope="module", params=["mtp/deepseek_v3_deep", "mtp/step3p5_deep", "peagle/deep"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(Path(__file__).parent / request.param)


def close(found: mx.array, expected: mx.array) -> bool:
    """Whether logits are the same, those of ids that the drafter lacks included."""
    return bool(mx.all((found == expected) | (mx.abs(found - expected) < 1e-3)))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_foreseen_follows_from_the_features_that_came_last_however_they_came(
    subject: Subject, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that one text is read in several passes.
    monkeypatch.setattr(depth_sequence, "MAX_READ", 5)
    monkeypatch.setattr(depth_sequence, "MAX_READ_WITH_LOGITS", 3)
    draws, sequence, committed, given, text = random.Random(seed), subject.sequence(), 0, 0, list[int]()
    while (committed := committed + draws.randint(1, 9)) <= NUM_TOKENS:
        if draws.random() < 0.8 and committed - 1 > given:
            sequence.give(given, subject.features[given : committed - 1])
            given = committed - 1
        num_right = next((i for i, token in enumerate(text) if token != TOKENS[i]), len(text))
        sequence.rewind(min(num_right, committed - draws.randint(0, 1)))
        logits = None
        if sequence.length < committed:
            logits = sequence.feed(TOKENS[sequence.length : committed], draws.randint(0, 1))
        sequence.check(committed)
        text = list(TOKENS[:committed])
        # Ahead, rightly or wrongly.
        for _ in range(draws.randint(0, subject.num_depths + 2)):
            if logits is not None and given > 0 and len(text) - 1 - given < subject.num_depths:
                assert sequence.staleness == len(text) - 1 - given
                assert close(logits[-1], subject.expected(tuple(text), subject.features[:given]))
            is_right = len(text) < NUM_TOKENS and draws.random() < 0.7
            text.append(TOKENS[len(text)] if is_right else 7)
            logits = sequence.feed_lazy(mx.array(text[-1:]))
            sequence.check(len(text))
    sequence.close()


@pytest.mark.parametrize("num_before", [0, 10])
def test_rows_of_a_text_that_is_caught_up_with_are_those_of_its_positions(
    subject: Subject, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth_sequence, "MAX_READ", 5)
    monkeypatch.setattr(depth_sequence, "MAX_READ_WITH_LOGITS", 3)
    sequence = subject.sequence()
    sequence.give(0, subject.features[:29])
    sequence.feed(TOKENS[:num_before], 0)
    rows = sequence.feed(TOKENS[num_before:31], 21)
    assert rows is not None
    assert rows.shape[0] == 21
    for i, row in enumerate(rows):
        known = min(29, 10 + i)
        assert close(row, subject.expected(TOKENS[: 11 + i], subject.features[:known]))


def test_after_the_last_depth_a_layer_goes_on_and_rows_do_not(subject: Subject) -> None:
    sequence = subject.sequence()
    assert sequence.awaits_features
    nothing = sequence.feed(TOKENS[:3], 3)
    sequence.rewind(0)
    sequence.give(0, subject.features[:5])
    sequence.feed(TOKENS[: 5 + subject.num_depths], 0)
    beyond = sequence.feed(TOKENS[5 + subject.num_depths : 6 + subject.num_depths], 1)
    assert nothing is not None
    assert beyond is not None
    assert not nothing.any()
    assert bool(beyond.any()) == (subject.num_parallel == 0)
    # Another way, after what was drafted.
    sequence.feed((7, 7, 7), 1)
    sequence.rewind(sequence.length - 3)
    tokens = TOKENS[: 10 + subject.num_depths]
    other = sequence.feed(tokens[sequence.length :], 1)
    assert other is not None
    assert close(other[0], subject.expected(tokens, subject.features[:5]))
    assert sequence.foreseen == (6 + subject.num_depths if subject.num_parallel else None)
    with pytest.raises(RewindError, match="asked to rewind to 50"):
        sequence.rewind(50)
    with pytest.raises(RewindError, match="should have 3 tokens"):
        sequence.check(3)
    sequence._caches[-1][0].trim(1)
    with pytest.raises(RewindError, match="a layer should hold"):
        sequence.check(sequence.length)


def test_a_text_whose_beginning_has_no_features_is_read_from_where_they_begin(subject: Subject) -> None:
    sequence = subject.sequence()
    sequence.feed(TOKENS[:8], 0)
    for begin, more, end in ((3, 3, 10), (15, 15, 20), (15, 17, 24)):
        # The second time, some between are missing; the third time, some come once more.
        sequence.give(more, subject.features[more:end])
        logits = sequence.feed(TOKENS[sequence.length : end + 1], 1)
        assert logits is not None
        assert close(logits[-1], subject.expected(TOKENS[: end + 1], subject.features[begin:end], begin))
        sequence.check(end + 1)


@pytest.mark.parametrize("start", [5, 7, 9])
def test_another_text_is_read_with_its_own_features(subject: Subject, start: int) -> None:
    sequence = subject.sequence()
    sequence.give(0, subject.features[:15])
    sequence.feed(TOKENS[:16], 0)
    sequence.feed(TOKENS[16:19], 1)
    sequence.give(15, subject.features[30:32])
    assert sequence.num_bytes > 0
    assert sequence.reusable_length(9, 19) == 9
    sequence.reuse(7)
    sequence.check(7)
    assert sequence.awaits_features
    tokens = (*TOKENS[:9], *TOKENS[20:30])
    features = mx.concatenate([subject.features[:9], subject.features[20:30]])
    sequence.give(start, features[start:12])
    for end in (13, 14):
        logits = sequence.feed(tokens[sequence.length : end], 1)
        assert logits is not None
        assert close(logits[-1], subject.expected(tokens[:end], features[:12]))


def test_a_text_whose_cache_was_lost_is_read_again(subject: Subject) -> None:
    sequence = subject.sequence()
    sequence.give(0, subject.features[:9])
    sequence.feed(TOKENS[:11], 1)
    sequence.forget()
    sequence.check(0)
    logits = sequence.feed(TOKENS[:11], 1)
    assert logits is not None
    assert close(logits[-1], subject.expected(TOKENS[:11], subject.features[:9]))


@pytest.mark.parametrize("num_common", [21, 18])
def test_a_text_goes_on_from_its_state_with_the_features_of_its_last_positions(
    subject: Subject, num_common: int
) -> None:
    sequence, first, num_modules = subject.sequence(), 12, len(subject.modules)
    sequence.give(0, subject.features[:20])
    sequence.feed(TOKENS[:19], 1)
    sequence.feed(TOKENS[19:23], 1)
    sequence.rewind(21)
    state = sequence.take_state(TOKENS[:21])
    assert state is not None
    assert state.features is not None
    restored = subject.sequence()
    restored.put_state(attrs.evolve(state, features=Features(first, state.features.values[first:])))
    assert (restored.length, restored.num_given) == (21, 20)
    restored.check(21)
    assert restored.reusable_length(first + num_modules - 1, 21) == 0
    assert restored.reusable_length(first + num_modules, 21) == first + num_modules
    assert restored.reusable_length(num_common, 21) == num_common
    restored.reuse(num_common)
    tokens = (*TOKENS[:num_common], *TOKENS[25:31])
    features = mx.concatenate([subject.features[:num_common], subject.features[25:31]])
    for given in (min(20, num_common), num_common + 2):
        if given > restored.num_given:
            restored.give(restored.num_given, features[restored.num_given : given])
        for end in range(max(given, num_common) + 1, given + 1 + subject.num_depths):
            logits = restored.feed(tokens[restored.length : end], 1)
            assert logits is not None
            assert close(logits[-1], subject.expected(tokens[:end], features[:given])), (given, end)
        restored.rewind(num_common + 1)
    assert subject.sequence().take_state(()) is None
    # Without a beginning, there is nothing that could be read again.
    sequence.give(30, subject.features[30:33])
    sequence.feed(TOKENS[21:34], 0)
    assert sequence.take_state(TOKENS[:34]) is None
