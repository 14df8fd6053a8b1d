"""What is asyncio's own in the bridge, on its loop and on uvloop, with real threads and tiny real models.

To show that nothing blocks the loop, a model blocks in the middle of a forward pass until a callback of the loop
releases it: anything that waited for the model would hang.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import chat_models
import mlx.nn as nn
import pytest
import trio
from blocking_models import BlockingModel, released_on_exit
from faces import FACES, on_asyncio
from garbage import collect_garbage
from greedy_pair import LONG, PROMPT, SETTINGS, drafter, target, text, the_next_text_is_right
from models import prompt_of
from our_threads import outrider_threads
from polling import until_in_asyncio
from scripted import read_into

import runtime
from protocol.trace import Event, Span
from runtime.bridge.portal import TrioThread

pytestmark = pytest.mark.usefixtures("spare_buffers")


def opened(ours: nn.Module | None = None, theirs: nn.Module | None = None, **options: Any) -> Any:
    return runtime.aio.open((ours or target(), None), (theirs or drafter(), None), **options)


async def turns(number: int = 20) -> None:
    """Let the event loop make that many passes."""
    for _ in range(number):
        await asyncio.sleep(0)


PASSES = ("prefill", "verify", "decode")


def count(events: list[Event], session: int, *kinds: str) -> int:
    """Number of the target's events of some kinds for a session; trio's thread adds others meanwhile."""
    return len([e for e in list(events) if (e.actor, e.session) == ("target", session) and e.kind in kinds])


# --- which loop -----------------------------------------------------------------------------------


async def test_trio_is_told_to_use_what_is_made_for_it() -> None:
    with pytest.raises(runtime.WrongEventLoopError, match=r"use runtime\.open"):
        async with opened():
            raise AssertionError("should not be reached")


@on_asyncio
async def test_asyncio_is_told_where_it_asks_for_what_is_trios() -> None:
    with pytest.raises(runtime.WrongEventLoopError, match=r"runtime\.aio\.open"):
        async with runtime.open((target(), None)):
            raise AssertionError("should not be reached")


@on_asyncio
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


@pytest.mark.parametrize("when", ["prefill", "decode"])
@partial(on_asyncio, uvloop=True)
async def test_cancelling_returns_while_a_forward_pass_runs_and_begins_no_other(when: str) -> None:
    events, held = list[Event](), BlockingModel(target())
    async with opened(held, trace=events.append, prefix_cache_bytes=0) as rt:
        for number, way in enumerate(WAYS):
            session = 2 * number  # behind each comes the next text
            with released_on_exit(held):
                # The prompt has four chunks.
                held.block(after=1 if when == "prefill" else 6)
                await way(rt, held.blocked_in_asyncio())
                # The consumer has returned while the forward pass still blocks.
                assert count(events, session, "close") == 0, way
                before = count(events, session, *PASSES)
                held.release()
                await the_next_text_is_right(rt)
                await until_in_asyncio(lambda: rt.num_streams == 0)
                assert count(events, session, *PASSES) <= before + 1, way
    # Every cache that was opened was closed.
    spans = [event for event in events if isinstance(event, Span)]
    opens, closes = (Counter((s.actor, s.session) for s in spans if s.kind == kind) for kind in ("open", "close"))
    assert opens == closes


@partial(on_asyncio, uvloop=True)
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


@on_asyncio
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


@on_asyncio
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


@pytest.mark.parametrize("name", ["asyncio", pytest.param("uvloop", marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything(name: str) -> None:
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
        FACES[name]().run(main)
    assert outrider_threads() == []


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
print(sorted(set(imported) & {*heavy, "runtime.bridge.runtime"}))
print("mlx_lm" in sys.modules)
"""


@pytest.mark.slow
def test_a_program_that_names_the_bridge_in_its_loop_imports_nothing_heavy_there():
    command = [sys.executable, "-c", IMPORTS_OF_THE_LOOP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]


# --- without a block ------------------------------------------------------------------------------


@on_asyncio
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


@on_asyncio
async def test_a_runtime_that_nobody_holds_closes_itself_and_a_stream_holds_it() -> None:
    rt = await opened()
    stream = rt.stream(PROMPT, max_tokens=12)
    del rt
    collect_garbage()
    assert [token.id async for token in stream] == text(12)
    del stream
    collect_garbage()
    join_the_trio_thread()


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


@pytest.mark.parametrize("after", [0, 2, 7])
@partial(on_asyncio, uvloop=True)
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


@on_asyncio
async def test_a_slow_consumer_slows_the_models() -> None:
    events: list[Event] = []
    async with opened(trace=events.append) as rt:
        slow = rt.stream(PROMPT, max_tokens=300, lookahead=0)
        assert (await anext(slow)).id == text(1)[0]
        for num_read in (1, 3):
            # Each round of the slow stream can alternate with a round of the other.
            await rt.generate(PROMPT, max_tokens=60, lookahead=0)
            buffered = count(events, 0, "verdict") - num_read
            # Sixteen rounds in the buffer, one that waits for room, and those that came with the last request.
            assert 16 <= buffered <= 34
            rounds = count(events, 0, "verdict")
            await rt.generate(PROMPT, max_tokens=60, lookahead=0)
            assert count(events, 0, "verdict") == rounds
            assert [(await anext(slow)).id for _ in range(2)] == text(10)[num_read : num_read + 2]


@on_asyncio
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


# --- conversations --------------------------------------------------------------------------------


@partial(on_asyncio, uvloop=True)
async def test_a_save_that_is_cancelled_leaves_what_was_there_and_the_loop_running(tmp_path: Path) -> None:
    async with runtime.aio.open(*chat_models.pair(template=None)) as rt:
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


@on_asyncio
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
