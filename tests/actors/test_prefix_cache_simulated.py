"""The prefix cache in simulated time: whatever is cached, and however its text ended, the next text is right.

A scripted sequence knows only the tokens that it was fed. A sequence that was rewound wrongly for another text, or that
two sessions use at once, shows in the next text or in the comparison with the session state.
"""

import itertools
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    CACHES,
    ScriptedFailure,
    ScriptedModel,
    Simulation,
    agreeing,
    always,
    collect,
    continuation,
    every_cache,
    ids,
    never,
    pair_with,
    priced,
    run,
    simulated,
    truthful,
)
from sweeps import sweep
from trained_scripts import RecordingTarget, TrainedDraft

from actors.prefix_cache import MAX_SEQUENCES, CacheHit, PrefixCache, common_length, pack
from protocol.errors import RewindError
from runtime.engine.sessions import BUFFERED_ROUNDS

PROMPT = [5, 6, 7, 8, 9]
LOOKAHEADS = [0, 1, 3, "auto"]


async def turn(simulation: Simulation, prompt: list[int], num_tokens: int, **changes: Any) -> Any:
    """Generate a text and assert that it is right. Its tokens stay in the prefix cache."""
    completion = await simulation.runtime.generate(prompt, max_tokens=num_tokens, reuse_prefix=True, **changes)
    assert ids(completion.tokens) == continuation(prompt, num_tokens)
    return completion.statistics


def num_read(simulation: Simulation, actor: str, session: int) -> int:
    """Tokens of a session's prompt that an actor had to read."""
    spans = simulation.spans(actor, "prefill", session=session)
    return sum(span.num_read for span in spans)


@settings(max_examples=200)
@given(st.integers(0, 7000), st.integers(0, 700), st.integers(0, 700))
def test_what_texts_have_in_common_ends_where_they_first_differ(length: int, one: int, other: int) -> None:
    common = [*range(length)]
    texts = pack([*common, *[1000] * one]), pack([*common, *[2000] * other])
    assert common_length(*texts) == common_length(*reversed(texts)) == length
    assert common_length(texts[0], texts[0]) == length + one


# --- conversations --------------------------------------------------------------------------------


@every_cache
@sweep("lookahead", LOOKAHEADS)
async def test_a_text_that_goes_on_from_another_begins_with_what_is_cached(lookahead, cache, autojump_clock):
    for lengths in ((1, 6, 3, 8), (5, 2, 7, 4)):
        async with simulated(*pair_with(cache)) as simulation:
            text, num_known = list(PROMPT), 0
            for session, num_tokens in enumerate(lengths):
                statistics = await turn(simulation, text, num_tokens, lookahead=lookahead)
                assert statistics.prompt_tokens == len(text)
                # At least the prompt of the last turn but for its last token, which is fed with the first round.
                if "keeps_states" in cache or cache["undo"] is always:
                    assert statistics.cached_tokens >= num_known - 1
                assert num_read(simulation, "target", session) == len(text) - 1 - statistics.cached_tokens
                num_known = len(text)
                text += [*continuation(text, num_tokens), 1, 2, 3]


@sweep("num_tokens", range(BUFFERED_ROUNDS - 1, BUFFERED_ROUNDS + 3))
async def test_a_text_that_is_read_after_its_end_is_cached_by_both_models(num_tokens: int, autojump_clock: Any) -> None:
    price = priced(draft=17.0, verify=1.0)  # the drafter is in the middle of a draft when the target has ended
    async with simulated(*pair_with(CACHES["can be trimmed"], agreement=0.0), price=price) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=num_tokens, lookahead=1, reuse_prefix=True)
        while not simulation.instants("verdict") or simulation.instants("verdict")[-1].commit.finish_reason is None:
            if num_tokens > BUFFERED_ROUNDS + 1 and len(simulation.instants("verdict")) == BUFFERED_ROUNDS + 1:
                break  # the last round waits for the reader
            await trio.sleep(0.5)
        await trio.sleep(0.5)  # the target has returned its sequence
        assert await collect(stream) == continuation(PROMPT, num_tokens)
        longer = [*PROMPT, *continuation(PROMPT, num_tokens), 1, 2]
        await turn(simulation, longer, 3, lookahead=1)
        assert num_read(simulation, "target", 1) == 2
        assert num_read(simulation, "draft", 1) < len(longer) - len(PROMPT)


