"""A nursery for background tasks of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class BackgroundNursery:
    """A nursery that is cancelled when its block is left, and that passes the block's exceptions on unwrapped.

    A plain nursery would wrap the user's own ValueError in an exception group.
    """

    async def __aenter__(self) -> trio.Nursery:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self._nursery

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
        # Shielded, so that this cancellation ends the actors, and not one from further out, which would be raised here
        # in place of the block's own error.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        with interrupts_unwrapped():
            await self._manager.__aexit__(None, None, None)


@contextmanager
def interrupts_unwrapped() -> Iterator[None]:
    """Let a KeyboardInterrupt out of a nursery unwrapped; a group would end the process with another status."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        raise KeyboardInterrupt from None
