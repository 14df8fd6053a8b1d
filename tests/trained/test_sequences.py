"""A text of a trained drafter: whatever comes when, what is drafted is what features and tokens say."""

import random
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from architectures import build
from sweeps import sweep
from trained_drafters import close, dflash_reader, mtp_readers, mtp_target_of

from actors.prefix_cache import common_length, pack
from actors.trained import depth_sequence
from actors.trained.depth_sequence import DepthSequence, Masks, ModulePass
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.dflash import BlockSequence
from actors.trained.kinds.eagle3 import Eagle3Reader, load_eagle3
from actors.trained.kinds.gemma4_assistant import attach_gemma4_assistant
from actors.trained.kinds.medusa import HeadPass, HeadSequence, load_medusa
from actors.trained.positioned_rows import PositionedRows
from actors.trained.trained_sequence import TrainedSequence
from protocol.errors import RewindError
from protocol.messages import Features

NUM_TOKENS = 40
# Few different ones, so that what was drafted elsewhere may look like what comes next.
TOKENS = tuple(mx.random.randint(0, 2, (NUM_TOKENS,), key=mx.random.key(1)).tolist())
ALL_FEATURES = mx.random.normal((NUM_TOKENS, 96), key=mx.random.key(2))


class Subject:
    """A drafter of which texts are made.

    Attributes:
        num_depths: how many tokens are foreseen from the features that came last.
        goes_on: whether it drafts further ones with its own hidden states.
    """

    features = ALL_FEATURES

    def __init__(self, num_depths: int, *, goes_on: bool = False) -> None:
        self.num_depths, self.goes_on = num_depths, goes_on

    def sequence(self) -> TrainedSequence:
        raise NotImplementedError

    def expected(self, tokens: tuple[int, ...], features: mx.array, begin: int = 0) -> mx.array:
        """The logits after a text that is read from the start, with the features of the positions from `begin` on."""
        sequence = self.sequence()
        sequence.give(begin, features)
        logits = sequence.feed(tokens, 1)
        return logits[0]


class Depths(Subject):
    """EAGLE-3, P-EAGLE, or layers of MTP."""

    def __init__(self, case: Path) -> None:
        self.masks: Masks | None = None
        if case.parent.name == "mtp":
            self.modules = ModulePass.each(mtp_readers(case, mtp_target_of(case)))
        else:
            reader = Eagle3Reader(load_eagle3(DrafterFiles.read(case)))
            self.modules, self.masks = ModulePass.each([reader]), reader.masks
        num_parallel = 0 if self.masks is None else self.masks.num_masks
        super().__init__(len(self.modules) + num_parallel, goes_on=num_parallel == 0)
        self.features = ALL_FEATURES[:, : self.modules[0].reader.feature_width]

    def sequence(self) -> DepthSequence:
        return DepthSequence(self.modules, self.masks)


class Blocks(Subject):
    """DFlash, and what goes on from it."""

    def __init__(self, case: Path) -> None:
        self.reader = dflash_reader(case)
        super().__init__(self.reader.num_foreseen)

    def sequence(self) -> BlockSequence:
        return BlockSequence(self.reader)


class Heads(Subject):
    """Medusa."""

    features = ALL_FEATURES[:, :16]

    def __init__(self, case: Path) -> None:
        self.heads = [*map(HeadPass, load_medusa(DrafterFiles.read(case)).heads)]
        super().__init__(len(self.heads))

    def sequence(self) -> HeadSequence:
        return HeadSequence(lambda features: 2 * features, self.heads, 16, 40)


class Assistant(Subject):
    """Gemma 4's assistant, which drafts any number of tokens from the same features."""

    features = ALL_FEATURES[:, :72]

    def __init__(self, case: Path) -> None:
        target = build("gemma4_text", hidden_size=24, vocab_size=96)
        self.sequence = attach_gemma4_assistant(DrafterFiles.read(case), target, 96).open_sequence
        super().__init__(4, goes_on=True)


DEPTHS = ("eagle3/deep", "eagle3/norms", "mtp/deepseek_v3_deep", "mtp/step3p5_deep", "peagle/deep")
BLOCKS = ("whole", "reduced", "from_anchor", "dflash2", "dflash2_deep", "dflash2_short", "dspark_authors")
OTHERS = ("medusa/two_blocks", "gemma4/ordered")
KINDS = {"dflash": Blocks, "medusa": Heads, "gemma4": Assistant}