async def test_one_token_is_a_prefix_and_a_one_token_prompt_has_none(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        await turn(simulation, PROMPT, 2)
        assert (await turn(simulation, [PROMPT[0], 60, 61], 2)).cached_tokens == 1
        assert (await turn(simulation, [59, 60, 61], 2)).cached_tokens == 0
    async with simulated(*pair_with(CACHES["recurrent"])) as simulation:
        for _ in range(2):
            assert (await turn(simulation, PROMPT[:1], 3)).cached_tokens == 0


async def test_a_recurrent_cache_goes_back_to_where_the_answer_began(autojump_clock: Any) -> None:
    prompt = list(range(1, 41))
    async with simulated(*pair_with(CACHES["recurrent"]), price=priced()) as simulation:
        await turn(simulation, prompt, 9)
        # Another answer, as when its reasoning is left out: the text before the answer is still cached.
        assert (await turn(simulation, [*prompt, 60, 61], 4)).cached_tokens == len(prompt) - 1
        # And when the last user message is left out as well.
        assert (await turn(simulation, [*prompt[:-3], 60, 61], 4)).cached_tokens == len(prompt) - 1 - 16
        # Before that there is no state to return to.
        assert (await turn(simulation, [*prompt[:10], 60, 61], 4)).cached_tokens == 0


async def test_prefill_chunks_end_where_they_would_without_a_cache(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        await turn(simulation, PROMPT, 1)  # caches 5 tokens
        await turn(simulation, [*PROMPT, *[1] * 12], 1, prefill_step_size=4)
        assert [span.num_tokens for span in simulation.spans("target", "prefill", session=1)] == [4 - 1, 4, 4]


# --- which prompts may reuse what -----------------------------------------------------------------


async def test_nothing_is_kept_nor_taken_where_that_is_not_asked_for(autojump_clock: Any) -> None:
    async with simulated(*pair_with(CACHES["can be trimmed"])) as simulation:
        await simulation.runtime.generate(PROMPT, max_tokens=4)
        assert (await turn(simulation, PROMPT, 4)).cached_tokens == 0
        assert (await simulation.runtime.generate(PROMPT, max_tokens=4)).statistics.cached_tokens == 0
        for model in (simulation.target, simulation.draft):
            assert [sequence.is_closed for sequence in model.sequences[:2]] == [True, False]


@every_cache
async def test_texts_that_take_turns_and_only_begin_alike_do_not_take_each_others_sequences(cache, autojump_clock):
    async with simulated(*pair_with(cache)) as simulation:
        texts = [[5, 6, 7, first, *range(10, 40)] for first in (1, 2)]
        for target_queue in range(4):
            for text in texts:
                statistics = await turn(simulation, text, 6, lookahead=3)
                if target_queue and ("keeps_states" in cache or cache["undo"] is always):
                    assert statistics.cached_tokens >= len(text) - 14
                text += [*continuation(text, 6), 1, 2]
        assert len(simulation.target.sequences) == 2 or cache["undo"] is not always


async def test_a_text_that_begins_like_another_copies_the_beginning_and_leaves_it_the_rest(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        longest = [*range(1, 41), 50, 51, 52, 53, 54, 55]
        await turn(simulation, longest, 6)
        assert (await turn(simulation, [*range(1, 41), 60], 6)).cached_tokens == 40
        assert (await turn(simulation, [*range(1, 11), 60], 6)).cached_tokens == 10
        again = [*longest, *continuation(longest, 6), 1, 2]
        assert (await turn(simulation, again, 6)).cached_tokens == len(longest) + 6 - 1


# --- texts that were cancelled or failed ----------------------------------------------------------


@pytest.mark.slow
@sweep("cache, lookahead", zip(CACHES.values(), itertools.cycle(LOOKAHEADS)))
def test_a_text_cancelled_at_any_time_leaves_what_the_next_may_begin_with(lookahead, cache):
    prompt = list(range(1, 25))

    async def main(seconds: float) -> int:
        target, draft = pair_with(cache)
        async with simulated(target, draft) as simulation:
            got: list[int] = []
            with trio.move_on_after(seconds):
                asked = {"max_tokens": 12, "prefill_step_size": 8, "lookahead": lookahead, "reuse_prefix": True}
                async for token in simulation.runtime.stream(prompt, **asked):
                    got.append(token.id)
            assert got == continuation(prompt, 12)[: len(got)]
            return (await turn(simulation, [*prompt, *got, 1, 2], 5, lookahead=lookahead)).cached_tokens

    cached = [run(main, seconds) for seconds in [0.25 * i for i in range(0, 240, 9)]]
    assert cached[0] <= 8  # cancelled before or during the first chunk
    if cache["undo"] is always:
        assert cached == sorted(cached)
    if cache["undo"] is always or "keeps_states" in cache:
        assert cached[-1] >= len(prompt) - 1


async def test_what_the_drafter_guessed_is_dropped_before_a_sequence_is_kept(autojump_clock: Any) -> None:
    for cache in (CACHES["can be trimmed"], CACHES["recurrent"]):
        async with simulated(*pair_with(cache, agreement=1.0)) as simulation:
            await turn(simulation, PROMPT, 6, lookahead=3)
            await turn(simulation, PROMPT[::-1], 1)  # at its end, both are in the prefix cache
            text = [*PROMPT, *continuation(PROMPT, 6)]
            (cached_tokens,) = [each.tokens for each in simulation.draft.sequences if each.tokens[0] == PROMPT[0]]
            assert cached_tokens == text[: len(cached_tokens)]
            assert len(cached_tokens) > len(PROMPT)


async def test_a_trained_drafter_keeps_what_it_has_when_the_text_ends(caplog, autojump_clock):
    prompt = list(range(1, 41))
    draft = TrainedDraft(lambda history, staleness: truthful(history))
    async with simulated(RecordingTarget(truthful), draft, draft_price=priced(prefill=0.25)) as simulation:
        for num_tokens in (8, 8, 9):
            await turn(simulation, prompt, num_tokens, lookahead=3, prefill_step_size=8)
        assert [num_read(simulation, "draft", session) for session in range(3)] == [len(prompt) - 1, 0, 0]
    assert caplog.messages == []


@sweep("cache", ["can be trimmed", "recurrent"])
@sweep("lookahead", [0, 3])
async def test_a_text_whose_round_fails_just_as_it_is_cancelled_is_not_kept(cache, lookahead, autojump_clock):
    target = ScriptedModel(truthful, fails={"check": {2}}, **CACHES[cache])
    async with simulated(target, ScriptedModel(agreeing(0.7))) as simulation:
        with trio.move_on_after(9.0):  # in the first pass after that over the prompt
            await simulation.runtime.generate(PROMPT, max_tokens=9, lookahead=lookahead, reuse_prefix=True)
        await trio.sleep(20.0)
        assert target.num_calls["check"] == 2
        assert (await turn(simulation, PROMPT, 4, lookahead=lookahead)).cached_tokens == 0


@sweep("nth", range(1, 7))
async def test_a_drafter_that_failed_keeps_nothing(nth: int, autojump_clock: Any) -> None:
    draft = ScriptedModel(agreeing(0.7), fails={"feed": {nth}})
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        statistics = await turn(simulation, PROMPT, 12, lookahead=3)
        assert statistics.draft_failures == 1
        assert [sequence.is_closed for sequence in draft.sequences] == [True]
        again = await turn(simulation, PROMPT, 12, lookahead=3)
        assert (again.draft_failures, again.cached_tokens) == (0, len(PROMPT) - 1)


@sweep("call, nth, error", [("check", 5, None), ("reuse", 1, "reuse 1 failed"), ("check", 4, "check 4 failed")])
async def test_a_sequence_that_turns_out_to_be_wrong_is_closed(call, nth, error, autojump_clock):
    """In a round, as it is put away (after four tokens), or as it is taken."""
    target = ScriptedModel(truthful, fails={call: {nth}})
    async with simulated(target) as simulation:
        if call == "reuse" or error is None:
            await turn(simulation, PROMPT, 4)
        if error is not None:
            prompt = [*PROMPT, *continuation(PROMPT, 4), 1] if call == "reuse" else PROMPT
            with pytest.raises(RewindError, match=error):
                await turn(simulation, prompt, 4)
        assert (await turn(simulation, PROMPT, 4)).cached_tokens == 0
        assert [sequence.is_closed for sequence in target.sequences] == [True, False]


@sweep("call, error", [("copy", ScriptedFailure), ("reuse", RewindError)])
def test_a_sequence_that_cannot_be_copied_or_taken_is_closed(call: str, error: type[Exception]) -> None:
    scripted_cache = ScriptedCache(max_bytes=100, fails={call: {1}})
    sequence, _ = scripted_cache.read(1, 2, 3, 4)
    with pytest.raises(error):
        scripted_cache.take(*(1, 2, 3, 4, 5) if call == "reuse" else (1, 2, 9))
    assert sequence.is_closed
    assert len(scripted_cache.prefix_cache) == 0


# --- what is kept ---------------------------------------------------------------------------------


class ScriptedCache:
    """A prefix cache without a runtime."""

    def __init__(self, max_bytes: int, **model: Any) -> None:
        self.model = ScriptedModel(truthful, **model)
        self.prefix_cache = PrefixCache(self.model, max_bytes)

    def take(self, *tokens: int) -> CacheHit:
        """Take a sequence for a text."""
        return self.prefix_cache.open((*tokens, 63), alongside_model=False)

    def put(self, hit: CacheHit, *tokens: int) -> None:
        """Read the rest of a text, and return its sequence to the cache."""
        if tokens[hit.num_cached :]:
            hit.sequence.feed(tokens[hit.num_cached :], 0)
        self.prefix_cache.put(hit.sequence, tokens, tokens, alongside_model=False)

    def read(self, *tokens: int) -> tuple[Any, int]:
        """Do both. Returns: the sequence, and the number of tokens that it had cached."""
        hit = self.take(*tokens)
        self.put(hit, *tokens)
        return hit.sequence, hit.num_cached


def test_what_was_used_least_recently_goes_first_once_the_bytes_are_used_up() -> None:
    scripted_cache = ScriptedCache(max_bytes=120, bytes_per_token=10)
    one, two, three = (scripted_cache.read(first, 1, 2, 3)[0] for first in (10, 20, 30))
    assert scripted_cache.prefix_cache.num_bytes == 120
    assert scripted_cache.read(10, 1, 2, 3) == (one, 4)
    four, _ = scripted_cache.read(40, 1, 2, 3)
    assert [sequence.is_closed for sequence in (one, two, three, four)] == [False, True, False, False]
    assert scripted_cache.prefix_cache.num_bytes == 120
    assert scripted_cache.model.misuses == []


def test_a_sequence_larger_than_the_cache_is_closed_and_evicts_no_other() -> None:
    scripted_cache = ScriptedCache(max_bytes=50, bytes_per_token=10)
    small, _ = scripted_cache.read(1, 2)
    large, _ = scripted_cache.read(10, 20, 30, 40, 50, 60)
    assert (small.is_closed, large.is_closed) == (False, True)
    assert scripted_cache.prefix_cache.num_bytes == 20
    assert ScriptedCache(max_bytes=0).read(1, 2)[0].is_closed


def test_there_is_a_bound_to_how_many_sequences_a_search_looks_at() -> None:
    scripted_cache = ScriptedCache(max_bytes=10**9)
    sequences = [scripted_cache.read(1 + i % 60, i // 60, 1, 2, 3)[0] for i in range(MAX_SEQUENCES + 20)]
    assert len(scripted_cache.prefix_cache) <= MAX_SEQUENCES
    assert not sequences[-1].is_closed


@sweep("undo", [always, never])
def test_a_sequence_replaces_those_that_it_goes_on_from_if_it_can_be_trimmed(undo: Any) -> None:
    scripted_cache = ScriptedCache(max_bytes=10**9, undo=undo)
    first, second = scripted_cache.take(1, 2, 3), scripted_cache.take(1, 2, 3, 4, 5)
    scripted_cache.put(first, 1, 2, 3)
    scripted_cache.put(second, 1, 2, 3, 4, 5)
    assert (first.sequence.is_closed, second.sequence.is_closed) == (undo is always, False)
    assert len(scripted_cache.prefix_cache) == (1 if undo is always else 2)
    if undo is never:
        assert scripted_cache.take(1, 2, 3, 60).sequence is first.sequence
        assert scripted_cache.take(1, 2, 3, 4, 5).sequence is second.sequence


# --- any turns in any order -----------------------------------------------------------------------

target_queue = st.lists(
    st.tuples(
        st.integers(0, 3),  # which of the texts so far it continues
        st.integers(1, 40),  # number of tokens that it takes from that text
        st.lists(st.integers(0, 2), max_size=4),  # tokens that it adds
        st.integers(1, 6),  # number of tokens that it asks for
        st.sampled_from([None, 3.0, 20.0, 45.0]),  # seconds until it is cancelled
        st.sampled_from(LOOKAHEADS),
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=40)
@given(target_queue, st.sampled_from(list(CACHES)), st.sampled_from([10**9, 40, 0]))
def test_texts_that_share_beginnings_are_right_in_any_order(target_queue: Any, cache: str, max_bytes: int) -> None:
    async def main() -> None:
        texts = [[7, 7, 7]]
        async with simulated(*pair_with(CACHES[cache]), prefix_cache_bytes=max_bytes) as simulation:
            for which, length, added, num_tokens, seconds, lookahead in target_queue:
                prompt = texts[which % len(texts)][:length] + added
                got: list[int] = []
                with trio.move_on_after(10**6 if seconds is None else seconds):
                    stream = simulation.runtime.stream(
                        prompt, max_tokens=num_tokens, lookahead=lookahead, reuse_prefix=True, prefill_step_size=3
                    )
                    async for token in stream:
                        got.append(token.id)
                assert got == continuation(prompt, num_tokens)[: len(got)]
                assert seconds is not None or len(got) == num_tokens
                texts.append(prompt + got)

    run(main)
