"""Sessions that begin with the same prompt at the same time, in simulated time: one reads it for all."""

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    CACHES,
    ScriptedModel,
    Simulation,
    agreeing,
    always,
    collect,
    continuation,
    every_cache,
    ids,
    pair_with,
    priced,
    read_into,
    run,
    simulated,
    truthful,
)
from sweeps import sweep
from trained_scripts import RecordingTarget, TrainedDraft

from actors import actor
from actors.actor import ModelActor
from actors.prefix_cache import common_length
from protocol.errors import StreamFailedError

PROMPT = list(range(1, 41))
NUM_READ = len(PROMPT) - 1
ASKED: dict[str, Any] = {"max_tokens": 8, "reuse_prefix": True, "prefill_step_size": 8}


def num_read(simulation: Simulation, actor: str = "target") -> int:
    """Tokens of prompts that an actor has read, in all sessions."""
    return sum(span.num_tokens for span in simulation.spans(actor, "prefill"))


# --- who shares -----------------------------------------------------------------------------------


@every_cache
@sweep("lookahead", [0, 3, "auto"])
async def test_a_prompt_of_four_sessions_is_read_once_by_each_model(lookahead, cache, autojump_clock):
    async with simulated(*pair_with(cache)) as simulation:
        texts = await simulation.runtime.generate_many([PROMPT] * 4, lookahead=lookahead, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(PROMPT, 8)] * 4
        assert sorted(text.statistics.cached_tokens for text in texts) == [0, NUM_READ, NUM_READ, NUM_READ]
        assert sum(text.statistics.prefilled_tokens for text in texts) == num_read(simulation) == NUM_READ
        # It may read on what the target has committed meanwhile.
        assert NUM_READ * bool(lookahead) <= num_read(simulation, "draft") < 2 * NUM_READ
        # What each of them leaves is as good as what the reader leaves.
        if "keeps_states" in cache or cache["undo"] is always:
            for last in range(4):
                other = await simulation.runtime.generate([*PROMPT, last], lookahead=lookahead, **ASKED)
                assert other.statistics.cached_tokens >= NUM_READ


@pytest.mark.parametrize("others", [{"reuse_prefix": False}, {"lookahead": 0}])
async def test_sessions_that_are_opened_otherwise_or_want_no_cache_read_by_themselves(others, autojump_clock):
    async with simulated(*pair_with(CACHES["can be trimmed"])) as simulation:
        asked = {**ASKED, "lookahead": 3}
        texts = await simulation.runtime.generate_many([(PROMPT, asked), (PROMPT, {**asked, **others})])
        assert [ids(text.tokens) for text in texts] == [continuation(PROMPT, 8)] * 2
        assert [text.statistics.cached_tokens for text in texts] == [0, 0]
        assert num_read(simulation) == 2 * NUM_READ


@sweep("prompts, read", [([[*PROMPT, last] for last in (1, 2, 3)], len(PROMPT)), ([[7]] * 3, 0)])
async def test_prompts_that_differ_in_their_last_token_share_the_rest(prompts, read, autojump_clock):
    async with simulated(*pair_with(CACHES["recurrent"])) as simulation:
        texts = await simulation.runtime.generate_many(prompts, lookahead=3, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(prompt, 8) for prompt in prompts]
        assert num_read(simulation) == read


async def test_the_reader_may_begin_with_what_is_cached(autojump_clock: Any) -> None:
    async with simulated(*pair_with(CACHES["can be trimmed"])) as simulation:
        await simulation.runtime.generate(PROMPT[:20], lookahead=3, **{**ASKED, "max_tokens": 1})
        before = num_read(simulation)
        texts = await simulation.runtime.generate_many([PROMPT] * 3, lookahead=3, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(PROMPT, 8)] * 3
        assert num_read(simulation) - before < NUM_READ - 16