@pytest.fixture(scope="module", params=[*DEPTHS, *(f"dflash/{name}" for name in BLOCKS), *OTHERS])
def subject(request: pytest.FixtureRequest) -> Subject:
    kind, _ = request.param.split("/")
    return KINDS.get(kind, Depths)(Path(__file__).parent / request.param)


@pytest.fixture(scope="module", params=DEPTHS)
def depths(request: pytest.FixtureRequest) -> Depths:
    return Depths(Path(__file__).parent / request.param)


@pytest.fixture(scope="module", params=BLOCKS)
def blocks(request: pytest.FixtureRequest) -> Blocks:
    return Blocks(Path(__file__).parent / "dflash" / request.param)


@sweep("seed", range(5))
def test_what_is_foreseen_follows_from_the_features_that_came_last_however_they_came(subject, seed, monkeypatch):
    # So that one text is read in several passes.
    monkeypatch.setattr(depth_sequence, "MAX_READ", 5)
    monkeypatch.setattr(depth_sequence, "MAX_READ_WITH_LOGITS", 3)
    draws, sequence, features = random.Random(seed), subject.sequence(), subject.features
    committed, given, text = 0, 0, list[int]()

    def guess(text: list[int]) -> None:
        is_right = len(text) < NUM_TOKENS and draws.random() < 0.7
        text.append(TOKENS[len(text)] if is_right else 7)

    for turn in range(12):
        if turn % 2 == 1:  # another text, of which what was drafted before is right, with features of its own
            num_common = draws.randint(1, committed)
            sequence.reuse(sequence.reusable_length(num_common, len(text)))
            features = mx.concatenate([features[:num_common], features[num_common:][::-1]])
            committed, given, text = num_common, min(given, num_common), text[: sequence.length]
            assert (sequence.num_given, sequence.awaits_features) == (given, True)
        committed = min(committed + draws.choice((1, 1, 9)), NUM_TOKENS)
        if (draws.random() < 0.8 or sequence.awaits_features) and committed - 1 > given:
            sequence.give(given, features[given : committed - 1])
            given = committed - 1
        num_right = common_length(pack(text), pack(TOKENS))
        sequence.rewind(min(num_right, committed - draws.randint(0, 1)))
        text, logits = list(TOKENS[:committed]), None
        for _ in range(draws.choice((0, 2))):
            guess(text)
        if sequence.length < len(text):
            logits = sequence.feed(tuple(text[sequence.length :]), draws.randint(0, 1))
        for _ in range(draws.randint(0, subject.num_depths + 2)):
            if logits is not None and given > 0 and len(text) - 1 - given < subject.num_depths:
                assert sequence.staleness == len(text) - 1 - given
                assert close(logits[-1], subject.expected(tuple(text), features[:given]))
            guess(text)
            logits = sequence.feed_lazy(mx.array(text[-1:]))
            sequence.check(len(text))
    sequence.close()


@pytest.mark.parametrize("subject", [*DEPTHS, "gemma4/ordered"], indirect=True)
@sweep("num_before", [0, 10])
def test_rows_of_a_text_that_is_caught_up_with_are_those_of_its_positions(subject, num_before, monkeypatch):
    monkeypatch.setattr(depth_sequence, "MAX_READ", 5)
    monkeypatch.setattr(depth_sequence, "MAX_READ_WITH_LOGITS", 3)
    sequence = subject.sequence()
    sequence.give(0, subject.features[:29])
    sequence.feed(TOKENS[:num_before], 0)
    rows = sequence.feed(TOKENS[num_before:31], 21)
    assert rows.shape[0] == 21
    for i, row in enumerate(rows):
        known = min(29, 10 + i)
        assert close(row, subject.expected(TOKENS[: 11 + i], subject.features[:known]))


def test_rows_of_a_text_that_is_caught_up_with_come_block_by_block(blocks: Blocks) -> None:
    sequence, num_foreseen = blocks.sequence(), blocks.num_depths
    sequence.give(0, blocks.features[:29])
    sequence.feed(TOKENS[:10], 0)
    rows = sequence.feed(TOKENS[10:30], 20)
    assert rows.shape == (20, blocks.reader.vocab_size)
    for i, row in enumerate(rows):
        # After the token at position 10 + i.
        anchor = 10 + i // num_foreseen * num_foreseen
        assert close(row, blocks.expected(TOKENS[: 11 + i], blocks.features[:anchor]))


