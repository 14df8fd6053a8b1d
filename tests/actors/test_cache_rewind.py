"""Rewinds of real caches: after any sequence of feeds and rewinds, a cache reads on as if it held only what is left.

On one thread and without a runtime, except where quantised and bounded caches are compared with plain decoding.
"""

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from cache_subjects import ATOL, SUBJECTS, TEXT, VOCAB_SIZE, WINDOW, Concatenating, Subject, subject
from completions import ids, open_and_close
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from models import Wrapped, gemma3_text, greedy, llama, mamba, near, prompt_of
from sweeps import sweep

import runtime
from actors.mlx.cache_kinds import kinds_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.sequence import MLXSequence
from actors.model import RewindMode
from protocol.errors import RewindError

CAN_TRIM = [name for name in SUBJECTS if "ArraysCache" not in name]
CACHES_AND_MODES = [
    *[(name, "auto") for name in SUBJECTS],
    *[(name, "checkpoint") for name in CAN_TRIM],
    *[(name, "trim") for name in ("ConcatenateKVCache", "SlidingWindowCache", "ChunkedKVCache")],
    ("ArraysCache, mamba", "none"),
]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Exerciser:
    """Applies the operations of both actors to a sequence, and tracks the tokens that it should hold.

    The committed text is a prefix of `TEXT`. Drafts agree with it for a while and then differ.
    """

    def __init__(self, of: Subject, rewind: str, *, prompt_length: int) -> None:
        self.subject = of
        self.sequence = of.open_sequence(rewind)
        self.num_committed = prompt_length
        self.num_prefilled = prompt_length - 1
        self.cached_tokens: list[int] = []
        self.seen: list[tuple[tuple[int, ...], mx.array]] = []
        self.modes: set[RewindMode] = set()
        if self.num_prefilled:
            self.sequence.feed(tuple(TEXT[: self.num_prefilled]), 0)
            self.cached_tokens = TEXT[: self.num_prefilled]
        self.sequence.check(len(self.cached_tokens))

    @property
    def committed(self) -> list[int]:
        return TEXT[: self.num_committed]

    def draft_of(self, num_tokens: int, num_right: int) -> list[int]:
        after = TEXT[self.num_committed : self.num_committed + num_tokens]
        return [token if i < num_right else (token + 7) % VOCAB_SIZE for i, token in enumerate(after)]

    def commit(self, num_tokens: int) -> None:
        """Commit tokens of the text that the sequence has not read."""
        self.num_committed += num_tokens

    def go_back(self, length: int) -> None:
        """Rewind, at most to the end of the committed text."""
        if len(self.cached_tokens) > max(length, self.num_committed):
            self.rewind(max(length, self.num_committed))

    def rewind(self, length: int) -> int:
        got = self.sequence.rewind(length)
        assert got <= length
        del self.cached_tokens[got:]
        self.sequence.check(len(self.cached_tokens))
        return got

    def verify(self, num_tokens: int, num_right: int) -> None:
        """A target's round: feed the committed tokens and a proposal in one pass, then rewind to what was accepted."""
        if (keep := common_length(self.cached_tokens, self.committed)) < len(self.cached_tokens):
            self.rewind(keep)
        proposal = self.draft_of(num_tokens, num_right)
        feed = self.committed[len(self.cached_tokens) :]
        if self.prepare(len(feed) + len(proposal)) is RewindMode.SINGLE:
            proposal = []
        if not feed + proposal:
            return
        self.feed(feed + proposal)
        num_accepted = min(num_right, len(proposal))
        self.rewind(min(len(self.cached_tokens), self.num_committed + num_accepted))
        self.commit(num_accepted + 1)

    def draft(self, num_tokens: int, num_right: int) -> None:
        """A drafter's steps: feed tokens until the draft is complete, whatever is cached already."""
        text = self.committed + self.draft_of(num_tokens, num_right)
        keep = common_length(self.cached_tokens, text)
        if keep == len(text):
            return
        self.rewind(keep)
        feed = text[len(self.cached_tokens) :]
        if len(text) > self.num_committed and self.prepare(len(feed)) is RewindMode.SINGLE:
            return
        self.feed(feed)
        self.prepare(1)

    def prepare(self, num_tokens: int) -> RewindMode:
        rewind_mode = self.sequence.prepare(num_tokens, self.num_committed)
        self.modes.add(rewind_mode)
        return rewind_mode

    def feed(self, tokens: Sequence[int]) -> None:
        rows = self.sequence.feed(tuple(tokens), len(tokens))
        assert rows is not None
        mx.eval(rows)
        for i, token in enumerate(tokens):
            self.cached_tokens.append(token)
            self.seen.append((tuple(self.cached_tokens), rows[i]))
        self.sequence.check(len(self.cached_tokens))

    def assert_nothing_shows(self) -> None:
        """Assert that all logits equal those of a sequence that was never rewound."""
        expected = self.subject.rows(self.num_prefilled, [text for text, _ in self.seen])
        for (text, row), other in zip(self.seen, expected, strict=True):
            off = mx.abs(row - other).max().item()
            assert off < ATOL, f"the logits after {len(text)} tokens are off by {off}"
        self.seen.clear()


