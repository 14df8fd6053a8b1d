"""The operating-system threads that workers run on, kept for the next worker.

A thread that has evaluated on CPU leaves a native thread of MLX's behind when it ends, and nothing ends that one. So a
process that opens many runtimes, one after another, runs all of them on the same few threads.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable

import mlx.core as mx
import outcome

# What an idle thread is called.
IDLE = "idle thread of outrider's pool"
# Seconds that the end of the process waits for one thread. An idle one takes a millisecond.
JOIN_TIMEOUT_S = 5.0

Work = Callable[[], None]
OnEnd = Callable[[outcome.Outcome[None]], None]


class PooledThread:
    """A thread that does one piece of work after another, each of which may take as long as a runtime lives."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Work, OnEnd] | None] = queue.SimpleQueue()
        self._is_left = False
        # A daemon, since a thread that hangs in a model must not keep the process from ending. The others are ended in
        # order by `_join_threads`: one that is in MLX when the interpreter exits may abort the process.
        self._thread = threading.Thread(target=self._run, name=IDLE, daemon=True)
        self._thread.start()

    def start(self, name: str, work: Work, on_end: OnEnd) -> None:
        """Have the thread do a piece of work; only while it is idle."""
        self._thread.name = name
        self._work.put((work, on_end))

    def end(self) -> None:
        """Have the thread end once its work is done, and wait for that, but not for long."""
        self._work.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    def leave_to_itself(self) -> None:
        """Have the thread end once its work is done, if that is ever; the end of the process waits a moment for it."""
        with _lock:
            self._is_left = True
            _left.append(self)
        self._work.put(None)

    def _give_back(self) -> None:
        with _lock:
            if not self._is_left:
                _idle.append(self)

    def _run(self) -> None:
        try:
            while (given := self._work.get()) is not None:
                work, on_end = given
                # All that the work left to be computed is done before the next begins.
                result = outcome.capture(work)
                synchronized = outcome.capture(mx.synchronize)
                if isinstance(result, outcome.Value):
                    result = synchronized
                self._thread.name = IDLE
                if isinstance(result, outcome.Error):
                    # What it was in the middle of, nobody knows: no other work shall meet that.
                    on_end(result)
                    return
                # Idle before that is said: whoever opens another runtime then finds this thread.
                self._give_back()
                on_end(result)
                del given, work, on_end, result, synchronized  # and with them what they refer to
        finally:
            release_streams()


def release_streams() -> None:
    """Have MLX let go of the calling thread, at its end.

    Otherwise a process in whose threads MLX was used, or imported, may abort as it exits.
    """
    try:
        mx.synchronize()
    finally:
        mx.clear_streams()


_idle: list[PooledThread] = []
_left: list[PooledThread] = []
_lock = threading.Lock()


def run_on_thread(name: str, work: Work, on_end: OnEnd) -> PooledThread:
    """Do a piece of work on an idle thread, or on a new one where there is none.

    Args:
        name: of the thread, for as long as it does the work.
        work: what to do. If it raises, the thread is not used again.
        on_end: called on that thread with the outcome; must not raise.

    Returns: the thread, which is somebody else's once the work is done.
    """
    with _lock:
        thread = _idle.pop() if _idle else None
    thread = thread or PooledThread()
    thread.start(name, work, on_end)
    return thread


@atexit.register
def _join_threads() -> None:
    with _lock:
        threads = [*_idle, *_left]
        _idle.clear()
        _left.clear()
    for thread in threads:
        thread.end()


# A child process has none of its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_left.clear)