def test_after_the_last_depth_a_layer_goes_on_and_rows_do_not(subject: Subject) -> None:
    sequence = subject.sequence()
    assert sequence.awaits_features
    nothing = sequence.feed(TOKENS[:3], 3)
    sequence.rewind(0)
    sequence.give(0, subject.features[:5])
    sequence.feed(TOKENS[: 5 + subject.num_depths], 0)
    beyond = sequence.feed(TOKENS[5 + subject.num_depths : 6 + subject.num_depths], 1)
    assert beyond is not None
    assert not nothing.any()
    assert bool(beyond.any()) == subject.goes_on
    # Another way, after what was drafted.
    sequence.feed((7, 7, 7), 1)
    sequence.rewind(sequence.length - 3)
    tokens = TOKENS[: 10 + subject.num_depths]
    other = sequence.feed(tokens[sequence.length :], 1)
    assert close(other[0], subject.expected(tokens, subject.features[:5]))
    assert sequence.foreseen == (None if subject.goes_on else 6 + subject.num_depths)
    with pytest.raises(RewindError, match="asked to rewind to 50"):
        sequence.rewind(50)
    with pytest.raises(RewindError, match="should have 3 tokens"):
        sequence.check(3)
    if isinstance(sequence, DepthSequence):
        sequence._texts[-1].cache[0].trim(1)
        with pytest.raises(RewindError, match=r"layer 0 \(KVCache\) should hold"):
            sequence.check(sequence.length)


def test_a_text_whose_beginning_has_no_features_is_read_from_where_they_begin(subject: Subject) -> None:
    sequence = subject.sequence()
    sequence.feed(TOKENS[:8], 0)
    for begin, more, end in ((3, 3, 10), (15, 15, 20), (15, 17, 24)):
        # The second time, some between are missing; the third time, some come once more.
        sequence.give(more, subject.features[more:end])
        logits = sequence.feed(TOKENS[sequence.length : end + 1], 1)
        assert close(logits[-1], subject.expected(TOKENS[: end + 1], subject.features[begin:end], begin))
        sequence.check(end + 1)


@sweep("start", [5, 7, 9])
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
        assert close(logits[-1], subject.expected(tokens[:end], features[:12]))


@sweep("num_common", [21, 18])
def test_a_text_goes_on_from_its_state_with_the_features_of_its_last_positions(depths: Depths, num_common: int) -> None:
    sequence, first, num_modules = depths.sequence(), 12, len(depths.modules)
    sequence.give(0, depths.features[:20])
    sequence.feed(TOKENS[:19], 1)
    sequence.feed(TOKENS[19:23], 1)
    sequence.rewind(21)
    state = sequence.take_state(TOKENS[:21])
    assert state is not None
    assert state.features is not None
    restored = depths.sequence()
    restored.put_state(attrs.evolve(state, features=Features(first, state.features.values[first:])))
    assert (restored.length, restored.num_given) == (21, 20)
    restored.check(21)
    assert restored.reusable_length(first + num_modules - 1, 21) == 0
    assert restored.reusable_length(first + num_modules, 21) == first + num_modules
    assert restored.reusable_length(num_common, 21) == num_common
    restored.reuse(num_common)
    tokens = (*TOKENS[:num_common], *TOKENS[25:31])
    features = mx.concatenate([depths.features[:num_common], depths.features[25:31]])
    for given in (min(20, num_common), num_common + 2):
        if given > restored.num_given:
            restored.give(restored.num_given, features[restored.num_given : given])
        for end in range(max(given, num_common) + 1, given + 1 + depths.num_depths):
            logits = restored.feed(tokens[restored.length : end], 1)
            assert close(logits[-1], depths.expected(tokens[:end], features[:given])), (given, end)
        restored.rewind(min(restored.length, num_common + 1))
    assert depths.sequence().take_state(()) is None
    # Without a beginning, there is nothing that could be read again.
    sequence.give(30, depths.features[30:33])
    sequence.feed(TOKENS[21:34], 0)
    assert sequence.take_state(TOKENS[:34]) is None


