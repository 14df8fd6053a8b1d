"""What is asyncio's own in the bridge, on its loop and on uvloop, with real threads and tiny real models.

To show that nothing blocks the loop, a model blocks in the middle of a forward pass until a callback of the loop
releases it: anything that waited for the model would hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import chat_models
import mlx.nn as nn
import pytest
import trio
import uvloop
from blocking_models import BlockingModel, released_on_exit
from completions import ids
from garbage import collect_garbage
from greedy_pair import LONG, PROMPT, SETTINGS, drafter, target, text, the_next_text_is_right
from models import prompt_of
from our_threads import outrider_thread_names, outrider_threads
from polling import until_in_asyncio
from scripted import read_into

import runtime
from protocol.trace import Event, Span
from runtime.bridge.portal import TrioThread

pytestmark = pytest.mark.usefixtures("spare_buffers")

Main = Callable[[], Coroutine[Any, Any, Any]]
Run = Callable[[Main], Any]


# For tests of what crosses threads: waiting, cancelling, leaving. Others run on asyncio's own loop.
UVLOOP = pytest.param(uvloop.new_event_loop, id="uvloop", marks=pytest.mark.slow)
on_both_loops = pytest.mark.parametrize("run", [pytest.param(None, id="asyncio"), UVLOOP], indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run an async function as `asyncio.run` does, on either loop, and check that no thread is left."""

    def run(main: Main) -> Any:
        with asyncio.Runner(loop_factory=getattr(request, "param", None)) as runner:
            return runner.run(main())

    yield run
    assert outrider_threads() == []


def in_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of an async function, which `run` runs."""

    def run_in_asyncio(run: Run, **given: Any) -> None:
        run(functools.partial(test, **given))

    functools.update_wrapper(run_in_asyncio, test)
    signature = inspect.signature(test)
    fixtures = [*signature.parameters.values(), inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)]
    run_in_asyncio.__signature__ = signature.replace(parameters=fixtures)
    return run_in_asyncio


def opened(ours: nn.Module | None = None, theirs: nn.Module | None = None, **options: Any) -> Any:
    return runtime.aio.open((ours or target(), None), (theirs or drafter(), None), **options)


async def turns(number: int = 20) -> None:
    """Let the event loop make that many passes."""
    for _ in range(number):
        await asyncio.sleep(0)


class Trace:
    """A trace function that collects all events; called in the trio thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def count(self, kind: str, session: int, actor: str = "target") -> int:
        return len([e for e in list(self.events) if (e.actor, e.kind, e.session) == (actor, kind, session)])

    def passes(self, session: int) -> int:
        """Number of the target's forward passes for a session."""
        return sum(self.count(kind, session) for kind in ("prefill", "verify", "decode"))

    def is_put_away(self) -> bool:
        """Whether every cache that was opened was closed."""
        spans = [event for event in list(self.events) if isinstance(event, Span)]
        ours = [[(s.actor, s.session) for s in spans if s.kind == kind] for kind in ("open", "close")]
        return sorted(ours[0]) == sorted(ours[1])


# --- which loop -----------------------------------------------------------------------------------


async def test_trio_is_told_to_use_what_is_made_for_it() -> None:
    with pytest.raises(runtime.WrongEventLoopError, match=r"use runtime\.open"):
        async with opened():
            raise AssertionError("should not be reached")


@in_asyncio
async def test_asyncio_is_told_where_it_asks_for_what_is_trios() -> None:
    with pytest.raises(runtime.WrongEventLoopError, match=r"runtime\.aio\.open"):
        async with runtime.open((target(), None)):
            raise AssertionError("should not be reached")


@in_asyncio
async def test_another_loop_trio_or_none_is_refused_and_the_stream_goes_on() -> None:
    async with opened() as rt:
        stream = rt.stream(PROMPT, max_tokens=12)
        said = []

        async def use() -> None:
            for call in (lambda: anext(stream), stream.aclose, stream.opened, lambda: rt.generate(PROMPT)):
                with pytest.raises(runtime.WrongEventLoopError) as raised:
                    await call()
                said.append(str(raised.value))

        def elsewhere() -> None:
            asyncio.run(use())
            trio.run(use)
            with pytest.raises(runtime.WrongEventLoopError) as raised:
                rt.stream(PROMPT)
            said.append(str(raised.value))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await until_in_asyncio(lambda: not thread.is_alive())
        assert all("another asyncio loop" in message for message in said[:4])
        assert all("use runtime.open" in message for message in said[4:8])
        assert "none is running here" in said[8]
        assert len(said) == 9
        assert [token.id async for token in stream] == text(12)


