"""Taking items from an async iterator that others have written: in one task, and each only when it is wanted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def feed(
    items: AsyncIterator[T],
    wanted: Callable[[], Awaitable[bool]],
    give: Callable[[T], None],
    cancelled: type[BaseException],
) -> bool:
    """Give the items of an iterator, one for each `wanted`, and close a generator however this ends.

    An async generator may have a timeout, a cancel scope or a nursery open around its `yield`. They belong to the task
    that advances it, so a whole iteration needs one task, and that task must not open scopes of its own meanwhile. They
    also cancel this task where it waits between two items; the generator then gets the cancellation at its `yield`.

    Args:
        wanted: waits for the next item to be wanted; False ends this.
        cancelled: what a cancellation raises in the event loop.

    Returns: whether there are no more items.

    Raises: as the iterator, and `wanted`.
    """
    generator = items if isinstance(items, AsyncGenerator) else None
    held: list[T] = []
    try:
        while True:
            try:
                if not await wanted():
                    return False
            except cancelled as error:
                # One that goes on after its cancellation is cancelled again; once is enough.
                if generator is None or held:
                    raise
                held.append(await generator.athrow(error))
            else:
                give(held.pop() if held else await anext(items))
    except StopAsyncIteration:
        return True
    finally:
        if generator is not None:
            await _close(generator)


async def _close(generator: AsyncGenerator[T, None]) -> None:
    try:
        await generator.aclose()
    except BaseExceptionGroup as group:
        # Nurseries and task groups wrap what ends the generator.
        _, others = group.split(GeneratorExit)
        if others is not None:
            raise others from None
