"""The memory limit: streams begin, wait, grow, end or are refused by what their caches take, and prefixes make room."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing
from architectures import build
from hypothesis import given, settings
from hypothesis import strategies as st
from models import gemma3_text, llama, prompt_of
from scripted import (
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    collect_all,
    continuation,
    ids,
    priced,
    read_into,
    run,
    simulated,
    text_of,
    truthful,
)
from simulated_worker import SimulatedWorker
from sweeps import sweep

import runtime
from actors import session as actor_session
from protocol.cache_size import TextSize
from protocol.errors import MemoryLimitError, PromptTooLongError, RuntimeClosedError
from runtime.engine import memory
from runtime.engine.drafter_slot import LoadedDrafter

TARGET_BYTES, DRAFT_BYTES = 100, 10  # a token
WHILE = 1000.0  # until everything has been put away
# A drafter's part of each text has room for two proposals more.
DRAFT_SPARE = 2 * 64


def pair(agreement: float = 0.6) -> tuple[ScriptedModel, ScriptedModel]:
    target = ScriptedModel(truthful, bytes_per_token=TARGET_BYTES)
    return target, ScriptedModel(agreeing(agreement), bytes_per_token=DRAFT_BYTES)


def bytes_of(num_tokens: int, *, drafted: bool = True) -> int:
    """What is reserved for a text."""
    return TARGET_BYTES * num_tokens + (DRAFT_BYTES * (num_tokens + DRAFT_SPARE) if drafted else 0)


def measured(simulation: Simulation) -> int:
    """The bytes of all sequences that are open, prefixes included."""
    models = [model for model in (simulation.target, simulation.draft) if model is not None]
    return sum(each.num_bytes for model in models for each in model.sequences if not each.is_closed)


@asynccontextmanager
async def limited(limit: int, *models: ScriptedModel, **options: Any) -> AsyncIterator[Simulation]:
    """A runtime with a limit, above which no model is at the beginning or at the end of any job."""
    simulations: list[Simulation] = []

    def check(_: object) -> None:
        if simulations:
            assert measured(simulations[0]) <= limit
            assert simulations[0].runtime.memory.reserved <= limit

    async with simulated(*models, memory_limit=limit, listener=check, **options) as simulation:
        simulations.append(simulation)
        yield simulation
        await trio.sleep(WHILE)
        assert simulation.runtime.memory.reserved == 0


# --- waiting ----------------------------------------------------------------------------------------


@sweep(("max_streams", "reuse_prefix"), [(None, False), (5, False), (None, True)])
async def test_of_64_streams_at_once_as_many_run_as_the_memory_holds(max_streams, reuse_prefix, autojump_clock):
    limit = 8 * bytes_of(9 + 12)
    async with limited(limit, *pair(), max_streams=max_streams) as simulation:
        rt = simulation.runtime
        prompts = [[n, *range(n % 9)] for n in range(64)]
        streams = [rt.stream(prompt, max_tokens=12, reuse_prefix=reuse_prefix) for prompt in prompts]
        assert 5 <= rt.num_streams <= (max_streams or 20)
        assert rt.num_streams + rt.num_waiting == 64
        assert await collect_all(streams) == [continuation(prompt, 12) for prompt in prompts]
    # In the order of the calls: no small one has overtaken a large one.
    opened = [instant.session for instant in simulation.instants("open", "target")]
    assert opened == sorted(opened)


@settings(max_examples=15)
@given(
    streams=st.lists(
        st.tuples(
            st.integers(1, 40),  # length of the prompt
            st.integers(1, 30),  # length of the answer
            st.sampled_from([0, 2, "auto"]),  # lookahead
            st.sampled_from([0.0, 1.0, 20.0]),  # pause before it begins
            st.sampled_from([None, None, 0.0, 7.0, 60.0]),  # seconds after which it is cancelled
            st.booleans(),  # whether it reuses prefixes
        ),
        min_size=2,
        max_size=12,
    ),
    spare=st.integers(0, 3000),
    schedule=st.integers(0, 3),
)
def test_random_streams_stay_below_the_limit_and_none_is_lost(streams: Any, spare: int, schedule: int) -> None:
    limit = spare + max(bytes_of(length + answer) for length, answer, *_ in streams)

    async def main() -> None:
        ended = set()
        async with limited(limit, *pair(), schedule=schedule) as simulation, trio.open_nursery() as nursery:

            async def one(n: int) -> None:
                length, answer, lookahead, _, cancel_s, reuse = streams[n]
                got: list[int] = []
                asked = {"max_tokens": answer, "lookahead": lookahead, "reuse_prefix": reuse}
                stream = simulation.runtime.stream([n] * length, **asked)
                with trio.move_on_after(float("inf") if cancel_s is None else cancel_s) as scope:
                    async for token in stream:
                        got.append(token.id)
                text = continuation([n] * length, answer)
                assert got == (text[: len(got)] if scope.cancelled_caught else text)
                ended.add(n)

            for n, (*_, pause, _, _) in enumerate(streams):
                await trio.sleep(pause)
                nursery.start_soon(one, n)
        assert ended == set(range(len(streams)))

    run(main)


async def test_a_stream_that_is_cancelled_while_it_waits_lets_the_next_one_begin(autojump_clock: Any) -> None:
    async with limited(bytes_of(100, drafted=False), ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        rt = simulation.runtime
        first, large = rt.stream([1], max_tokens=59), rt.stream([2], max_tokens=98)
        small = rt.stream([3], max_tokens=30)
        assert (rt.num_streams, rt.num_waiting) == (1, 2)  # the small one would fit, and waits its turn
        await large.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (rt.num_streams, rt.num_waiting) == (2, 0)
        assert await collect(small) == continuation([3], 30)
        assert await collect(first) == continuation([1], 59)
        # No model ever had anything to do with the large one.
        assert {event.session for event in simulation.events} <= {0, 2, None}


# --- what cannot fit --------------------------------------------------------------------------------


async def test_a_prompt_that_can_never_fit_is_refused_with_the_sizes_before_any_work(autojump_clock: Any) -> None:
    async with limited(5000, ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        with pytest.raises(PromptTooLongError) as raised:
            simulation.runtime.stream([1] * 50, max_tokens=1)
        assert str(raised.value) == (
            "prompt is too long: 50 tokens > 49 maximum; memory_limit is 5.0 kB, models take 0 bytes of it, and each "
            "token takes 100 bytes; shorten it"
        )
        with pytest.raises(PromptTooLongError, match="51 tokens > 50 maximum"):
            await simulation.runtime.score([1] * 40, [2] * 11)
        assert simulation.events == []
        assert simulation.runtime.context_in_memory == 50
        assert await text_of(simulation, [1] * 49, max_tokens=1) == continuation([1] * 49, 1)


@sweep("max_tokens", [None, 500, 41])
async def test_a_text_ends_where_it_would_not_fit_alone_as_with_the_context(max_tokens, autojump_clock):
    async with limited(5000, ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        completion = await simulation.runtime.generate([1] * 10, max_tokens=max_tokens)
        assert [token.id for token in completion.tokens] == continuation([1] * 10, 40)
        assert completion.finish_reason == "length"


async def test_any_number_of_waiting_streams_may_be_refused_at_once(autojump_clock: Any) -> None:
    model = ScriptedModel(truthful, bytes_per_token=100)
    async with simulated(model, memory_limit=bytes_of(100, drafted=False)) as simulation:
        first = simulation.runtime.stream([1] * 50, max_tokens=40)
        waiting = [simulation.runtime.stream([2] * 50, max_tokens=40) for _ in range(600)]
        model.num_bytes = 5500  # as if another model had been loaded
        assert await collect(first) == continuation([1] * 50, 40)
        for stream in waiting:
            with pytest.raises(PromptTooLongError, match="50 tokens > 44 maximum"):
                await collect(stream)


# --- growing ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_other_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no runtime that is open elsewhere in this process, whose models would take of the limit."""
    monkeypatch.setattr(memory, "_budgets", [])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reservations of 40 tokens at a time, which are asked for 36 tokens before they are needed."""
    monkeypatch.setattr(memory, "GROWTH_TOKENS", 40)
    monkeypatch.setattr(actor_session, "ASK_BEFORE", 36)


@pytest.mark.usefixtures("small_steps")
@sweep(("lookahead", "num_streams"), [(0, 3), (3, 3), (0, 6), ("auto", 4)])
async def test_texts_that_grow_wait_and_give_way_and_none_is_lost(lookahead, num_streams, autojump_clock):
    limit = bytes_of(1 + 200, drafted=lookahead != 0) + num_streams * DRAFT_BYTES * (200 + DRAFT_SPARE)
    async with limited(limit, *pair()[: 1 + (lookahead != 0)]) as simulation:
        streams = [simulation.runtime.stream([n], max_tokens=150, lookahead=lookahead) for n in range(num_streams)]
        assert await collect_all(streams) == [continuation([n], 150) for n in range(num_streams)]
        # Some have read their text again.
        assert len(simulation.target.sequences) > num_streams


@pytest.mark.usefixtures("small_steps")
async def test_a_text_for_which_nothing_is_left_ends_with_the_sizes_and_keeps_its_tokens(autojump_clock: Any) -> None:
    model = ScriptedModel(truthful, bytes_per_token=100)
    async with simulated(model, memory_limit=bytes_of(200, drafted=False)) as simulation:
        stream = simulation.runtime.stream([1], max_tokens=150)
        got = [(await anext(stream)).id for _ in range(10)]
        model.num_bytes = 10_000  # as if another model had been loaded
        complaint = r"memory is short for more than \d+ tokens of this text beside 0 other"
        with pytest.raises(MemoryLimitError, match=complaint):
            await read_into(got, stream)
        assert got == continuation([1], len(got))
        assert 10 < len(got) < 100
        # A stream that waited may find that it does not fit any more.
        assert await text_of(simulation, [2] * 50, max_tokens=50) == continuation([2] * 50, 50)
        await trio.sleep(WHILE)  # until its memory is released
        first = simulation.runtime.stream([3] * 50, max_tokens=40)
        waiting = simulation.runtime.stream([4] * 50, max_tokens=40)
        assert simulation.runtime.num_waiting == 1
        model.num_bytes = 15_500
        assert await collect(first) == continuation([3] * 50, 40)
        with pytest.raises(PromptTooLongError, match="50 tokens > 44 maximum"):
            await collect(waiting)


@pytest.mark.usefixtures("small_steps")
async def test_prefixes_make_room_for_a_text_that_grows(autojump_clock: Any) -> None:
    async with limited(bytes_of(200, drafted=False), ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        await text_of(simulation, [1] * 80, max_tokens=10, reuse_prefix=True)
        kept = simulation.runtime._target.prefix_cache
        await trio.sleep(WHILE)
        assert len(kept) == 1
        assert await text_of(simulation, [2], max_tokens=180) == continuation([2], 180)
        assert len(kept) == 0


async def test_prefixes_make_room_before_a_stream_waits_but_not_for_the_one_that_reuses_them(autojump_clock):
    async with limited(bytes_of(200, drafted=False), ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        rt = simulation.runtime
        for n in (1, 2):
            await text_of(simulation, [n] * 80, max_tokens=10, reuse_prefix=True)
            await trio.sleep(WHILE)
        again = rt.stream([1] * 85, max_tokens=100, reuse_prefix=True)
        assert rt.num_waiting == 0
        assert await collect(again) == continuation([1] * 85, 100)
        assert again.statistics().cached_tokens == 80
        assert await text_of(simulation, [2] * 81, max_tokens=1, reuse_prefix=True) == continuation([2] * 81, 1)


async def test_a_drafters_prefixes_make_room_for_texts_that_are_not_drafted(autojump_clock: Any) -> None:
    limit = bytes_of(80 + 10)
    length = limit // TARGET_BYTES
    async with limited(limit, *pair()) as simulation:
        await text_of(simulation, [1] * 80, max_tokens=10, lookahead=2, reuse_prefix=True)
        await trio.sleep(WHILE)
        draft: Any = simulation.runtime._draft
        assert len(draft.prefix_cache) == 1
        assert await text_of(simulation, [2], lookahead=0, max_tokens=length - 1) == continuation([2], length - 1)
        assert len(draft.prefix_cache) == 0


async def test_prefixes_make_room_for_a_drafter_and_streams_go_on_once_it_has_gone(autojump_clock: Any) -> None:
    draft = ScriptedModel(agreeing(0.6), bytes_per_token=DRAFT_BYTES)
    draft.num_bytes = 10_000

    async def load(stack: AsyncExitStack, source: Any) -> LoadedDrafter:
        return draft, SimulatedWorker("draft", priced(), lambda _: None)

    async with limited(bytes_of(200, drafted=False), ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        rt = simulation.runtime
        rt._drafter._load = load
        await text_of(simulation, [1] * 150, max_tokens=10, reuse_prefix=True)
        await rt.attach_draft("another")
        await trio.sleep(WHILE)
        assert len(rt._target.prefix_cache) == 0
        streams = [rt.stream([n], max_tokens=69, lookahead=0) for n in (2, 3)]
        assert rt.num_waiting == 1
        await rt.detach_draft()
        assert rt.num_waiting == 0
        assert [await collect(stream) for stream in streams] == [continuation([n], 69) for n in (2, 3)]


async def test_closing_the_runtime_ends_the_texts_that_wait_to_grow(small_steps: None, autojump_clock: Any) -> None:
    model = ScriptedModel(truthful, bytes_per_token=100)
    async with simulated(model, memory_limit=bytes_of(84, drafted=False)) as simulation:
        streams = [simulation.runtime.stream([n], max_tokens=80) for n in range(2)]
        await trio.sleep(30)
    for stream in streams:
        with pytest.raises(RuntimeClosedError):
            await collect(stream)


@pytest.mark.usefixtures("small_steps")
@sweep(
    ("make", "lookahead"),
    [
        (llama, 3),
        (lambda: gemma3_text(window=16), 0),
        *(pytest.param(make, 0, marks=pytest.mark.slow) for make in (llama, lambda: build("lfm2"))),
    ],
)
async def test_texts_of_real_models_that_give_way_are_as_without_a_limit(make: Any, lookahead: int) -> None:
    prompts = [prompt_of(5 + n, seed=n, vocab_size=60) for n in range(4)]
    model = make()
    async with runtime.open((model, None), "ngram", memory_limit=None) as rt:
        expected = await rt.generate_many(prompts, max_tokens=70, lookahead=lookahead)
        size, weights = rt._target.model.cache_size, rt.memory.models
    # Room for all as they begin, and for two and a half in the end; some slots of each are to spare.
    limit = weights + size.of([TextSize(45, 45, 2)] * 4) + size.of([TextSize(45, 45, 2)]) // 8
    async with runtime.open((model, None), "ngram", memory_limit=limit) as rt:
        with mock.patch.object(rt._target, "_emptied", wraps=rt._target._emptied) as emptied:
            found = await rt.generate_many(prompts, max_tokens=70, lookahead=lookahead)
        assert emptied.called
    assert [ids(each.tokens) for each in found] == [ids(each.tokens) for each in expected]


# --- several runtimes -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
@sweep("num_streams", [(1, 1), (2, 1), (3, 3)])
async def test_texts_of_two_runtimes_that_grow_wait_for_each_other_and_none_is_lost(num_streams, autojump_clock):
    limit = bytes_of(200, drafted=False)
    texts: list[list[int]] = []

    async def read(rt: Any, prompt: list[int]) -> None:
        text = await collect(rt.stream(prompt, max_tokens=150))
        assert text == continuation(prompt, 150)
        texts.append(text)

    models = [ScriptedModel(truthful, bytes_per_token=100) for _ in num_streams]
    async with (
        simulated(models[0], memory_limit=limit) as one,
        simulated(models[1], memory_limit=limit) as other,
        trio.open_nursery() as nursery,
    ):
        for number, simulation in zip(num_streams, (one, other), strict=True):
            for n in range(number):
                nursery.start_soon(read, simulation.runtime, [n])
    assert len(texts) == sum(num_streams)


@sweep("is_cancelled", [False, True])
async def test_a_stream_that_waits_for_memory_is_not_overtaken_by_those_of_another_runtime(
    is_cancelled: bool, autojump_clock: Any
) -> None:
    limit = bytes_of(100, drafted=False)
    models = [ScriptedModel(truthful, bytes_per_token=100) for _ in range(2)]
    async with simulated(models[0], memory_limit=limit) as one, simulated(models[1], memory_limit=limit) as other:
        first = other.runtime.stream([1], max_tokens=59)
        large = one.runtime.stream([2], max_tokens=79)
        small = other.runtime.stream([3], max_tokens=39)
        assert (one.runtime.num_waiting, other.runtime.num_waiting) == (1, 1)  # the small one would fit
        if is_cancelled:
            await large.aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert (one.runtime.num_waiting, other.runtime.num_waiting) == (0, 0)
        assert await collect(first) == continuation([1], 59)
        if not is_cancelled:
            await trio.testing.wait_all_tasks_blocked()
            assert (one.runtime.num_waiting, other.runtime.num_waiting) == (0, 1)
            assert await collect(large) == continuation([2], 79)
        assert await collect(small) == continuation([3], 39)


async def test_what_is_read_while_idle_waits_for_no_memory_and_nobody_waits_behind_it(autojump_clock: Any) -> None:
    limit = bytes_of(100, drafted=False)
    models = [ScriptedModel(truthful, bytes_per_token=100) for _ in range(2)]
    async with (
        simulated(models[0], memory_limit=limit, idle_reading=True) as one,
        simulated(models[1], memory_limit=limit) as other,
    ):
        first = other.runtime.stream([1], max_tokens=59)
        one.runtime.expect(lambda: [2] * 80)
        await trio.testing.wait_all_tasks_blocked()
        assert one.runtime.num_waiting == 0
        second = other.runtime.stream([3], max_tokens=39)
        assert other.runtime.num_waiting == 0
        assert [await collect(stream) for stream in (first, second)] == [continuation([1], 59), continuation([3], 39)]
        assert one.target.sequences == []


async def test_prefixes_make_room_for_the_models_of_another_runtime(autojump_clock: Any) -> None:
    limit = bytes_of(200, drafted=False)
    async with simulated(ScriptedModel(truthful, bytes_per_token=100), memory_limit=limit) as one:
        await text_of(one, [1] * 80, max_tokens=10, reuse_prefix=True)
        kept = one.runtime._target.prefix_cache
        await trio.sleep(WHILE)
        assert len(kept) == 1
        other = ScriptedModel(truthful, bytes_per_token=100)
        other.num_bytes = limit - 100
        async with simulated(other, memory_limit=limit):
            await trio.sleep(WHILE)
            assert len(kept) == 0


async def test_a_runtime_that_is_over_does_not_mind_what_others_release(autojump_clock: Any) -> None:
    async with limited(bytes_of(200, drafted=False), ScriptedModel(truthful, bytes_per_token=100)) as simulation:
        sessions = simulation.runtime._sessions
    assert memory._budgets == []
    sessions._memory_has_changed()