# --- ways to cancel -------------------------------------------------------------------------------


async def consume(rt: runtime.aio.Runtime) -> None:
    async for _ in rt.stream(PROMPT, **LONG):
        pass


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_the_task(rt: runtime.aio.Runtime, due: Awaitable[None]) -> None:
    task = asyncio.create_task(consume(rt))
    await due
    await cancelled(task)


async def by_cancelling_a_completion(rt: runtime.aio.Runtime, due: Awaitable[None]) -> None:
    task = asyncio.create_task(rt.generate(PROMPT, **LONG))
    await due
    await cancelled(task)


async def by_timeout(rt: runtime.aio.Runtime, due: Awaitable[None]) -> None:
    async def consume_until_then() -> None:
        async with asyncio.timeout(None) as timeout, asyncio.TaskGroup() as group:

            async def expire() -> None:
                await due
                timeout.reschedule(0)

            group.create_task(expire())
            await consume(rt)

    with pytest.raises(TimeoutError):
        await consume_until_then()


async def by_an_anyio_scope(rt: runtime.aio.Runtime, due: Awaitable[None]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(consume, rt)
        await due
        group.cancel_scope.cancel()


WAYS = [by_cancelling_the_task, by_cancelling_a_completion, by_timeout, by_an_anyio_scope]


@on_both_loops
@pytest.mark.parametrize("when", ["prefill", "decode"])
@in_asyncio
async def test_cancelling_returns_while_a_forward_pass_runs_and_begins_no_other(when: str) -> None:
    trace, held = Trace(), BlockingModel(target())
    async with opened(held, trace=trace, prefix_cache_bytes=0) as rt:
        for number, way in enumerate(WAYS):
            session = 2 * number  # behind each comes the next text
            with released_on_exit(held):
                # The prompt has four chunks.
                held.block(after=1 if when == "prefill" else 6)
                await way(rt, held.blocked_in_asyncio())
                # The consumer has returned while the forward pass still blocks.
                assert trace.count("close", session) == 0, way
                before = trace.passes(session)
                held.release()
                await the_next_text_is_right(rt)
                await until_in_asyncio(lambda: rt.num_streams == 0)
                assert trace.passes(session) <= before + 1, way
    assert trace.is_put_away()


@in_asyncio
async def test_a_stream_that_waits_for_a_place_can_be_cancelled() -> None:
    trace, held = Trace(), BlockingModel(target())
    async with opened(held, trace=trace, max_streams=1) as rt:
        with released_on_exit(held):
            held.block()
            first = rt.stream(PROMPT, max_tokens=12)
            await held.blocked_in_asyncio()
            waiting = asyncio.create_task(rt.generate(PROMPT, **LONG))
            await until_in_asyncio(lambda: rt.num_waiting == 1)
            await cancelled(waiting)
            await until_in_asyncio(lambda: rt.num_waiting == 0)
            held.release()
            assert [token.id async for token in first] == text(12)
            assert {event.session for event in trace.events} <= {None, 0}


@on_both_loops
@in_asyncio
async def test_leaving_waits_for_the_forward_pass_that_runs_and_not_in_the_loop() -> None:
    held = BlockingModel(target())

    async def use() -> None:
        async with opened(held) as rt:
            held.block(after=2)
            await consume(rt)

    with released_on_exit(held):
        task = asyncio.create_task(use())
        await held.blocked_in_asyncio()
        task.cancel()
        await turns()
        # A second cancellation; the exit still goes on to the end.
        task.cancel()
        await turns()
        assert not task.done()
        # The drafter's thread is joined first, and may have ended.
        assert {thread.name for thread in outrider_threads()} >= {"outrider-trio", "outrider-target"}
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outrider_threads() == []


@in_asyncio
async def test_cancelling_while_models_are_being_opened_waits_for_that() -> None:
    held = BlockingModel(target())
    held.block()  # opening runs forward passes to time the models

    async def use() -> None:
        async with opened(held):
            raise AssertionError("should not be reached")

    task = asyncio.create_task(use())
    await held.blocked_in_asyncio()
    task.cancel()
    await turns()
    assert not task.done()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outrider_threads() == []


@in_asyncio
async def test_leaving_under_an_anyio_scope_that_is_cancelled() -> None:
    held = BlockingModel(target())
    with anyio.CancelScope() as scope:
        async with opened(held) as rt, rt.stream(PROMPT, **LONG) as stream:
            await anext(stream)
            held.block()
            await held.blocked_in_asyncio()
            asyncio.get_running_loop().call_later(0.01, held.release)
            scope.cancel()
            await anext(stream)
    assert scope.cancelled_caught


@on_both_loops
def test_ctrl_c_ends_everything(run: Run) -> None:
    held = BlockingModel(target())

    async def main() -> None:
        async with opened(held) as rt:
            held.block(after=2)
            stream = rt.stream(PROMPT, **LONG)
            waiting = asyncio.ensure_future(anext(stream))
            await held.blocked_in_asyncio()
            loop = asyncio.get_running_loop()
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            loop.call_later(0.01, held.release)
            await waiting

    with pytest.raises(KeyboardInterrupt):
        run(main)


IMPORTS_OF_THE_LOOP = """
import asyncio, sys, threading
import runtime

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            imported.extend((name, name.partition(".")[0]))

async def main():
    sys.meta_path.insert(0, Recorder())
    async with runtime.aio.open(runtime.DEMO_TARGET) as rt:
        async for token in rt.stream("def", max_tokens=1):
            pass

imported = []
asyncio.run(main())
heavy = {"actors", "attrs", "jinja2", "mlx", "mlx_lm", "numpy", "tokenizers", "transformers", "trio"}
print(sorted(set(imported) & {*heavy, "runtime.aio.runtime"}))
print("mlx_lm" in sys.modules)
"""


@pytest.mark.slow
def test_a_program_that_names_the_bridge_in_its_loop_imports_nothing_heavy_there():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_OF_THE_LOOP], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines() == ["[]", "True"]