a_number = st.integers(0, 4)
operations = st.lists(
    st.one_of(
        st.tuples(st.just(Exerciser.commit), st.integers(1, 3)),
        st.tuples(st.just(Exerciser.verify), a_number, a_number),
        st.tuples(st.just(Exerciser.draft), a_number, a_number),
        st.tuples(st.just(Exerciser.go_back), st.integers(0, 30)),
    ),
    min_size=6,
    max_size=12,
)


@pytest.mark.slow
@sweep("name, rewind", CACHES_AND_MODES)
def test_whatever_was_taken_back_the_logits_are_those_of_what_is_left(name: str, rewind: str) -> None:
    @given(prompt_length=st.sampled_from([1, 4, 7, 10, 15]), steps=operations)
    @settings(max_examples=6)
    def exercise(prompt_length: int, steps: list[Any]) -> None:
        exerciser = Exerciser(subject(name), rewind, prompt_length=prompt_length)
        for act, *args in steps:
            act(exerciser, *args)
        exerciser.assert_nothing_shows()

    exercise()


@sweep("name, rewind", CACHES_AND_MODES)
def test_a_sequence_can_be_rewound_at_every_length_of_a_text(name: str, rewind: str) -> None:
    exerciser = Exerciser(subject(name), rewind, prompt_length=2)
    for num_right in (0, 2, 3, 1):
        exerciser.verify(3, num_right)
        exerciser.draft(1, 1)
        exerciser.draft(2, 1)
        exerciser.draft(3, 0)
        exerciser.go_back(exerciser.num_committed + 1)
        exerciser.commit(1)
    exerciser.assert_nothing_shows()
    if rewind == "none":
        assert exerciser.modes == {RewindMode.SINGLE}
    elif rewind == "checkpoint":
        assert RewindMode.TRIM not in exerciser.modes
        assert RewindMode.CHECKPOINT in exerciser.modes
    else:
        assert (RewindMode.TRIM in exerciser.modes) == (name in CAN_TRIM)


# --- sliding windows and bounded caches -----------------------------------------------------------


@sweep("name", ["SlidingWindowCache", "RotatingKVCache that keeps its first", "ArraysCache and SlidingWindowCache"])
@sweep(
    "num_settled, rewind",
    [(WINDOW - 3, "auto"), (WINDOW, "checkpoint"), (WINDOW, "auto"), (3 * WINDOW, "auto"), (3 * WINDOW, "checkpoint")],
)
def test_a_drafter_can_go_back_to_each_of_its_steps_around_a_full_window(name, rewind, num_settled):
    exerciser = Exerciser(subject(name), rewind, prompt_length=num_settled)
    exerciser.feed(exerciser.committed[len(exerciser.cached_tokens) :])
    depth = 4
    for back_to in reversed(range(depth)):
        for num_tokens in range(1, depth + 1):
            exerciser.draft(num_tokens, depth)
        assert exerciser.rewind(num_settled + back_to) <= num_settled + back_to
        # Continue differently from there: what this writes must not show in the checkpoints below.
        for num_tokens in range(back_to + 1, depth + 1):
            exerciser.draft(num_tokens, back_to)
    exerciser.assert_nothing_shows()


