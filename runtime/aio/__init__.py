"""Outrider for asyncio: the same runtime, for programs on asyncio, uvloop, or anyio on top of either.

async with runtime.aio.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio, and everything that works on it, runs in a thread of its own. Nothing here blocks the asyncio loop; so what needs
the models' libraries is imported in that thread, too, and not at the top of this module.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from protocol.reprs import shown
from protocol.settings import MISSING
from runtime.aio.thread import AioThread
from runtime.bridge.deferred_opening import deferred_opening

if TYPE_CHECKING:
    from runtime.aio.conversation import Conversation
    from runtime.aio.many_prompts import Completions, TokenStreams
    from runtime.aio.runtime import Runtime
    from runtime.aio.token_stream import TokenStream
    from runtime.engine import runtime as engine
    from runtime.engine.open_options import OpenOptions
    from runtime.loading.model_sources import Source

__all__ = ["Completions", "Conversation", "Opening", "Runtime", "TokenStream", "TokenStreams", "open"]

_HOMES = {
    "Completions": "runtime.aio.many_prompts",
    "Conversation": "runtime.aio.conversation",
    "Runtime": "runtime.aio.runtime",
    "TokenStream": "runtime.aio.token_stream",
    "TokenStreams": "runtime.aio.many_prompts",
}


def open(target: Source = MISSING, draft: Source | None = None, **options: Unpack[OpenOptions]) -> Opening:
    """`runtime.open` for asyncio: load the models, and keep them at work until the runtime is closed.

    `async with runtime.aio.open(…) as rt` closes it as the block is left; after `rt = await runtime.aio.open(…)`,
    `await rt.aclose()` does.

    Args: as for `runtime.open`. A model that is given as `(model, tokenizer)` is evaluated first, where it was not yet,
        in the caller's thread, since it can be in no other. A trace function is called in another thread.

    Yields: a `Runtime`, to be used in this asyncio loop, in any of its tasks.

    Raises: as `runtime.open`, before the block is entered, and:
        WrongEventLoopError: there is no asyncio loop here, or trio is what runs.

    Cancellation: leaving the block ends every stream, waits for the forward passes that are running (at most one a
        model), and joins the threads, also while being cancelled. While loading, it waits for the load. The loop is not
        blocked meanwhile. Where the loop is closed with this still open, the threads end by themselves.
    """
    return Opening(target, draft, dict(options))


class Opening:
    """Awaitable, and an async context manager; see `open`."""

    def __init__(self, target: Source, draft: Source | None, options: dict[str, Any]) -> None:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:
            # A task that nobody runs any more cannot wait.
            self._runtime._thread.stop()
        else:
            await self._runtime.aclose()

    async def _opened(self) -> Runtime:
        thread: AioThread[engine.Runtime]
        make = deferred_opening(self._target, self._draft, self._options, handle=_HOMES["Runtime"])
        thread = AioThread(make, "outrider-trio")
        runtime = await thread.start()
        # What takes long to import was imported in the thread.
        from runtime.aio.runtime import Runtime

        return Runtime(thread, runtime)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