# --- without a block ------------------------------------------------------------------------------


@in_asyncio
async def test_a_runtime_that_was_awaited_works_until_it_is_closed() -> None:
    rt = await opened()
    await the_next_text_is_right(rt)
    stream = rt.stream(PROMPT, **LONG)
    await anext(stream)
    await asyncio.gather(rt.aclose(), rt.aclose())
    assert outrider_threads() == []
    with pytest.raises(runtime.RuntimeClosedError):
        await read_into([], stream)
    with pytest.raises(runtime.RuntimeClosedError):
        rt.stream(PROMPT)
    await rt.aclose()
    async with opened() as rt:  # closing within a block is leaving it
        await rt.aclose()
        assert outrider_threads() == []


@in_asyncio
async def test_a_runtime_that_nobody_holds_closes_itself_and_a_stream_holds_it() -> None:
    rt = await opened()
    stream = rt.stream(PROMPT, max_tokens=12)
    del rt
    collect_garbage()
    assert [token.id async for token in stream] == text(12)
    del stream
    collect_garbage()
    join_the_trio_thread()


@in_asyncio
async def test_a_cancelled_closing_goes_on_to_the_end() -> None:
    held = BlockingModel(target())
    rt = await opened(held)
    held.block(after=2)
    waiting = asyncio.create_task(consume(rt))
    await held.blocked_in_asyncio()
    closing = asyncio.create_task(rt.aclose())
    await turns()
    closing.cancel()
    await turns()
    assert not closing.done()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(runtime.RuntimeClosedError):
        await waiting
    assert outrider_threads() == []


def join_the_trio_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "outrider-trio":  # the other threads belong to a pool, and stay idle
            # The timeout only keeps a failing test from hanging.
            thread.join(60)
            assert not thread.is_alive()


def test_a_loop_that_is_closed_with_streams_open_leaves_no_thread() -> None:
    loop, kept = asyncio.new_event_loop(), []

    async def main() -> None:
        rt = await opened().__aenter__()
        kept.append(rt.stream(PROMPT, **LONG))
        kept.append(rt.stream(prompt_of(401), prefill_step_size=1))
        await anext(kept[0])

    loop.run_until_complete(main())
    loop.close()
    join_the_trio_thread()
    kept.clear()
    collect_garbage()


