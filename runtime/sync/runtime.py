"""A runtime for plain threads, which block for its results; its models work in the threads of a trio loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Never, Self, TypeVar, cast

import trio

from protocol.errors import PromptError, StreamBusyError, WrongEventLoopError
from protocol.scores import Score
from runtime.bridge.handles import ConversationHandle, IteratorHandle, RuntimeHandle, StreamHandle
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.bridge.trio_thread import BridgeCall, BridgeFuture, TrioThread
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.many_prompts import Completions
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion
from runtime.generation.tool_calls.functions import Functions

T = TypeVar("T")
Item = TypeVar("Item")


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

    interruption = KeyboardInterrupt

    def make_future(self) -> BridgeFuture[Any]:
        return BlockingFuture[Any]()

    async def wait(self, future: BridgeFuture[T]) -> T:
        assert isinstance(future, BlockingFuture)
        return cast(T, future.wait())

    def _deliver(self, future: BridgeFuture[Any], value: object) -> bool:
        if not future.done():
            future.set_result(value)
        return True

    def _has_callers(self) -> bool:
        # At its exit, the interpreter joins this thread, after the main thread has ended.
        return threading.main_thread().is_alive()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits with `SyncThread.wait`, and so blocks."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a coroutine has waited in a plain thread")


class SyncBridge(RuntimeBridge):
    """`RuntimeBridge` for plain threads.

    The trio thread stops once the bridge is dropped: the runtime's handle, its streams and its conversations refer to
    the bridge, and nothing in the trio thread does.
    """

    face = "sync"
    how_to_close = "close()"
    may_await = False

    def __del__(self) -> None:
        self.thread.stop()

    def check_caller(self) -> None:
        check_not_in_trio("this")

    async def call_result(self, call: BridgeCall[T]) -> T:
        try:
            await self.thread.wait(call.done)
        except BaseException:  # a Ctrl-C; a second one is raised at once
            call.cancel()
            await self.thread.wait(call.done)
            raise
        return call.result()

    async def pause(self) -> None:
        """Nothing: there are no other tasks."""

    async def call_function(self, function: Callable[[], Any]) -> Any:
        return function()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_blocking(coroutine)

    def iterated(self, items: Any) -> Never:
        raise PromptError("prompts are an async iterable, and there is no event loop here; give a list or a generator")


def check_not_in_trio(what: str) -> None:
    """Raises: WrongEventLoopError: trio is running in this thread, and `what` would block it."""
    # Including the trio loop of the runtime: a trace function that waited for it there would wait forever.
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoopError(
            f"{what} would block this trio program; use `async with runtime.open(…) as rt` and `await rt.generate(…)`"
        )


class BlockingIteration(IteratorHandle[Any, Any, Item]):
    """An `IteratorHandle` as an iterator and context manager, for one thread at a time."""

    _bridge: SyncBridge

    def __init__(self, bridge: SyncBridge, make_source: Callable[[], Any]) -> None:
        """As `IteratorHandle`; blocks until the source was made, and raises what making it raised."""
        super().__init__(bridge, make_source)
        self._in_use = threading.Lock()
        try:
            run_blocking(self._wait_opened())
        except BaseException:  # a Ctrl-C, too
            self._close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next item.

        Raises: as `__anext__` of the class of the same name in `runtime`, and:
            StreamBusyError: another thread is waiting for an item.

        Interrupting: a Ctrl-C ends the generation, or all of them.
        """
        is_ours = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                self._is_unread = False
                item = run_blocking(self._next())
                if item is None:
                    raise StopIteration
                return item
        except BaseException:
            # Any exception, StopIteration and a Ctrl-C included, ends the iteration.
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError("another thread is waiting for the next item; a stream has one consumer")

    def close(self) -> None:
        """End the generation, or all of them. Returns at once; closing again does nothing. For any thread."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class TokenStream(BlockingIteration[Token], StreamHandle):
    """The tokens of one generation, for one thread at a time: `runtime.TokenStream` as an iterator and context manager.

    Another thread may call `close` while one waits for a token. A Ctrl-C has the effect of a cancellation there.
    """


class Conversation(ConversationHandle[TokenStream, Completion, int, bool]):
    """`runtime.Conversation` for plain threads; one thread at a time uses it."""

    _stream_handle = TokenStream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_answer()


class Runtime(
    RuntimeHandle[
        TokenStream,
        list[Completion],
        list[Completion | Exception],
        Conversation,
        Completion,
        Score,
        Conversation,
        None,
    ]
):
    """A target and a draft model at work, for plain threads: a context manager, made by `open_sync`.

    Its methods are those of `runtime.Runtime`, and block. Meanwhile, a Ctrl-C has the effect of a cancellation there.

    Raises: WrongEventLoopError: a method is called while trio is running in this thread, and would be blocked.
    """

    _bridge: SyncBridge
    _stream_handle = TokenStream
    _conversation_handle = Conversation

    def close(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing again does nothing; a second call waits for the first.

        Interrupting: a Ctrl-C is raised once the runtime is closed.
        """
        check_not_in_trio("close()")
        run_blocking(self._bridge.thread.stop_and_join())

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self._bridge.thread.stop_and_join())

    def _completions(self, begin: Callable[[], Completions[Any]]) -> list[Any]:
        async def complete_all() -> list[Any]:
            return await begin()

        return run_blocking(self._bridge.call(complete_all))

    def _new_conversation(
        self, functions: Functions, system: str | None, make: Callable[[], TrioConversation]
    ) -> Conversation:
        async def made() -> TrioConversation:
            return make()

        conversation = run_blocking(self._bridge.call(made))
        return Conversation(self._bridge, functions, system, conversation.make_new, conversation)
