"""The cores that the models' threads share, for a BLAS with threads of its own.

Two models that compute at once are fastest with half the cores each. Idle threads of OpenBLAS wait for work in a loop,
and keep cores from another model. So a model gets all cores only after it has been alone for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds after which a model that computes alone is given all cores: as long as several passes, so that it does not get
# them between the rounds of one text. OpenBLAS's threads wait in a loop for some 0.03 s.
ALONE_AFTER_S = 0.05


class CoreSharing:
    """Tells a BLAS how many threads to use, by how many models compute. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._set_threads: Callable[[int], None] | None = None
        self._num_cores = self._num_threads = 1
        self.num_computing = 0  # how many models compute now
        # How many models computed at once when it was last more than one, and until when.
        self._num_shared, self._shared_until = 1, -float("inf")

    @property
    def hold_s(self) -> float:
        """Seconds after which a model that computes alone is given all cores; 0 if the number of threads stays."""
        return 0.0 if self._set_threads is None or self._num_cores < 2 else ALONE_AFTER_S

    def control(self, set_threads: Callable[[int], None], num_cores: int) -> None:
        """Control the number of threads of the process: `set_threads` sets it, on any thread, one call at a time."""
        with self._lock:
            self._set_threads, self._num_cores, self._num_threads = set_threads, num_cores, 0
            self._update()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the calling thread computes with a model."""
        with self._lock:
            self.num_computing += 1
            self._update()
        try:
            yield
        finally:
            with self._lock:
                if self.num_computing > 1:
                    self._shared_until = self._clock()
                self.num_computing -= 1

    def update(self) -> None:
        """Give a model all cores that has been alone for a while; to be called in the middle of long jobs."""
        if self._set_threads is not None and self._num_threads < self._num_cores:
            with self._lock:
                self._update()

    def _update(self) -> None:
        if self._set_threads is None:
            return
        if self.num_computing > 1:
            self._num_shared = self.num_computing
        elif self._clock() - self._shared_until > ALONE_AFTER_S:
            self._num_shared = 1
        num_threads = max(1, self._num_cores // self._num_shared)
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            self._set_threads(num_threads)


CORES = CoreSharing()  # the number of threads of a BLAS is the whole process's