@pytest.mark.parametrize(
    ("name", "rewind", "rewind_mode"),
    [
        ("SlidingWindowCache", "auto", RewindMode.TRIM),
        ("SlidingWindowCache", "checkpoint", RewindMode.CHECKPOINT),
        ("RotatingKVCache that keeps its first", "auto", RewindMode.CHECKPOINT),
        ("ArraysCache and SlidingWindowCache", "auto", RewindMode.CHECKPOINT),
    ],
)
def test_every_step_beyond_a_full_window_can_be_gone_back_to_without_replay(name, rewind, rewind_mode):
    exerciser = Exerciser(subject(name), rewind, prompt_length=3 * WINDOW)
    exerciser.feed(exerciser.committed[len(exerciser.cached_tokens) :])
    for num_tokens in range(1, 6):
        exerciser.draft(num_tokens, 5)
    assert exerciser.modes == {rewind_mode}
    for num_tokens in reversed(range(5)):
        assert exerciser.rewind(3 * WINDOW + num_tokens) == 3 * WINDOW + num_tokens


def test_tokens_beyond_a_window_that_keeps_its_first_are_read_one_by_one() -> None:
    sequence = subject("RotatingKVCache that keeps its first").open_sequence("auto")
    sequence.feed(tuple(TEXT[: WINDOW - 3]), 1)
    assert sequence.prepare(2, WINDOW - 3) is RewindMode.TRIM
    assert sequence.prepare(3, WINDOW - 3) is RewindMode.CHECKPOINT  # until the window is full
    assert sequence.prepare(4, WINDOW - 3) is RewindMode.SINGLE
    sequence.feed(tuple(TEXT[WINDOW - 3 : 2 * WINDOW]), 1)
    assert sequence.prepare(1, 2 * WINDOW) is RewindMode.CHECKPOINT
    assert sequence.prepare(2, 2 * WINDOW) is RewindMode.SINGLE


# --- bounds ---------------------------------------------------------------------------------------


@sweep("name", SUBJECTS)
def test_a_sequence_refuses_a_rewind_to_where_nothing_was_kept(name: str) -> None:
    sequence = subject(name).open_sequence("none")
    sequence.feed(tuple(TEXT[:5]), 1)
    with pytest.raises(RewindError, match="asked to rewind to 6 tokens a cache that holds 5"):
        sequence.rewind(6)
    with pytest.raises(RewindError, match="cannot be trimmed"):
        sequence.rewind(3)
    assert sequence.rewind(5) == 5


class Rounds:
    """A sequence on which drafter's and target's operations alternate without end."""

    def __init__(self, model: nn.Module) -> None:
        self.sequence = MLXSequence(model, CacheOptions(rewind="checkpoint"), vocab_size=VOCAB_SIZE)
        self.length = 0

    def run(self, num_rounds: int) -> int:
        """Returns: the maximum number of checkpoints kept at once."""
        max_checkpoints = 0
        for i in range(num_rounds):
            for _ in range(3):
                self.sequence.prepare(1, self.length)
                self._feed(1)
                max_checkpoints = max(max_checkpoints, len(self.sequence._checkpoints))
            stands = self.length + i % 3
            got = self.sequence.rewind(stands)
            self._feed(stands + 1 - got)
            self.length = stands + 1
            self.sequence.check(self.length)
        return max_checkpoints

    def memory(self) -> int:
        """Bytes in use besides the caches themselves, which may grow with the text."""
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory() - sum(layer.nbytes for layer in self.sequence.cache)

    def _feed(self, num_tokens: int) -> None:
        mx.eval(self.sequence.feed((3, 1, 4, 1, 5)[:num_tokens], 1))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "SlidingWindowCache": lambda: build("gemma3_text", num_hidden_layers=2, sliding_window_pattern=2),
    "ArraysCache": lambda: mamba(num_hidden_layers=1),
    "ConcatenateKVCache": lambda: Concatenating(llama(num_hidden_layers=1)),
}


