"""A nursery for what works in the background of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import trio


class BackgroundNursery:
    """A nursery for the actors: it is cancelled on leaving, and the body's exceptions pass it unwrapped.

    A plain nursery would hand a user's own ValueError back to him in an exception group.
    """

    async def __aenter__(self) -> trio.Nursery:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self._nursery

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded, so that it is this cancellation that ends the actors and none from further out: that one would
        # come out here, in the place of an error of the body's own.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        with interrupts_unwrapped():
            await self._manager.__aexit__(None, None, None)


@contextmanager
def interrupts_unwrapped() -> Iterator[None]:
    """Let a Ctrl-C out of a nursery as itself; a group would end the process with another status."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        raise KeyboardInterrupt from None
