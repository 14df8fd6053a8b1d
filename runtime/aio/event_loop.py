"""The asyncio loop of the calling thread; without importing trio, which takes long."""

from __future__ import annotations

import asyncio
import sys

from protocol.errors import WrongEventLoopError


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The running asyncio loop.

    Raises: WrongEventLoopError: there is none, or trio is running.
    """
    # Trio first: in trio's guest mode on asyncio, both are running. While it is being imported, it is not running.
    in_trio_task = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    if in_trio_task is not None and in_trio_task():
        raise WrongEventLoopError("runtime.aio is for asyncio, but trio is running here; use runtime.open instead")
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongEventLoopError(
            "runtime.aio needs a running asyncio loop, but none is running here; use runtime.open_sync instead"
        ) from None