@pytest.mark.parametrize("name", SMALL)
def test_checkpoints_do_not_pile_up_and_nor_does_memory(name: str) -> None:
    rounds = Rounds(SMALL[name]())
    assert 3 <= rounds.run(24) <= 4
    before = rounds.memory()
    assert 3 <= rounds.run(40) <= 4
    checkpoint = sum(kind.checkpoint_bytes(layer) for kind, layer in kinds_of(rounds.sequence.cache))
    # About three checkpoints; how much of them is shared with the caches depends on the round.
    assert rounds.memory() - before < 4 * checkpoint + 2**14
    rounds.sequence.prepare(1, rounds.length)
    assert len(rounds.sequence._checkpoints) == 1
    rounds.sequence.close()
    assert rounds.sequence._checkpoints == []


# --- quantised and bounded caches, through the runtime --------------------------------------------


@functools.cache
def wide_headed() -> nn.Module:
    return build("qwen3", head_dim=32)


QUANTISED = [(8, 0, "right"), (8, 13, "near"), (4, 6, "near")]
BOUNDED = [(7, "near"), (16, "right")]


@sweep(
    "options, drafter",
    [
        *(
            ({"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}, drafter)
            for bits, start, drafter in QUANTISED
        ),
        *(({"max_kv_size": size}, drafter) for size, drafter in BOUNDED),
    ],
)
async def test_quantised_and_bounded_caches_give_the_text_of_plain_decoding_with_them(options, drafter):
    target = wide_headed()
    draft = target if drafter == "right" else near(target, noise=0.1)
    async with runtime.open((target, None), (draft, None), **options) as rt:
        for length, lookaheads in ((1, (1,)), (12, (0, 3))):
            prompt = prompt_of(length, vocab_size=VOCAB_SIZE)
            text = greedy(target, prompt, 24, **options)
            assert len(set(text)) > 4
            for lookahead in lookaheads:
                completion = await rt.generate(prompt, max_tokens=24, lookahead=lookahead)
                assert ids(completion) == text, f"prompt of {length}, lookahead {lookahead}"
                assert completion.statistics.draft_failures == 0
        statistics = rt.statistics()
    assert statistics.accepted > 0
    assert statistics.rounds > statistics.n1_rounds
    assert statistics.n1_rounds > 0 or "kv_bits" in options


# --- unknown cache classes ------------------------------------------------------------------------


class CleverKVCache(KVCache):
    """An unknown subclass of a known cache, of which one is warned once a process."""


class Unknown(Wrapped):
    def make_cache(self) -> list[Any]:
        return [CleverKVCache() for _ in self.layers]


async def test_unknown_cache_classes_are_fed_one_token_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = Unknown(llama()), prompt_of(5)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        async with runtime.open((model, None), (llama(), None)) as rt:
            completion = await rt.generate(prompt, max_tokens=12, lookahead=3)
        async with runtime.open((llama(), None), (model, None)) as rt:
            drafted = await rt.generate(prompt, max_tokens=12, lookahead=3)
    assert ids(completion) == ids(drafted) == greedy(llama(), prompt, 12)
    assert completion.statistics.n1_rounds >= completion.statistics.rounds - 1 > 0
    assert drafted.statistics.draft_failures == 0
    warnings = [record.getMessage() for record in caplog.records if record.name == "outrider"]
    assert warnings == ["the cache class CleverKVCache is not known: its model is fed one token at a time"]


async def test_quantising_a_rotating_cache_is_refused_at_open() -> None:
    with pytest.raises(runtime.ModelError, match="kv_bits cannot quantise"):
        await open_and_close((gemma3_text(), None), kv_bits=8, kv_group_size=32)
