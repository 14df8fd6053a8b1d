"""Ways to end a generation: each gets what begins it, a scope that is cancelled, and an event that is set with that."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

Begin = Callable[[], Any]
Way = Callable[[Begin, trio.CancelScope, trio.Event], Awaitable[Any]]
"""Returns what was begun, if it is still held."""


async def read(begun: Any) -> None:
    async for _ in begun:
        pass


async def by_scope(begin: Begin, scope: trio.CancelScope, _: trio.Event) -> None:
    with scope:
        await read(begin())


async def by_scope_around_what_is_kept(begin: Begin, scope: trio.CancelScope, _: trio.Event) -> Any:
    begun = begin()
    with scope:
        await read(begun)
    return begun


async def by_break(begin: Begin, _: trio.CancelScope, due: trio.Event) -> None:
    async for _item in begin():
        if due.is_set():
            break


async def by_leaving(begin: Begin, _: trio.CancelScope, due: trio.Event) -> Any:
    async with begin() as begun:
        await due.wait()
    return begun


async def by_aclose(begin: Begin, _: trio.CancelScope, due: trio.Event) -> Any:
    begun = begin()
    await due.wait()
    await begun.aclose()
    await begun.aclose()
    return begun


async def by_dropping_unread(begin: Begin, _: trio.CancelScope, due: trio.Event) -> None:
    stream = begin()
    await due.wait()
    with pytest.warns(ResourceWarning, match="dropped unread"):
        del stream
