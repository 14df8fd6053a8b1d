"""Closing a runtime with its own method, in trio."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from blocking_models import BlockingModel
from completions import ids
from greedy_pair import PROMPT, target, text
from our_threads import outrider_threads

import runtime


async def test_closing_what_was_served_waits_for_the_forward_pass_and_joins_the_threads() -> None:
    held = BlockingModel(target())
    closed: list[int] = []
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (held, None))
        held.block()

        @nursery.start_soon
        async def read() -> None:
            with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
                await rt.generate(PROMPT, max_tokens=400)

        async def close() -> None:
            await rt.aclose()
            closed.append(len(outrider_threads()))

        await held.blocked_in_trio()
        with trio.CancelScope() as scope:
            scope.cancel()
            await rt.aclose()
        # Only the wait was cancelled.
        assert scope.cancelled_caught
        with pytest.raises(runtime.RuntimeClosedError, match="open another"):
            rt.stream(PROMPT)
        nursery.start_soon(close)
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        assert closed == []
        held.release()
    # The task that served the runtime has ended by itself, or the nursery would still be open.
    assert closed == [0, 0]
    await rt.aclose()


async def test_closing_within_the_block_ends_the_streams_and_leaving_does_the_rest() -> None:
    async with runtime.open((target(), None)) as rt:
        assert ids(await rt.generate(PROMPT, max_tokens=4)) == text(4)
        stream = rt.stream(PROMPT, max_tokens=400)
        await anext(stream)
        await rt.aclose()
        assert rt.health() == runtime.Health(target=False, draft=None)
        with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
            async for _ in stream:
                pass
        await rt.aclose()
    assert outrider_threads() == []


async def test_cancelling_the_nursery_releases_whoever_closes() -> None:
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (target(), None))
        nursery.cancel_scope.cancel()
    await rt.aclose()
    assert outrider_threads() == []
