"""Faults in real models on real threads: what fails, and what must end with it."""

import functools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mlx.nn as nn
import pytest
import trio
from models import VOCAB_SIZE, Wrapped, greedy, llama, near, prompt_of
from our_threads import outrider_threads
from polling import until_in_trio
from scripted import collect, ids

import runtime
from actors.workers.worker import JobError, Steps

PROMPT = prompt_of(9)


@functools.cache
def pair() -> tuple[nn.Module, nn.Module]:
    target = llama(0)
    return target, near(target, noise=0.1)


async def kill(worker: Any) -> None:
    """End a worker's thread with an error that no job raises."""
    with pytest.raises(JobError):
        await worker.run_steps(Steps("draft", lambda: "no step", lambda *_: None))


# --- a drafter that hangs -------------------------------------------------------------------------


class Hanging(Wrapped):
    """A model with a call that does not return until it is released: in Python code, so that its thread can be left."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.hang_at: int | None = None
        self.num_calls = 0
        self.hangs = False
        self.let_go_on = threading.Event()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        if self.hang_at is not None and self.num_calls >= self.hang_at:
            self.hangs = True
            self.let_go_on.wait()
        return super().__call__(*arguments, **keywords)


@asynccontextmanager
async def beside_a_hanging_drafter() -> AsyncIterator[tuple[runtime.Runtime, nn.Module, Hanging]]:
    """A runtime, its target, and its drafter, which is to be told to hang."""
    target, draft = pair()
    hanging = Hanging(draft)
    with trio.fail_after(60):
        async with runtime.open((target, None), (hanging, None)) as rt:
            yield rt, target, hanging
    hanging.let_go_on.set()


@pytest.fixture
def impatience(monkeypatch: Any, impatient_targets: None) -> None:
    monkeypatch.setattr("protocol.deadlines.MIN_PROPOSAL_WAIT_S", 0.05)
    # On a busy machine, a job that does not hang may take a second.
    monkeypatch.setattr("actors.workers.thread_worker.HANG_TIMEOUT_S", 2.0)


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("is_left_open", [False, True])
async def test_a_drafter_that_hangs_keeps_neither_the_text_nor_the_end_of_the_runtime(is_left_open, caplog):
    async with beside_a_hanging_drafter() as (rt, target, hanging):
        hanging.hang_at = hanging.num_calls + 6
        while not hanging.hangs:  # on a busy machine, the drafter may be left behind for a whole text
            stream = rt.stream(PROMPT, max_tokens=40, lookahead=2)
            assert await collect(stream) == greedy(target, PROMPT, 40)
        assert rt.statistics().draft_timeouts >= 1
        await until_in_trio(lambda: rt.health() == runtime.Health(target=True, draft=False))
        # The next stream is served as well.
        assert ids((await rt.generate([1, 2, 3], max_tokens=10)).tokens) == greedy(target, [1, 2, 3], 10)
        if is_left_open:
            unread = rt.stream(PROMPT, max_tokens=None, lookahead=2)
            await anext(unread)
    assert "the draft model hangs" in caplog.text


@pytest.mark.usefixtures("impatience")
async def test_a_stream_in_a_hanging_shared_step_can_be_closed_alone(caplog: Any) -> None:
    async with beside_a_hanging_drafter() as (rt, _, hanging):
        first, second = (rt.stream(prompt, max_tokens=None, lookahead=2) for prompt in (PROMPT, [5, 6, 7]))
        for stream in (first, second):
            async for token in stream:
                if token.index == 20:
                    break
        hanging.hang_at = hanging.num_calls
        while not hanging.hangs:
            await anext(first)
            await anext(second)
        # Whichever of the two handed the step in.
        await second.aclose()
        await anext(first)
        await first.aclose()
    assert "the draft model hangs" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_targets")
async def test_a_drafter_that_hangs_is_detached_at_once(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("runtime.engine.drafter_slot.RELEASE_TIMEOUT_S", 0.05)
    async with beside_a_hanging_drafter() as (rt, target, hanging):
        hanging.hang_at = hanging.num_calls + 6
        stream = rt.stream(PROMPT, max_tokens=40, lookahead=2)
        got = [(await anext(stream)).id]
        while not hanging.hangs:
            got.append((await anext(stream)).id)
        # Long before the hanging job is given up.
        await rt.detach_draft()
        assert "the draft model hangs" not in caplog.text
        assert got + [token.id async for token in stream] == greedy(target, PROMPT, 40)
        await rt.attach_draft((pair()[1], None))
        assert (await rt.generate(PROMPT, max_tokens=40, lookahead=2)).statistics.proposed > 0
        hanging.let_go_on.set()
    assert "the draft model hangs" not in caplog.text


async def test_a_drafters_thread_that_dies_costs_no_token(caplog: Any) -> None:
    target, draft = pair()
    with trio.fail_after(60):
        async with runtime.open((target, None), (draft, None)) as rt:
            stream = rt.stream(PROMPT, max_tokens=30, lookahead=2)
            got = [(await anext(stream)).id]
            await kill(rt._draft.worker)
            assert rt.health() == runtime.Health(target=True, draft=False)
            assert not rt.health().ok
            got += [token.id async for token in stream]
            assert got == greedy(target, PROMPT, 30)
            # Under "auto" a text may choose to rest, and never find out.
            again = await rt.generate(PROMPT, max_tokens=30, lookahead=2)
            assert ids(again.tokens) == got
            assert again.statistics.draft_failures == 1
    assert "the draft's thread has died of AttributeError" in caplog.text
    assert outrider_threads() == []


async def test_a_targets_thread_that_dies_ends_every_stream_with_its_error() -> None:
    target, draft = pair()
    with trio.fail_after(60):
        async with runtime.open((target, None), (draft, None)) as rt:
            streams = [rt.stream([token], max_tokens=None) for token in range(3)]
            await anext(streams[0])
            assert rt.health().ok
            await kill(rt._target.worker)
            assert rt.health() == runtime.Health(target=False, draft=True)
            for stream in streams:
                with pytest.raises(runtime.RuntimeBrokenError) as broken:
                    await collect(stream)
                assert isinstance(broken.value.__cause__, AttributeError)
            with pytest.raises(runtime.RuntimeBrokenError):
                await rt.generate([VOCAB_SIZE - 1])
            assert rt.health() == runtime.Health(target=False, draft=False)
    assert outrider_threads() == []
