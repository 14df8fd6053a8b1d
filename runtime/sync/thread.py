"""A trio thread for callers in plain threads, which block for its results."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from runtime.bridge.call import BridgeCall
from runtime.bridge.trio_thread import BridgeFuture, TrioThread

T = TypeVar("T")


class BlockingFuture(Generic[T]):
    """A result that threads block for.

    Setting the result takes no lock that a waiting thread could hold, so that a Ctrl-C in the middle of `wait` leaves
    no lock held. `threading.Event` and `concurrent.futures.Future` are written in Python and do not guarantee that.
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


class SyncThread(TrioThread[T]):
    """A trio thread that one thread starts, and any thread uses and stops.

    It ends by itself once the main thread has ended.
    """

    def start(self) -> T:
        """Start, and block until the context manager has been entered.

        Raises: what entering it raises.

        Interrupting: a Ctrl-C stops the thread, and is raised once it has ended.
        """
        try:
            self._thread.start()
            wait_result(self._started)
        except BaseException:
            # Also a Ctrl-C before the thread runs: it will see that it is stopping.
            self.stop()
            if self._thread.is_alive():
                self._stop_and_wait()
            raise
        if self._ended.done():
            self._stop_and_wait()
            self._raise_failure()
        return self._value

    def stop_and_join(self) -> None:
        """Leave the context manager, and block until the thread has ended; harmless if it has ended.

        Raises: what leaving it raises.

        Interrupting: the thread is joined in any case; a Ctrl-C is raised after that.
        """
        self._stop_and_wait()
        self._raise_failure()

    def make_future(self) -> BridgeFuture[Any]:
        return BlockingFuture[Any]()

    def _stop_and_wait(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self.stop()
                wait_result(self._ended)
                # Soon over: the thread only has to return.
                self._thread.join()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    # --- in the trio thread -----------------------------------------------------------------------

    def _deliver(self, future: BridgeFuture[Any], value: object) -> bool:
        if not future.done():
            future.set_result(value)
        return True

    def _has_callers(self) -> bool:
        # At its exit, the interpreter joins this thread, after the main thread has ended.
        return threading.main_thread().is_alive()


def wait_result(future: BridgeFuture[T]) -> T:
    """Block for the result of a future of a `SyncThread`."""
    assert isinstance(future, BlockingFuture)
    result: T = future.wait()
    return result


def call_result(call: BridgeCall[T]) -> T:
    """Block for the result of a call in the trio thread, or raise its exception.

    Interrupting: a Ctrl-C cancels the call, and is raised once the call has ended; a second one is raised at once.
    """
    try:
        wait_result(call.done)
    except BaseException:
        call.cancel()
        wait_result(call.done)
        raise
    return call.result()
