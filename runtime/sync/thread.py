"""A trio loop in a thread of its own, for plain threads that wait for what they want of it."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import outcome

from runtime.bridge.call import BridgeCall
from runtime.bridge.trio_thread import Promise, TrioThread

T = TypeVar("T")


class BlockingPromise(Generic[T]):
    """A result that threads block for.

    Giving the result takes no lock that a waiting thread could hold. A Ctrl-C in the middle of `wait` leaves nothing
    locked; `threading.Event` and `concurrent.futures.Future`, which are written in Python, cannot promise that.
    """

    def __init__(self) -> None:
        self._results: list[T] = []  # none or one
        self._waiting: list[threading.Lock] = []

    def done(self) -> bool:
        """See `Promise.done`."""
        return bool(self._results)

    def result(self) -> T:
        """See `Promise.result`."""
        return self._results[0]

    def set_result(self, result: T, /) -> None:
        """See `Promise.set_result`."""
        self._results.append(result)
        for lock in self._waiting:
            lock.release()

    def wait(self) -> T:
        """Block until there is a result, and return it; a Ctrl-C in the main thread ends the waiting."""
        lock = threading.Lock()
        lock.acquire()
        # In this order: whoever gives the result after the second line finds the lock to release.
        self._waiting.append(lock)
        if not self._results:
            lock.acquire()
        return self._results[0]


class SyncThread(TrioThread[T]):
    """Started by one thread, and used and ended by any. It ends by itself once the main thread has ended."""

    def start(self) -> T:
        """Start, and block until the context manager has been entered.

        Raises: what entering it raises.

        Interrupting: a Ctrl-C ends it, and is raised once that is done.
        """
        try:
            self._thread.start()
            settled(self._started)
        except BaseException:
            # Whatever interrupts the start. A thread that has not begun yet will see that it is to stop.
            self.stop()
            if self._thread.is_alive():
                self._over()
            raise
        if self._ended.done():
            self._over()
            self._raise_failure()
        return self._value

    def end(self) -> None:
        """Leave the context manager, and block until the thread has ended; harmless where that is done.

        Raises: what leaving it raises.

        Interrupting: it goes on to the end in any case, and then a Ctrl-C is raised.
        """
        self._over()
        self._raise_failure()

    def promise(self) -> Promise[Any]:
        """See `TrioThread.promise`; a `BlockingPromise`."""
        return BlockingPromise[Any]()

    def _over(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self.stop()
                settled(self._ended)
                # All that is left of the thread by now is its return.
                self._thread.join()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _raise_failure(self) -> None:
        if isinstance(self._outcome, outcome.Error):
            raise self._outcome.error

    # --- in the thread ----------------------------------------------------------------------------

    def _deliver(self, promise: Promise[Any], value: object) -> bool:
        if not promise.done():
            promise.set_result(value)
        return True

    def _has_callers(self) -> bool:
        # At the interpreter's exit, this thread is waited for.
        return threading.main_thread().is_alive()


def settled(promise: Promise[T]) -> T:
    """Block for the result of a promise of a `SyncThread`."""
    assert isinstance(promise, BlockingPromise)
    result: T = promise.wait()
    return result


def result_of(errand: BridgeCall[T]) -> T:
    """Block for what comes of an errand.

    Interrupting: a Ctrl-C reaches what is done, and is raised once that has ended; a second one does not wait for that.
    """
    try:
        settled(errand.done)
    except BaseException:
        errand.cancel()
        settled(errand.done)
        raise
    return errand.result()
