"""A trio loop in a thread of its own, for callers in other threads: how they call async functions in it, and how items
cross from it.

Why a thread and not trio's guest mode: in a thread, trio's tasks and the tokenising of a prompt never block the
callers, and neither event loop has to handle the other's signals or shutdown.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, TypeVarTuple

import outcome
import trio

from protocol.errors import RuntimeClosedError
from runtime.engine.nursery import BackgroundNursery

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

# Seconds between two checks whether the callers still exist: a closed event loop notifies nobody.
CALLER_CHECK_INTERVAL_S = 0.2


class BridgeFuture(Protocol[T]):
    """A result that a caller waits for and the trio thread sets, such as an `asyncio.Future`."""

    def done(self) -> bool:
        """Whether the result was set."""
        ...

    def result(self) -> T:
        """The result; only after `done`."""
        ...

    def set_result(self, result: T, /) -> None:
        """Set the result; once."""
        ...


class TrioThread(ABC):
    """A thread that runs a trio loop and holds one async context manager open in it: an open runtime.

    Subclasses say how callers wait: `AioThread` for an asyncio loop, `SyncThread` for plain threads, whose coroutines
    block. The thread ends by itself soon after its callers are gone.
    """

    interruption: ClassVar[type[BaseException]]  # what a caller that waits is cancelled or interrupted with
    nursery: trio.Nursery  # for background tasks; cancelled after the context manager was left
    _value: Runtime

    def __init__(self, make_manager: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        """The thread is not started yet. `make_manager` is called in the trio loop."""
        self._make_manager = make_manager
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._is_stopping = False
        self._is_entered = False
        self._is_exit_requested = trio.Event()
        self._started: BridgeFuture[None] = self.make_future()
        self._ended: BridgeFuture[None] = self.make_future()
        self._outcome: outcome.Outcome[None] = outcome.Value(None)
        # Not a daemon: it owns the models' threads, and a forward pass at the interpreter's exit aborts the process.
        self._thread = threading.Thread(target=self._run, name="outrider-trio", daemon=False)

    @abstractmethod
    def make_future(self) -> BridgeFuture[Any]:
        """A future for the calling thread."""

    @abstractmethod
    async def wait(self, future: BridgeFuture[T]) -> T:
        """The result of a future. An interruption leaves the future as it is: others may be waiting for it, too."""

    async def start(self) -> Runtime:
        """Start, and wait until the context manager has been entered. Raises: what entering it raises.

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
        return self._value

    async def stop_and_join(self) -> None:
        """Leave the context manager, and wait for the thread's end; harmless if it has. Raises: what entering or
        leaving raises.

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

    # --- in any thread ----------------------------------------------------------------------------

    def run_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function in the trio loop; functions run in the order of these calls. It must not raise.

        Raises: trio.RunFinishedError: the loop has ended, and the function will not be called.
        """
        assert self._token is not None, "not started"
        self._token.run_sync_soon(function, *args)

    def stop(self) -> None:
        """Start to leave the context manager; harmless if the thread is leaving or has ended."""
        self._is_stopping = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._request_exit)

    # --- in the trio thread -----------------------------------------------------------------------

    def resolve(self, future: BridgeFuture[Any], value: object) -> None:
        """Set a future's result, unless nobody waits for it any more."""
        if not self._deliver(future, value):
            self.stop()

    @abstractmethod
    def _deliver(self, future: BridgeFuture[Any], value: object) -> bool:
        """Set a future's result; results arrive in the order of the calls. False if there are no callers any more."""

    @abstractmethod
    def _has_callers(self) -> bool:
        """Whether anybody can still use the context manager's value."""

    def _run(self) -> None:
        self._outcome = outcome.capture(trio.run, self._main)
        if "mlx.core" in sys.modules:  # it may have been imported in this thread
            import_module("actors.workers.thread_pool").release_streams()
        # In this order: a caller that waits for the start then finds that the thread has ended.
        self.resolve(self._ended, None)
        self.resolve(self._started, None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # The nursery is outside: background tasks first see the context manager close, and then their cancellation.
        async with BackgroundNursery() as self.nursery:
            self.nursery.start_soon(self._stop_without_callers)
            with self._scope:
                if self._is_stopping:
                    self._scope.cancel()
                async with self._make_manager() as self._value:
                    self.resolve(self._started, None)
                    self._is_entered = True
                    await self._is_exit_requested.wait()

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


class BridgeCall(Generic[T]):
    """A call of an async function in the trio thread, made by a caller elsewhere.

    Attributes:
        done: resolved once the function has returned, raised or been cancelled.
    """

    def __init__(
        self, thread: TrioThread, check_open: Callable[[], None], function: Callable[[], Awaitable[T]]
    ) -> None:
        """Functions start soon, in the order of the calls, after `check_open`, which raises if the runtime was closed.

        Raises: trio.RunFinishedError: the trio thread has ended.
        """
        self._thread = thread
        self._check_open = check_open
        self._function = function
        self._outcome: outcome.Outcome[T] = outcome.Error(
            RuntimeClosedError("the runtime was closed before this call finished; open another")
        )
        self._scope = trio.CancelScope()
        self.done: BridgeFuture[None] = thread.make_future()
        thread.run_soon(self._start)

    def result(self) -> T:
        """The function's result, or its exception; call once, after `done`."""
        return self._outcome.unwrap()

    def cancel(self) -> None:
        """Cancel the function soon; harmless once it is done. For any thread."""
        with suppress(trio.RunFinishedError):
            self._thread.run_soon(self._scope.cancel)

    def _start(self) -> None:
        # An exception is for the caller; raised from here, it would end the trio loop.
        checked = outcome.capture(self._check_open)
        if isinstance(checked, outcome.Error):
            self._outcome = checked
            self._thread.resolve(self.done, None)
        else:
            self._thread.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                self._outcome = outcome.Value(await self._function())
        except Exception as error:  # for the caller, too
            self._outcome = outcome.Error(error)
        finally:
            self._thread.resolve(self.done, None)


class Source(Protocol[T_co]):
    """Where the items of a bridge stream come from; used in the trio thread."""

    async def receive(self) -> Sequence[T_co]:
        """Wait for an item, and return all that have arrived; none at the end. A cancellation takes none."""
        ...

    def drain(self) -> Sequence[T_co]:
        """All items that have arrived, without waiting. Called once, at the end."""
        ...

    def close(self) -> None:
        """Stop the source, so that no further items arrive. Never waits; closing again does nothing."""
        ...


S = TypeVar("S", bound=Source[Any])


class BridgeStream(Generic[S, T]):
    """A stream of items from a source in the trio thread to one consumer in another thread.

    Items are received only on request, so that a slow consumer slows the source down as a consumer in trio would. One
    request brings all items that have arrived since the last one.

    Attributes:
        opened: resolved once the source was made, or could not be.
        source: the source, once it was made.
        failure: what making the source raised, if it did.
        is_over: nothing more comes: the source is closed, could not be made, or trio's thread has ended.
    """

    def __init__(self, thread: TrioThread, make_source: Callable[[], S]) -> None:
        """Sources are made soon, in the trio thread, in the order of the calls; making one never waits.

        Raises: trio.RunFinishedError: the trio thread has ended.
        """
        self.source: S | None = None
        self.failure: BaseException | None = None
        self.is_over = False
        self._thread = thread
        self._make_source: Callable[[], S] | None = make_source
        self.opened: BridgeFuture[None] = thread.make_future()
        self._scope = trio.CancelScope()
        self._is_requested = trio.Event()
        self._reply: BridgeFuture[Sequence[T]] | None = None
        self._leftover_items: Sequence[T] = ()
        thread.run_soon(self._open)

    def request_items(self) -> BridgeFuture[Sequence[T]]:
        """A future for the items since the last request: one or more, or none at the end. A consumer that abandons it
        loses them.
        """
        reply: BridgeFuture[Sequence[T]] = self._thread.make_future()
        try:
            self._thread.run_soon(self._accept_request, reply)
        except trio.RunFinishedError:
            reply.set_result(self._take_leftover_items())
        return reply

    def close(self) -> None:
        """Stop the source soon; harmless once the stream is over. For any thread."""
        with suppress(trio.RunFinishedError):
            self._thread.run_soon(self._close)

    # --- in the trio thread -----------------------------------------------------------------------

    def _open(self) -> None:
        assert self._make_source is not None
        # An exception is for the consumer; raised from here, it would end the trio loop.
        made = outcome.capture(self._make_source)
        self._make_source = None
        if isinstance(made, outcome.Error):
            self.failure, self.is_over = made.error, True
        else:
            self.source = made.unwrap()
            self._thread.nursery.start_soon(self._answer_requests, self.source)
        self._thread.resolve(self.opened, None)

    def _accept_request(self, reply: BridgeFuture[Sequence[T]]) -> None:
        self._reply = reply
        if self.is_over:
            self._send(self._take_leftover_items())
        else:
            self._is_requested.set()

    def _close(self) -> None:
        self._scope.cancel()
        if self.source is not None:
            # Now, and not when the task is cancelled: the consumer's next call may rely on the source being closed.
            self.source.close()

    async def _answer_requests(self, source: S) -> None:
        try:
            with self._scope:
                items: Sequence[T] | None = None
                while items is None or items:
                    await self._is_requested.wait()
                    self._is_requested = trio.Event()
                    items = await source.receive()
                    self._send(items)
        finally:
            self.is_over = True
            self._leftover_items = source.drain()
            source.close()
            if self._reply is not None:
                self._send(self._take_leftover_items())

    def _send(self, items: Sequence[T]) -> None:
        reply, self._reply = self._reply, None
        assert reply is not None
        self._thread.resolve(reply, items)

    def _take_leftover_items(self) -> Sequence[T]:
        items, self._leftover_items = self._leftover_items, ()
        return items
