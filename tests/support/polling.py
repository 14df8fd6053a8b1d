"""Waiting for conditions that change in other threads."""

import asyncio
from collections.abc import Callable

import trio

# Ends a hang; not an expectation.
HANGS_S = 120


async def until_in_asyncio(holds: Callable[[], bool]) -> None:
    """Poll in asyncio until a condition holds."""
    async with asyncio.timeout(HANGS_S):
        while not holds():  # noqa: ASYNC110 (other threads set no event of asyncio)
            await asyncio.sleep(0)


async def until_in_trio(holds: Callable[[], bool]) -> None:
    """Poll in trio until a condition holds."""
    with trio.fail_after(HANGS_S):
        while not holds():
            await trio.lowlevel.checkpoint()
