"""A pool of operating-system threads that workers run on.

A thread that has evaluated on CPU leaves a native thread of MLX's behind, which nothing ends. So threads are reused.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable

import mlx.core as mx
import outcome

logger = logging.getLogger("outrider")

IDLE = "idle thread of outrider's pool"  # the name of one
JOIN_TIMEOUT_S = 5.0  # seconds that the end of the process waits for one thread. An idle one takes a millisecond.

Work = Callable[[], None]
OnEnd = Callable[[outcome.Outcome[None]], None]


class PooledThread:
    """A thread that does one piece of work after another. A piece may take as long as a runtime lives."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Work, OnEnd] | None] = queue.SimpleQueue()
        self._is_abandoned = False
        # A daemon, since a thread that hangs in a model must not keep the process from ending. `_join_threads` ends
        # the others in order: a thread that is in MLX when the interpreter exits may abort the process.
        self._thread = threading.Thread(target=self._run, name=IDLE, daemon=True)
        self._thread.start()

    def start(self, name: str, work: Work, on_end: OnEnd) -> None:
        """Give the thread, which must be idle, a piece of work."""
        self._thread.name = name
        self._work.put((work, on_end))

    def end(self) -> None:
        """End the thread once its work is done, which is waited for `JOIN_TIMEOUT_S` at most."""
        self._work.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    def abandon(self) -> None:
        """End the thread once its work is done, if ever. The end of the process waits at most `JOIN_TIMEOUT_S`."""
        with _lock:
            self._is_abandoned = True
            _abandoned.append(self)
        self._work.put(None)

    def _run(self) -> None:
        try:
            while (given := self._work.get()) is not None:
                work, on_end = given
                # Computations that the work has launched end before the next piece begins.
                result = outcome.capture(work)
                synchronized = outcome.capture(mx.synchronize)
                if isinstance(result, outcome.Value):
                    result = synchronized
                self._thread.name = IDLE
                if isinstance(result, outcome.Error):
                    # The thread's state is unknown, so it takes no other work. The end of the process waits until its
                    # streams are released.
                    with _lock:
                        _abandoned.append(self)
                    on_end(result)
                    return
                # Give the thread back before announcing the end, so that a runtime opened in response finds it.
                with _lock:
                    if not self._is_abandoned:
                        _idle.append(self)
                on_end(result)
                del given, work, on_end, result, synchronized  # an idle thread must keep no arrays alive
        finally:
            release_streams()


def release_streams() -> None:
    """Release MLX's streams at the end of the calling thread: otherwise the process may abort as it exits."""
    try:
        mx.synchronize()
    except RuntimeError as error:  # MLX's, of a device that has failed; the work that used it has ended with it
        logger.debug("a thread ends while its device fails: %s", error)
    finally:
        mx.clear_streams()


_idle: list[PooledThread] = []
_abandoned: list[PooledThread] = []
_lock = threading.Lock()


def run_on_thread(name: str, work: Work, on_end: OnEnd) -> PooledThread:
    """Run a piece of work on an idle thread, or on a new one, with a name meanwhile. `on_end` is called on that thread
    with the outcome; must not raise. Returns: the thread, which another worker may have later, unless the work raises.
    """
    with _lock:
        thread = _idle.pop() if _idle else None
    thread = thread or PooledThread()
    thread.start(name, work, on_end)
    return thread


@atexit.register
def _join_threads() -> None:
    with _lock:
        threads = [*_idle, *_abandoned]
        _idle.clear()
        _abandoned.clear()
    for thread in threads:
        thread.end()


# A child process has none of its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_abandoned.clear)