async def test_scores_of_texts_that_begin_alike_read_the_beginning_once(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        scores: dict[int, Any] = {}

        async def score(last: int) -> None:
            scores[last] = await simulation.runtime.score(PROMPT, [9, last], reuse_prefix=True)

        async with trio.open_nursery() as nursery:
            for last in (3, 4):
                nursery.start_soon(score, last)
        assert [[token.id for token in scores[last].tokens] for last in (3, 4)] == [[9, 3], [9, 4]]
        # Both feed the last token of the prompt and the first of the continuation.
        assert num_read(simulation) == NUM_READ + 2 * 2


async def test_a_drafter_that_reads_features_has_those_of_the_prompt_in_each_session(autojump_clock: Any) -> None:
    draft = TrainedDraft(lambda history, staleness: truthful(history))
    async with simulated(RecordingTarget(truthful), draft, draft_price=priced(prefill=0.25)) as simulation:
        texts = await simulation.runtime.generate_many([PROMPT] * 3, lookahead=3, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(PROMPT, 8)] * 3
        assert num_read(simulation) == NUM_READ
        assert all(text.statistics.proposed > 0 for text in texts)
        assert num_read(simulation, "draft") == NUM_READ


# --- what may become of the reader ------------------------------------------------------------------


async def test_what_a_cancelled_reader_has_read_is_used_and_the_rest_is_read_once(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        first = simulation.runtime.stream(PROMPT, **ASKED)
        await trio.testing.wait_all_tasks_blocked()
        texts: list[list[int]] = [[], [], []]
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(read_into, text, simulation.runtime.stream(PROMPT, **ASKED))
            await trio.sleep(9.0)  # two chunks, of 4 simulated seconds each, and a part of the third
            await first.aclose()
        assert texts == [continuation(PROMPT, 8)] * 3
        assert num_read(simulation) == NUM_READ


@sweep("fails", [{"feed": {1}}, {"copy": {1}}, {"open": {1}}])
async def test_a_reader_that_fails_fails_alone_and_so_does_a_copy(fails: Any, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful, fails=fails)) as simulation:
        streams = [simulation.runtime.stream(PROMPT, **ASKED) for _ in range(3)]
        results: list[Any] = []
        for stream in streams:
            try:
                results.append(await collect(stream))
            except StreamFailedError:
                results.append(None)
        assert results.count(continuation(PROMPT, 8)) == 2
        assert results.count(None) == 1
        assert num_read(simulation) == NUM_READ or "feed" in fails


async def test_a_text_that_lost_its_cache_while_its_consumer_rests_is_not_waited_for(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        resting = simulation.runtime.stream(PROMPT, **{**ASKED, "max_tokens": 60})
        await trio.sleep(1000.0)
        assert simulation.target.sequences[0].length > len(PROMPT)
        simulation.target.sequences[0].forget()  # as if a pass that it has shared had failed
        with trio.fail_after(1000.0):
            assert await collect(simulation.runtime.stream(PROMPT, **ASKED)) == continuation(PROMPT, 8)
        assert await collect(resting) == continuation(PROMPT, 60)


async def test_a_prompt_that_only_its_drafter_still_reads_is_not_waited_for(autojump_clock: Any) -> None:
    models = ScriptedModel(truthful), ScriptedModel(agreeing(0.7))
    async with simulated(*models, draft_price=priced(prefill=1000.0)) as simulation, trio.open_nursery() as nursery:
        nursery.start_soon(partial(simulation.runtime.warm, PROMPT, prefill_step_size=8))
        await trio.sleep(100.0)
        assert num_read(simulation) == NUM_READ
        began = trio.current_time()
        assert await collect(simulation.runtime.stream(PROMPT, lookahead=3, **ASKED)) == continuation(PROMPT, 8)
        assert trio.current_time() - began < 1000.0
        assert num_read(simulation) == NUM_READ


async def test_many_prompts_are_compared_once_with_each_other_however_many_passes_read_them(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compared, num_asked = 0, 0

    def counting(one: bytes, other: bytes) -> int:
        nonlocal num_compared
        num_compared += 1
        return common_length(one, other)

    monkeypatch.setattr(actor, "common_length", counting)
    original = ModelActor._awaits_beginning

    def asking(self: Any, session: Any) -> bool:
        nonlocal num_asked
        num_asked += 1
        return original(self, session)

    monkeypatch.setattr(ModelActor, "_awaits_beginning", asking)
    async with simulated(ScriptedModel(truthful)) as simulation:
        texts = await simulation.runtime.generate_many([PROMPT] * 30, max_concurrent=30, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(PROMPT, 8)] * 30
        num_passes = len(simulation.spans("target", "prefill"))
    assert num_compared <= 30 * 29 / 2
    assert num_asked <= 30 * (num_passes + 2)


# --- any sessions in any order --------------------------------------------------------------------

sessions = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 6.0, 21.0]),  # seconds until it begins
        st.sampled_from([None, 0.5, 6.0, 30.0]),  # seconds after which it is cancelled
        st.sampled_from([0, 3, "auto"]),  # lookahead
        st.sampled_from([len(PROMPT), 30, 1]),  # tokens of its prompt
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=40)
@given(sessions, st.sampled_from(list(CACHES)), st.integers(0, 3))
def test_texts_are_right_whoever_reads_waits_or_leaves(sessions: Any, cache: str, schedule: int) -> None:
    async def one(simulation: Simulation, begin: float, seconds: float | None, lookahead: Any, length: int) -> None:
        await trio.sleep(begin)
        prompt, got = PROMPT[:length], list[int]()
        with trio.move_on_after(10**6 if seconds is None else seconds):
            await read_into(got, simulation.runtime.stream(prompt, lookahead=lookahead, **ASKED))
        assert got == continuation(prompt, 8)[: len(got)]
        assert seconds is not None or len(got) == 8

    async def main() -> None:
        models = pair_with(CACHES[cache])
        async with simulated(*models, schedule=schedule) as simulation, trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(one, simulation, *session)

    run(main)
