"""Many prompts on asyncio: from generators of the loop's own, and however they are left."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest
from blocking_models import BlockingModel, released_on_exit
from completions import ids
from faces import on_asyncio
from garbage import collect_garbage
from greedy_pair import LONG, PROMPT, drafter, target, text, the_next_text_is_right
from models import prompt_of
from polling import until_in_asyncio

import runtime

pytestmark = pytest.mark.usefixtures("spare_buffers")

PROMPTS = [tuple(prompt_of(9, seed=seed)) for seed in range(5)]


def opened(ours: Any = None) -> Any:
    return runtime.aio.open((ours or target(), None), (drafter(), None))


@on_asyncio
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


@on_asyncio
async def test_a_generator_of_prompts_may_have_timeouts_and_task_groups_around_its_yield() -> None:
    async with opened() as rt:
        for prompts in (in_a_timeout, in_a_scope_of_anyio, in_a_task_group):
            completions = await rt.generate_many(prompts(), max_concurrent=2, max_tokens=4)
            assert [ids(completion) for completion in completions] == [text(4, prompt) for prompt in PROMPTS]
        for prompts, error in ((in_a_timeout_that_is_over, TimeoutError), (in_a_task_group_that_fails, ExceptionGroup)):
            for max_concurrent in (1, 3):
                with pytest.raises(error):
                    await rt.generate_many(prompts(), max_concurrent=max_concurrent, max_tokens=4)
        await the_next_text_is_right(rt)


@partial(on_asyncio, uvloop=True)
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
            await until_in_asyncio(partial(closed.__contains__, way))
            assert len(tasks) > 1
            assert len(set(tasks)) == 1


@on_asyncio
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


@on_asyncio
async def test_many_prompts_can_be_left_in_every_way() -> None:
    held = BlockingModel(target())
    async with opened(held) as rt, contextlib.AsyncExitStack() as stack:
        stack.enter_context(released_on_exit(held))
        for way in ("cancel", "aclose", "leave", "break", "drop"):
            # The others are not over when the first is.
            prompts = [PROMPTS[0], *((prompt, LONG) for prompt in PROMPTS[1:])]
            many = rt.generate_many(prompts, max_concurrent=3, max_tokens=12)
            if way == "break":
                async for _ in many:
                    break
            held.block()
            await held.blocked_in_asyncio()
            match way:
                case "cancel":
                    task = asyncio.create_task(anext(many))
                    for _ in range(20):
                        await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
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