def test_a_task_that_is_dropped_in_the_middle_leaves_no_thread() -> None:
    loop = asyncio.new_event_loop()

    async def use(rts: list[Any]) -> None:
        async with opened() as rt:
            rts.append(rt)
            async for _ in rt.stream(PROMPT, **LONG):
                rts.append(None)
                await loop.create_future()

    rts: list[Any] = []
    coroutine = use(rts)
    task = loop.create_task(coroutine)
    loop.run_until_complete(until_in_asyncio(lambda: len(rts) == 2))
    coroutine.close()  # as the garbage collector does
    task.cancel()
    with pytest.raises(RuntimeError, match="already awaited"):
        loop.run_until_complete(task)
    loop.close()
    join_the_trio_thread()


# --- the loop, and what crosses threads -----------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize("after", [0, 2, 7])
@in_asyncio
async def test_the_loop_goes_round_while_a_model_is_at_work(after: int) -> None:
    held = BlockingModel(target())
    held.block(after=after)

    async def release_later() -> None:
        await held.blocked_in_asyncio()
        await turns(100)
        held.release()

    task = asyncio.create_task(release_later())
    async with opened(held) as rt:
        # The model blocks in one of these.
        streams = [rt.stream(PROMPT, max_tokens=12, **SETTINGS) for _ in range(3)]
        rt.statistics(), streams[0].statistics()
        await streams[1].aclose()
        assert [token.id async for token in streams[0]] == text(12)
        assert [token.id async for token in streams[2]] == text(12)
        await task


@in_asyncio
async def test_a_slow_consumer_slows_the_models() -> None:
    trace = Trace()
    async with opened(trace=trace) as rt:
        slow = rt.stream(PROMPT, max_tokens=300, lookahead=0)
        assert (await anext(slow)).id == text(1)[0]
        for num_read in (1, 3):
            # Each round of the slow stream can alternate with a round of the other.
            await rt.generate(PROMPT, max_tokens=60, lookahead=0)
            buffered = trace.count("verdict", 0) - num_read
            # Sixteen rounds in the buffer, one that waits for room, and those that came with the last request.
            assert 16 <= buffered <= 34
            rounds = trace.count("verdict", 0)
            await rt.generate(PROMPT, max_tokens=60, lookahead=0)
            assert trace.count("verdict", 0) == rounds
            assert [(await anext(slow)).id for _ in range(2)] == text(10)[num_read : num_read + 2]


@in_asyncio
async def test_what_is_there_crosses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = mock.Mock(side_effect=TrioThread.resolve)
    monkeypatch.setattr(TrioThread, "resolve", lambda *arguments: resolve(*arguments))
    # With a drafter that is always right: four tokens a round.
    async with opened(None, target()) as rt:
        resolve.reset_mock()
        completion = await rt.generate(PROMPT, max_tokens=80, **SETTINGS)
        assert len(completion.tokens) == 80
        assert resolve.call_count <= 2 + completion.statistics.rounds < 30

        slow = rt.stream(PROMPT, max_tokens=50, **SETTINGS)
        await anext(slow)
        await rt.generate(PROMPT, max_tokens=80, **SETTINGS)
        resolve.reset_mock()
        assert len([token async for token in slow]) == 49
        assert resolve.call_count <= 2


@on_both_loops
@pytest.mark.slow
@in_asyncio
async def test_fifty_streams_that_are_opened_and_cancelled_leave_no_thread_and_no_stream() -> None:
    async with opened() as rt:
        await the_next_text_is_right(rt)
        threads = outrider_thread_names()
        for number in range(50):
            match number % 5:
                case 0:
                    async for _ in rt.stream(PROMPT, **LONG):
                        break
                case 1:
                    with pytest.warns(ResourceWarning, match="dropped unread"):
                        rt.stream(PROMPT, **LONG)  # no consumer
                case 2:
                    async with rt.stream(PROMPT, **LONG):
                        pass
                case 3:
                    task = asyncio.create_task(consume(rt))
                    await turns(number)
                    task.cancel()
                case 4:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(consume(rt), 0.001)
        await the_next_text_is_right(rt)
        await until_in_asyncio(lambda: rt.num_streams == 0)
        # Asyncio and trio have threads of their own, which come and go.
        assert outrider_thread_names() == threads
        del task
        collect_garbage()
        left = [thing for thing in gc.get_objects() if isinstance(thing, runtime.aio.TokenStream)]
        assert left == []


