"""Outrider without an event loop: the same runtime, for scripts, notebooks and plain threads.

with runtime.open_sync("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio and the models run in threads of their own, so this also works where another event loop is running, as in a
notebook. It blocks that loop, as any long computation in a notebook does.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, Unpack, cast

import trio

from protocol.argument_aliases import MISSING
from protocol.errors import PromptError, WrongEventLoopError
from protocol.settings import SettingsLike, settings_from, with_overrides
from protocol.statistics import Statistics
from runtime.bridge.portal import Future, Portal, TrioThread
from runtime.bridge.runtime import Completions, RuntimeState, StreamState, opened
from runtime.bridge.runtime import Conversation as ConversationHandle
from runtime.bridge.runtime import Runtime as RuntimeHandle
from runtime.bridge.runtime import TokenStream as StreamHandle
from runtime.engine.opening import OPTIONS, OpenArguments, OpenArgumentsAndSettings
from runtime.generation.conversation import TurnMessage
from runtime.generation.many_prompts import C
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import ToolCall
from runtime.loading.model_sources import ModelSource

__all__ = ["Conversation", "Runtime", "TokenStream", "generate_sync", "open_sync"]


def open_sync(
    target: ModelSource = MISSING, draft: ModelSource | None = None, **options: Unpack[OpenArguments]
) -> Runtime:
    """`runtime.open` without an event loop: load the models, and serve them until the runtime is closed.

    `with runtime.open_sync(…) as rt` closes the runtime at the end of the block. `rt = runtime.open_sync(…)` leaves
    that to `rt.close()`, or to dropping the last reference to the runtime, its streams and its conversations.

    Args: as for `runtime.open`. A trace function and logits processors are called in other threads.

    Returns: a `Runtime`, which several threads may use at once.

    Raises: as `runtime.open`, and:
        WrongEventLoopError: an event loop is running in this thread, and would be blocked. A notebook's loop is an
            exception: the user of a cell waits for it in any case.

    Interrupting: a Ctrl-C while loading is raised after the load, once the models are released.
    """
    check_no_event_loop("open_sync")
    return Runtime(run_blocking(opened(SyncThread, target, draft, dict(options))))


def generate_sync(
    prompt: Prompt,
    settings: SettingsLike | None = None,
    *,
    target: ModelSource = MISSING,
    draft: ModelSource | None = None,
    **keywords: Unpack[OpenArgumentsAndSettings],
) -> Completion:
    """Load the models, generate one text, and release the models.

    Args:
        prompt: text, token ids or chat messages.
        settings: as for `Runtime.stream`.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open`, and settings, each of which replaces that of `settings`.

    Raises: as `runtime.open` and `Runtime.generate`, and `WrongEventLoopError` as `open_sync`.

    Interrupting: a Ctrl-C is raised once the running forward pass has finished.
    """
    check_no_event_loop("generate_sync")
    options: dict[str, Any] = {name: value for name, value in keywords.items() if name in OPTIONS}
    overrides: dict[str, Any] = {name: value for name, value in keywords.items() if name not in OPTIONS}
    settings_from(with_overrides(settings, overrides))  # before the models are loaded
    with open_sync(target, draft, **options) as runtime:
        return runtime.generate(prompt, settings, **overrides)


def check_no_event_loop(what: str) -> None:
    """Raises: WrongEventLoopError: an event loop other than a notebook's is running here, and `what` would block it."""
    if trio.lowlevel.in_trio_run():
        name, module = "trio", "runtime"
    else:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if "ipykernel" in sys.modules:
            return
        name, module = "asyncio", "runtime.aio"
    raise WrongEventLoopError(
        f"{what} would block the event loop that is running here, {name}'s; write instead: "
        f"async with {module}.open(target, draft) as rt: completion = await rt.generate(prompt)"
    )


def __dir__() -> list[str]:
    return sorted(__all__)


# --- the handles, which block ---------------------------------------------------------------------

# Those of `runtime.bridge` do the work. Their coroutines block where they wait, so each runs to its end at once.


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")


class BlockingFuture(Generic[T]):
    """A result that threads block for.

    Setting it takes no lock that a waiting thread could hold, so that a Ctrl-C in the middle of `wait` leaves no lock
    held. `threading.Event` and `concurrent.futures.Future` are written in Python and do not guarantee that.
    """

    def __init__(self) -> None:
        self._results: list[T] = []  # none or one
        self._waiting: list[threading.Lock] = []

    def done(self) -> bool:
        return bool(self._results)

    def result(self) -> T:
        return self._results[0]

    def set_result(self, result: T, /) -> None:
        self._results.append(result)
        for lock in self._waiting:
            lock.release()

    def wait(self) -> T:
        """Block until the result is set, and return it; a Ctrl-C in the main thread interrupts the waiting."""
        lock = threading.Lock()
        lock.acquire()
        # In this order: a result that is set after this line finds the lock, and releases it.
        self._waiting.append(lock)
        if not self._results:
            lock.acquire()
        return self._results[0]


class SyncThread(TrioThread):
    """A trio thread that one thread starts, and any thread uses and stops. It ends with the main thread."""

    face = "sync"
    consumer = "thread"
    how_to_close = "close()"
    may_await = False
    interruption = KeyboardInterrupt

    def make_future(self) -> Future[Any]:
        return BlockingFuture[Any]()

    async def wait(self, future: Future[T]) -> T:
        assert isinstance(future, BlockingFuture)
        return cast(T, future.wait())

    async def pause(self) -> None:
        """Nothing: there are no other tasks."""

    def check_caller(self) -> None:
        check_not_in_trio("this")

    async def call_function(self, function: Callable[[], Any]) -> Any:
        return function()

    def iterated(self, items: Any) -> Never:
        raise PromptError("prompts are an async iterable, and there is no event loop here; give a list or a generator")

    def _deliver(self, future: Future[Any], value: object) -> bool:
        if not future.done():
            future.set_result(value)
        return True

    def _has_callers(self) -> bool:
        # At its exit, the interpreter joins this thread, after the main thread has ended.
        return threading.main_thread().is_alive()


def check_not_in_trio(what: str) -> None:
    """Raises: WrongEventLoopError: trio is running in this thread, and `what` would block it."""
    # Including the trio loop of the runtime: a trace function that waited for it there would wait forever.
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoopError(
            f"{what} would block this trio program; use `async with runtime.open(…) as rt` and `await rt.generate(…)`"
        )


def run_blocking(coroutine: Coroutine[Any, Any, T] | Generator[Any, Any, T]) -> T:
    """The result of a coroutine that waits with `SyncThread.wait`, and so blocks."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a coroutine has waited in a plain thread")


def giving(made: Callable[[T], R], method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[Any, P], R]:
    """A method that returns what `made` makes of the result of the handle's method."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return made(method(self._handle, *args, **kwargs))

    return call


def blocking(method: Callable[Concatenate[H, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that runs an async method of the handle to its end."""
    return giving(run_blocking, method)


def gathered(
    method: Callable[Concatenate[RuntimeHandle, P], Completions[C]],
) -> Callable[Concatenate[Any, P], list[C]]:
    """A method that waits for all completions of the handle's method, and returns them in the order of the prompts."""
    return giving(lambda completions: run_blocking(completions.__await__()), method)


class TokenStream(StreamState):
    """The tokens of one generation, for one thread at a time: `runtime.TokenStream` as an iterator and context manager.

    Another thread may call `close` while one waits for a token. A Ctrl-C has the effect of a cancellation there.
    """

    def __init__(self, handle: StreamHandle) -> None:
        """Blocks until the prompt was checked. Raises: as `runtime.Runtime.stream`."""
        self._handle = handle
        run_blocking(handle.opened())

    def __repr__(self) -> str:
        return repr(self._handle)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """The next token.

        Raises: as `runtime.TokenStream.__anext__`; StreamBusyError: another thread is waiting for one.

        Interrupting: a Ctrl-C ends the generation.
        """
        try:
            return run_blocking(self._handle.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def end_thinking(self) -> None:
        """As `runtime.TokenStream.end_thinking`."""
        self._handle.end_thinking()

    def close(self) -> None:
        """End the generation. Returns at once; closing again does nothing. For any thread."""
        self._handle._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._handle.is_closed

    def statistics(self) -> Statistics:
        return self._handle.statistics()

    @property
    def _stream(self) -> TrioTokenStream | None:
        return self._handle._stream


class Conversation:
    """`runtime.Conversation` for plain threads; one thread at a time uses it."""

    generate = blocking(ConversationHandle.generate)
    call_tools = blocking(ConversationHandle.call_tools)
    save = blocking(ConversationHandle.save)
    stream = giving(TokenStream, ConversationHandle.stream)

    def __init__(self, handle: ConversationHandle) -> None:
        """Blocks until the conversation was made. Raises: as `runtime.Runtime.conversation`."""
        self._handle = handle
        run_blocking(handle.made())

    def __repr__(self) -> str:
        return repr(self._handle)

    @property
    def messages(self) -> list[TurnMessage]:
        """A copy of the messages so far, as in `runtime.Conversation.messages`."""
        return self._handle.messages

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer whose results the model was not told yet; empty during an answer."""
        return self._handle.pending_calls

    def reset(self) -> None:
        """Forget everything but the system message. Raises: as `save`."""
        self._handle.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle._close_answer()


class Runtime(RuntimeState):
    """A target and a draft model at work, for plain threads: a context manager, made by `open_sync`.

    Its methods are those of `runtime.Runtime`, and block. Meanwhile, a Ctrl-C has the effect of a cancellation there.

    Raises: WrongEventLoopError: a method is called while trio is running in this thread, and would be blocked.
    """

    stream = giving(TokenStream, RuntimeHandle.stream)
    generate = blocking(RuntimeHandle.generate)
    generate_many = gathered(RuntimeHandle.generate_many)
    score = blocking(RuntimeHandle.score)
    warm = blocking(RuntimeHandle.warm)
    conversation = giving(Conversation, RuntimeHandle.conversation)
    load = giving(lambda loaded: Conversation(run_blocking(loaded)), RuntimeHandle.load)
    attach_draft = blocking(RuntimeHandle.attach_draft)
    detach_draft = blocking(RuntimeHandle.detach_draft)

    def __init__(self, portal: Portal) -> None:
        super().__init__(portal)
        self._handle = RuntimeHandle(portal)

    def close(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing again does nothing; a second call waits for the first.

        Interrupting: a Ctrl-C is raised once the runtime is closed.
        """
        check_not_in_trio("close()")
        run_blocking(self._portal.thread.stop_and_join())

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self._portal.thread.stop_and_join())
