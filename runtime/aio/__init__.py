"""Outrider for asyncio: the same runtime, for programs on asyncio, uvloop, or anyio on top of either.

async with runtime.aio.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio and the models run in threads of their own, and nothing here blocks the asyncio loop. For the same reason, this
module imports neither trio nor the models' libraries: a thread does, when a runtime is first opened.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from protocol.argument_aliases import MISSING
from protocol.errors import WrongEventLoopError
from protocol.reprs import shown

if TYPE_CHECKING:
    from runtime.bridge.runtime import Completions, Conversation, Runtime, TokenStream
    from runtime.engine.opening import OpenArguments
    from runtime.loading.model_sources import ModelSource

__all__ = ["Completions", "Conversation", "Opening", "Runtime", "TokenStream", "open"]

# Imported when they are used.
_HANDLES = ("Completions", "Conversation", "Runtime", "TokenStream")


def open(target: ModelSource = MISSING, draft: ModelSource | None = None, **options: Unpack[OpenArguments]) -> Opening:
    """`runtime.open` for asyncio: load the models, and serve them until the runtime is closed.

    `async with runtime.aio.open(…) as rt` closes the runtime at the end of the block; `rt = await
    runtime.aio.open(…)` leaves that to `await rt.aclose()`, or to dropping the last reference to the runtime, its
    streams and its conversations.

    Args: as for `runtime.open`. A model given as `(model, tokenizer)` is evaluated first, in the caller's thread: no
        other thread can evaluate its lazy arrays. A trace function is called in another thread.

    Yields: a `Runtime`, for all tasks of this asyncio loop.

    Raises: as `runtime.open`, before the block is entered, and:
        WrongEventLoopError: no asyncio loop is running here, or trio is.

    Cancellation: leaving the block ends every stream, waits for the running forward passes (at most one a model), and
        joins the threads, also while being cancelled. While loading, it waits for the load. The loop is not blocked
        meanwhile. If the loop is closed while the runtime is open, the threads end by themselves.
    """
    return Opening(target, draft, dict(options))


class Opening:
    """A runtime that is about to open: an awaitable and an async context manager, made by `open`."""

    def __init__(self, target: ModelSource, draft: ModelSource | None, options: dict[str, Any]) -> None:
        self._target = target
        self._draft = draft
        self._options = options

    def __repr__(self) -> str:
        return f"<outrider aio.open of {shown(self._target)}, draft {shown(self._draft)}>"

    def __await__(self) -> Generator[Any, None, Runtime]:
        return self._opened().__await__()

    async def __aenter__(self) -> Runtime:
        self._runtime = await self._opened()
        return self._runtime

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            # The loop no longer runs this task, so it cannot wait.
            self._runtime._portal.thread.stop()
        else:
            await self._runtime.aclose()

    async def _opened(self) -> Runtime:
        await _import_in_thread()
        from runtime.aio.thread import AioThread
        from runtime.bridge.runtime import Runtime, opened

        return Runtime(await opened(AioThread, self._target, self._draft, self._options))


async def _import_in_thread() -> None:
    """Import the handles and the models' libraries without blocking the loop. Raises: as `asyncio_loop`."""

    def import_handles() -> None:
        from actors.workers.thread_pool import release_streams

        try:
            import_module("runtime.aio.thread")
            import_module("runtime.bridge.runtime")
        finally:
            release_streams()

    executor = ThreadPoolExecutor(1, "outrider-import")
    imported = asyncio_loop().run_in_executor(executor, import_handles)
    try:
        await imported
    finally:
        # Once the import is over, its thread ends at once; an import that nobody waits for any more may go on.
        executor.shutdown(wait=imported.done() and not imported.cancelled())


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The running asyncio loop.

    Raises: WrongEventLoopError: there is none, or trio is running.
    """
    # Trio first: in trio's guest mode on asyncio, both are running. While trio is being imported, it is not running.
    in_trio_task = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    if in_trio_task is not None and in_trio_task():
        raise WrongEventLoopError("runtime.aio is for asyncio, but trio is running here; use runtime.open instead")
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongEventLoopError(
            "runtime.aio needs a running asyncio loop, but none is running here; use runtime.open_sync instead"
        ) from None


def __getattr__(name: str) -> Any:
    if name not in _HANDLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("runtime.bridge.runtime"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