async def tokens_of(rt: runtime.aio.Runtime) -> AsyncIterator[int]:
    async for token in rt.stream(PROMPT, **LONG):
        yield token.id


@in_asyncio
async def test_an_async_generator_around_a_stream_ends_it_when_it_is_closed() -> None:
    async with opened() as rt:
        tokens = tokens_of(rt)
        assert await anext(tokens) == text(1)[0]
        await tokens.aclose()
        await until_in_asyncio(lambda: rt.num_streams == 0)

        # A dropped async generator is closed by the loop.
        async for _ in tokens_of(rt):
            break
        await until_in_asyncio(lambda: rt.num_streams == 0)


# --- many prompts, and conversations --------------------------------------------------------------

PROMPTS = [tuple(prompt_of(9, seed=seed)) for seed in range(5)]


@in_asyncio
async def test_prompts_are_taken_from_an_async_iterable_in_its_loop_as_there_is_room() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    taken: list[str] = []

    async def prompts(num_prompts: int, error: Exception | None = None) -> AsyncIterator[tuple[int, ...]]:
        try:
            for number in range(num_prompts):
                await asyncio.sleep(0)
                taken.append(name.get())
                yield PROMPTS[number % 5]
            if error is not None:
                raise error
        finally:
            taken.append("closed")

    async with opened() as rt:
        name.set("mine")
        many = rt.generate_many(prompts(5), max_concurrent=2, max_tokens=6)
        assert [ids(completion) for completion in await many] == [text(6, prompt) for prompt in PROMPTS]
        assert repr(many) == "<outrider aio.Completions, over: 5 given>"
        assert taken == ["mine"] * 5 + ["closed"]

        taken.clear()
        async with rt.generate_many(prompts(10**9), max_concurrent=2, max_tokens=2) as many:
            await anext(many)
            await until_in_asyncio(lambda: len(taken) >= 4 and rt.num_streams == 0)
            # At most two that are finished in the trio thread, two that wait for room, and what one request brought.
            assert len(taken) <= 8
        with pytest.raises(ZeroDivisionError):
            await rt.generate_many(prompts(2, ZeroDivisionError()), on_error="return", max_tokens=2)


@in_asyncio
async def test_a_wait_for_the_next_prompt_is_cancelled_with_the_generations() -> None:
    ended = asyncio.Event()

    async def prompts() -> AsyncIterator[tuple[int, ...]]:
        yield PROMPT
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with opened() as rt:
        async with rt.generate_many(prompts(), max_tokens=2) as many:
            assert ids((await anext(many))[1]) == text(2)
        await ended.wait()
        await the_next_text_is_right(rt)


async def in_a_timeout() -> AsyncIterator[tuple[int, ...]]:
    async with asyncio.timeout(600):
        for prompt in PROMPTS:
            yield prompt


async def in_a_timeout_that_is_over() -> AsyncIterator[tuple[int, ...]]:
    async with asyncio.timeout(600) as timeout:
        yield PROMPT
        timeout.reschedule(asyncio.get_running_loop().time())
        yield PROMPT
        await asyncio.get_running_loop().create_future()


async def in_a_scope_of_anyio() -> AsyncIterator[tuple[int, ...]]:
    with anyio.fail_after(600):
        for prompt in PROMPTS:
            yield prompt


async def in_a_task_group() -> AsyncIterator[tuple[int, ...]]:
    async with asyncio.TaskGroup() as group:
        for prompt in PROMPTS:
            group.create_task(asyncio.sleep(0))
            yield prompt


async def in_a_task_group_that_fails() -> AsyncIterator[tuple[int, ...]]:
    async def fail() -> None:
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as group:
        yield PROMPT
        group.create_task(fail())
        yield PROMPT
        await asyncio.get_running_loop().create_future()


@in_asyncio
async def test_a_generator_of_prompts_may_have_timeouts_and_task_groups_around_its_yield() -> None:
    async with opened() as rt:
        for prompts in (in_a_timeout, in_a_scope_of_anyio, in_a_task_group):
            completions = await rt.generate_many(prompts(), max_concurrent=2, max_tokens=4)
            assert [ids(completion) for completion in completions] == [text(4, prompt) for prompt in PROMPTS]
        for prompts, error in (
            (in_a_timeout_that_is_over, TimeoutError),
            (in_a_task_group_that_fails, ExceptionGroup),
        ):
            for max_concurrent in (1, 3):
                with pytest.raises(error):
                    await rt.generate_many(prompts(), max_concurrent=max_concurrent, max_tokens=4)
        await the_next_text_is_right(rt)


