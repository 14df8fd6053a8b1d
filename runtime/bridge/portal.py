"""A trio loop in a thread of its own with an open runtime in it, and calls from other threads into that loop.

Why a thread and not trio's guest mode: in a thread, trio's tasks and the tokenising of a prompt never block the
callers, and neither event loop has to handle the other's signals or shutdown.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import attrs
import outcome
import trio

from actors.workers.thread_pool import release_streams
from protocol.errors import RuntimeClosedError
from runtime.engine.nursery import BackgroundNursery
from runtime.engine.runtime import CLOSED, Runtime

T = TypeVar("T")

# Seconds between two checks whether the callers still exist: a closed event loop notifies nobody.
CALLER_CHECK_INTERVAL_S = 0.2


class Future(Protocol[T]):
    """A result that a caller waits for and trio's thread sets, once, such as an `asyncio.Future`."""

    def done(self) -> bool:
        """Whether the result was set."""

    def result(self) -> T:
        """The result; only after `done`."""

    def set_result(self, result: T, /) -> None:
        """Set the result."""


class TrioThread(ABC):
    """A thread that runs a trio loop and holds a runtime open in it.

    Subclasses say how callers wait: `AioThread` for an asyncio loop, `SyncThread` for plain threads, whose coroutines
    block. The thread ends by itself soon after its callers are gone.
    """

    face: ClassVar[str]  # the module whose callers these are, "aio" or "sync"
    consumer: ClassVar[str]  # what reads a stream, and
    how_to_close: ClassVar[str]  # the call that closes one; both for messages
    may_await: ClassVar[bool]  # whether async functions of a user are awaited
    interruption: ClassVar[type[BaseException]]  # with which a caller that waits is cancelled or interrupted
    runtime: Runtime  # once the thread has started
    nursery: trio.Nursery  # for background tasks; cancelled after the runtime was closed
    has_left = False  # whether the runtime was closed and its actors have ended
    _token: trio.lowlevel.TrioToken | None = None
    _is_stopping = _is_entered = False

    def __init__(self, open_runtime: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        """The thread is not started yet. `open_runtime` is called in the trio loop."""
        self._open_runtime = open_runtime
        self._scope = trio.CancelScope()
        self._is_exit_requested = trio.Event()
        self._started: Future[None] = self.make_future()
        self._ended: Future[None] = self.make_future()
        self._outcome: outcome.Outcome[None] = outcome.Value(None)
        # Not a daemon: it owns the models' threads, and a forward pass at the interpreter's exit aborts the process.
        self._thread = threading.Thread(target=self._run, name="outrider-trio", daemon=False)

    # --- how callers wait -------------------------------------------------------------------------

    @abstractmethod
    def make_future(self) -> Future[Any]:
        """A future for the calling thread."""

    @abstractmethod
    async def wait(self, future: Future[T]) -> T:
        """The result of a future. An interruption leaves the future as it is: others may be waiting for it, too."""

    @abstractmethod
    async def pause(self) -> None:
        """Let other tasks of the caller's event loop take their turns."""

    @abstractmethod
    def check_caller(self) -> None:
        """Raises: WrongEventLoopError: this is not the runtime's event loop, or waiting here would block one."""

    @abstractmethod
    async def call_function(self, function: Callable[[], Any]) -> Any:
        """Call a user's function that is not async."""

    @abstractmethod
    def iterated(self, items: Any) -> AsyncIterator[Any]:
        """An async iterable of the caller's event loop, for trio's thread. Raises: PromptError: there is no loop."""

    @abstractmethod
    def _deliver(self, future: Future[Any], value: object) -> bool:
        """Set a future's result; results arrive in the order of the calls. False if there are no callers any more."""

    @abstractmethod
    def _has_callers(self) -> bool:
        """Whether anybody can still use the runtime."""

    # --- starting and stopping --------------------------------------------------------------------

    async def start(self) -> Runtime:
        """Start, and wait until the runtime is open. Raises: what opening it raises.

        Interruption: stops the thread, and is raised once it has ended.
        """
        try:
            self._thread.start()
            await self.wait(self._started)
        except GeneratorExit:
            self.stop()  # the event loop runs this task no more, so it cannot wait
            raise
        except BaseException:
            # Also a Ctrl-C before the thread runs: it will see that it is stopping.
            self.stop()
            if self._thread.is_alive():
                await self._stop_and_wait()
            raise
        if self._ended.done():
            await self.stop_and_join()
        return self.runtime

    async def stop_and_join(self) -> None:
        """Close the runtime, and wait for the thread's end; harmless if it has. Raises: what opening or closing raises.

        Interruption: the thread is joined in any case; the interruption is raised after that.
        """
        await self._stop_and_wait()
        if isinstance(self._outcome, outcome.Error):
            raise self._outcome.error

    async def _stop_and_wait(self) -> None:
        interruption: BaseException | None = None
        while True:
            try:
                self.stop()
                await self.wait(self._ended)
                # This takes no time: the thread only has to return.
                self._thread.join()
                break
            except self.interruption as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def stop(self) -> None:
        """Start to close the runtime, from any thread; harmless if that was done."""
        self._is_stopping = True
        if self._token is not None:
            self.run_soon(self._request_exit)

    def run_soon(self, function: Callable[[], object]) -> bool:
        """Call a function in the trio loop, from any thread; in the order of these calls. It must not raise.

        Returns: False if the loop has ended, and the function will not be called.
        """
        assert self._token is not None, "not started"
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    # --- in trio's thread -------------------------------------------------------------------------

    def resolve(self, future: Future[Any]) -> None:
        """Set a future's result to None, unless nobody waits for it any more."""
        if not self._deliver(future, None):
            self.stop()

    def _run(self) -> None:
        self._outcome = outcome.capture(trio.run, self._main)
        release_streams()
        # In this order: a caller that waits for the start then finds that the thread has ended.
        self.resolve(self._ended)
        self.resolve(self._started)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # The nursery is outside: background tasks first see the runtime close, and then their cancellation.
        async with BackgroundNursery() as self.nursery:
            self.nursery.start_soon(self._stop_without_callers)
            with self._scope:
                if self._is_stopping:
                    self._scope.cancel()
                try:
                    async with self._open_runtime() as self.runtime:
                        self.resolve(self._started)
                        self._is_entered = True
                        await self._is_exit_requested.wait()
                finally:
                    self.has_left = True

    def _request_exit(self) -> None:
        # Not cancelled once entered: that would cancel the actors at the same time as the code that ends them.
        if self._is_entered:
            self._is_exit_requested.set()
        else:
            self._scope.cancel()

    async def _stop_without_callers(self) -> None:
        while self._has_callers():  # noqa: ASYNC110 (a closed loop sends no event)
            await trio.sleep(CALLER_CHECK_INTERVAL_S)
        self._request_exit()


class Call(Generic[T]):
    """A call of a function in trio's thread."""

    value: T | None = None  # what it has returned
    error: BaseException | None = None  # what it has raised instead

    def __init__(self, thread: TrioThread, function: Callable[[], Any]) -> None:
        """Functions are called soon, in the order of the calls; a coroutine goes on in a task of its own.

        Raises: RuntimeClosedError: trio's loop has ended.
        """
        self.done: Future[None] = thread.make_future()  # resolved once there is a value or an error
        self._thread = thread
        self._function: Callable[[], Any] | None = function
        self._scope = trio.CancelScope()
        if not thread.run_soon(self._start):
            raise RuntimeClosedError(CLOSED)

    async def result(self) -> T:
        """Wait, and return the value. Raises: the error. An interruption leaves the function running."""
        await self._thread.wait(self.done)
        return self.result_now()

    def result_now(self) -> T:
        """The value, once the function has returned. Raises: the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # None is a T then

    def cancel(self) -> None:
        """Cancel the coroutine soon; harmless once it is done. For any thread."""
        self._thread.run_soon(self._scope.cancel)

    def _start(self) -> None:
        assert self._function is not None
        function, self._function = self._function, None
        try:
            started = function()
        except Exception as error:  # for the caller; raised from here, it would end trio's loop
            self.error = error
        else:
            if inspect.iscoroutine(started):
                if not self._thread.has_left:
                    self._thread.nursery.start_soon(self._run, started)
                    return
                started.close()
                self.error = RuntimeClosedError(CLOSED)
            else:
                self.value = started
        self._thread.resolve(self.done)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.error = RuntimeClosedError("the runtime was closed before this call finished; open another")
        try:
            with self._scope:
                self.value = await coroutine
                self.error = None
        except Exception as error:  # for the caller, too
            self.error = error
        finally:
            self._thread.resolve(self.done)


@attrs.frozen(eq=False)
class Portal:
    """A caller's access to a runtime in trio's thread.

    The thread stops once the portal is dropped: the handles refer to it, and nothing in trio's thread does.
    """

    thread: TrioThread
    runtime: Runtime

    def __del__(self) -> None:
        self.thread.stop()

    async def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call an async function in trio's thread, and wait for its result.

        Raises: as the function, and WrongEventLoopError, RuntimeClosedError, RuntimeBrokenError.

        Cancellation: cancels the function, and is raised once that has ended; a second Ctrl-C is raised at once.
        """
        self.check_open()
        call = Call[T](self.thread, function)
        interruption: BaseException | None = None
        while not call.done.done():
            try:
                await self.thread.wait(call.done)
            except BaseException as error:
                # Once for each cancellation: anyio cancels a task again in every pass of the loop.
                call.cancel()
                is_second = interruption is not None and isinstance(error, KeyboardInterrupt)
                if is_second or isinstance(error, GeneratorExit):
                    raise
                interruption = error
        if interruption is not None:
            raise interruption
        return await call.result()

    def check_open(self) -> None:
        """Raises: WrongEventLoopError: this is not the caller's event loop; otherwise as `Runtime.check_open`."""
        self.thread.check_caller()
        self.runtime.check_open()