def test_what_was_committed_last_is_read_once_the_text_is_over(subject: Subject) -> None:
    sequence = subject.sequence()
    sequence.give(0, subject.features[:5])
    sequence.feed(TOKENS[:6], 0)
    sequence.feed((7, 8), 1)  # drafted, wrongly
    sequence.give(5, subject.features[5:11])
    assert sequence.settle((*TOKENS[:6], 7, 8), TOKENS[:14]) == TOKENS[:12]
    sequence.check(12)
    # So the features of the next turn follow without a gap.
    sequence.reuse(sequence.reusable_length(12, 20))
    sequence.give(11, subject.features[11:23])
    logits = sequence.feed(TOKENS[12:24], 1)
    assert close(logits[-1], subject.expected(TOKENS[:24], subject.features[:23]))


# --- passes ---------------------------------------------------------------------------------------


class Counting:
    """A reader that counts the tokens of its passes."""

    vocab_size, feature_width = 5, 3

    def __init__(self) -> None:
        self.passes: list[int] = []

    def project(self, features: mx.array) -> mx.array:
        return features

    def make_cache(self) -> list[Any]:
        return []

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        self.passes.append(tokens.shape[1])
        return hidden, mx.ones((*tokens.shape, self.vocab_size))


def ones(num_positions: int) -> mx.array:
    return mx.ones((num_positions, Counting.feature_width))


def test_each_token_ahead_of_the_features_adds_one_until_they_come() -> None:
    reader = Counting()
    sequence = DepthSequence(ModulePass.each([reader]))
    sequence.give(0, ones(4))
    sequence.feed((1, 1, 1, 1, 1), 1)  # the last one is read with the features of the one before
    assert (sequence.num_given, sequence.staleness) == (4, 0)
    for staleness in (1, 2, 3):
        sequence.feed((2,), 1)
        assert sequence.staleness == staleness
    assert reader.passes == [4, 1, 1, 1]
    sequence.rewind(6)
    assert sequence.staleness == 1
    sequence.give(4, ones(1))
    sequence.feed((2, 3), 1)
    assert (sequence.num_given, sequence.staleness) == (5, 2)
    sequence.give(5, ones(2))
    sequence.feed((4,), 1)
    assert (sequence.num_given, sequence.staleness) == (7, 1)
    # What is stale is read again, in one pass, with the drafter's own hidden states where features are missing.
    assert reader.passes[4:] == [2, 1, 3]


def test_a_pass_that_is_timed_computes_something() -> None:
    reader = Counting()
    sequence = DepthSequence(ModulePass.each([reader]))
    sequence.give_nothing(20)
    sequence.feed((0,) * 8, 0)
    rows = sequence.feed((0, 0), 2)
    assert sum(reader.passes) == 9  # all but the first, which nothing comes before
    assert rows.tolist() == [[1.0] * reader.vocab_size] * 2


# --- rows of successive positions -----------------------------------------------------------------

ROWS = mx.arange(600).reshape(300, 2)


@sweep("seed", range(8))
def test_each_row_is_that_of_its_position(seed: int) -> None:
    draws, rows = random.Random(seed), PositionedRows()
    for _ in range(60):
        match draws.choice(("add", "add", "drop_from", "drop_before", "gap")):
            case "add":
                start = rows.end if rows.pieces else draws.randrange(5)
                rows.add(start, ROWS[start : start + draws.choice((1, 3, 40))])
            case "gap":
                rows.add(start := draws.randrange(100, 120), ROWS[start : start + 2])
                assert (rows.begin, rows.end) == (start, start + 2) or rows.end == start + 2
            case "drop_from":
                rows.drop_from(draws.randint(max(0, rows.begin - 2), rows.end + 2))
            case "drop_before":
                rows.drop_before(draws.randint(max(0, rows.begin - 2), rows.end))
        assert sum(piece.shape[0] for piece in rows.pieces) == rows.end - rows.begin
        if rows.pieces:
            begin = draws.randrange(rows.begin, rows.end)
            end = draws.randint(begin + 1, rows.end)
            assert mx.array_equal(rows.between(begin, end), ROWS[begin:end])


def test_adding_does_not_copy_what_is_there() -> None:
    rows = PositionedRows()
    for position in range(200):
        rows.add(position, ROWS[position : position + 1])
    first, *_ = rows.pieces
    assert 3 <= len(rows.pieces) <= 5
    rows.add(200, ROWS[200:203])
    assert rows.pieces[0] is first
    assert rows.num_bytes == 203 * ROWS[0].nbytes
    # Of another drafter.
    rows.add(203, mx.zeros((2, 5)))
    assert (rows.begin, rows.end) == (203, 205)
    rows.clear()
    assert (rows.begin, rows.end, rows.pieces) == (0, 0, [])