@on_both_loops
@in_asyncio
async def test_a_generator_of_prompts_is_closed_in_its_own_task_however_it_is_left() -> None:
    tasks: list[asyncio.Task[Any] | None] = []
    closed: list[Any] = []

    async def prompts(way: str, *first: Any) -> AsyncIterator[Any]:
        try:
            async with asyncio.TaskGroup():
                for prompt in (*first, *[PROMPT] * 100):
                    tasks.append(asyncio.current_task())
                    yield prompt
        finally:
            await asyncio.sleep(0)
            tasks.append(asyncio.current_task())
            closed.append(way)

    async with opened() as rt:
        for way in ("break", "error", "close"):
            tasks.clear()
            kept = prompts(way, PROMPT, "no ids") if way == "error" else prompts(way)
            many = rt.generate_many(kept, max_concurrent=1, max_tokens=2)
            if way == "error":
                with pytest.raises(runtime.PromptError):
                    await many
            else:
                async with many:
                    await anext(many)
                    if way == "close":
                        await rt.aclose()
            await until_in_asyncio(functools.partial(closed.__contains__, way))
            assert len(tasks) > 1
            assert len(set(tasks)) == 1


@in_asyncio
async def test_a_generator_of_prompts_that_goes_on_after_its_cancellation_is_closed() -> None:
    is_waiting, ended = asyncio.Event(), asyncio.Event()

    async def prompts() -> AsyncIterator[tuple[int, ...]]:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                is_waiting.set()
                await asyncio.get_running_loop().create_future()
            yield PROMPT
        finally:
            ended.set()

    async with opened() as rt:
        kept = prompts()
        async with rt.generate_many(kept, max_tokens=2):
            await is_waiting.wait()
        async with asyncio.timeout(30):
            await ended.wait()


@in_asyncio
async def test_many_prompts_can_be_left_in_every_way() -> None:
    held = BlockingModel(target())
    async with opened(held) as rt, contextlib.AsyncExitStack() as stack:
        stack.enter_context(released_on_exit(held))
        for way in ("cancel", "aclose", "leave", "break", "drop"):
            # The others are not over when the first is.
            many = rt.generate_many(
                [PROMPTS[0], *((prompt, LONG) for prompt in PROMPTS[1:])], max_concurrent=3, max_tokens=12
            )
            if way == "break":
                async for _ in many:
                    break
            held.block()
            await held.blocked_in_asyncio()
            match way:
                case "cancel":
                    task = asyncio.create_task(anext(many))
                    await turns()
                    await cancelled(task)
                case "aclose":
                    await many.aclose()
                    with pytest.raises(runtime.RuntimeClosedError):
                        await anext(many)
                case "leave":
                    async with many:
                        pass
            del many
            collect_garbage()
            held.release()
            await the_next_text_is_right(rt)
            await until_in_asyncio(lambda: rt.num_streams == 0)


@on_both_loops
@in_asyncio
async def test_a_save_that_is_cancelled_leaves_what_was_there_and_the_loop_running(tmp_path: Path) -> None:
    async with runtime.aio.open(runtime.DEMO_TARGET) as rt:
        conversation = rt.conversation(max_tokens=3)
        await conversation.generate("def f(")
        for number in range(6):
            saving = asyncio.ensure_future(conversation.save(tmp_path / "session"))
            await turns(number)
            await cancelled(saving)
            for path in tmp_path.iterdir():
                # No file, or the whole file.
                assert path.name == "session"
                assert (await rt.load(path)).messages == conversation.messages
        loading = asyncio.ensure_future(rt.load(tmp_path / "session"))
        await turns(1)
        await cancelled(loading)
        await conversation.generate("\n")


@in_asyncio
async def test_a_save_in_progress_is_told_that_the_runtime_closed(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        async with runtime.aio.open(*chat_models.pair(template=None)) as rt:
            conversation = rt.conversation(max_tokens=3)
            await conversation.generate("def f(")
            saving = asyncio.ensure_future(conversation.save(tmp_path / "session"))
            await turns(number)
        try:
            assert await saving == (tmp_path / "session").stat().st_size
        except runtime.RuntimeClosedError:
            continue
