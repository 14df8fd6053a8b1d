"""Shared jobs: sessions whose work waits for one worker have it done together, in one job.

The task of one of the sessions leads: it hands the worker a job for those that wait. Once that is over, the task of a
session that still waits leads the next one.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import outcome
import trio

from actors.workers.worker import JobError
from protocol.backoff import SharingLimit

T = TypeVar("T")


@attrs.define(eq=False)
class Suspects:
    """The entries that may have made a job fail, each of which is repeated alone.

    One that fails alone was the cause. If none does, all of them together were too much.

    Attributes:
        num_left: entries that have not succeeded alone.
    """

    num_left: int
    _on_all_acquitted: Callable[[], None]

    def acquit(self) -> None:
        """Count an entry that has succeeded alone."""
        self.num_left -= 1
        if self.num_left == 0:
            self._on_all_acquitted()


class SharedJobError(JobError):
    """A job of several entries failed, and it is not known because of which.

    Attributes:
        suspects: the entries that may have been the cause; None for an entry that is none of them.
    """

    def __init__(self, error: JobError, suspects: Suspects | None) -> None:
        super().__init__(*error.args)
        self.__cause__ = error.__cause__
        self.suspects = suspects


@attrs.define(eq=False)
class SharedJobEntry(Generic[T]):
    """One session's part in a job that others may share."""

    _end: outcome.Outcome[T] | None = attrs.field(default=None, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    @property
    def is_over(self) -> bool:
        """Whether it has its result."""
        return self._end is not None

    def end(self, result: outcome.Outcome[T]) -> None:
        """Give it its result, and wake its task. The first result stands."""
        if self._end is None:
            self._end = result
            self.wake()

    def result(self) -> T:
        """Return its result, or raise the error that ended it. `is_over` must be true."""
        assert self._end is not None
        return self._end.unwrap()

    def wake(self) -> None:
        """Have its task look at the queue again."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for a `wake` since the last call."""
        await self._changed.wait()
        self._changed = trio.Event()


EntryT = TypeVar("EntryT", bound=SharedJobEntry[Any])


class SharedJobQueue(abc.ABC, Generic[EntryT]):
    """The entries that wait for a job.

    Attributes:
        num_shared: most entries in one job; 1 once it is known that texts of the model cannot share passes.
    """

    def __init__(self, max_batch: int) -> None:
        """Make an empty queue.

        Args:
            max_batch: most entries in one job, >= 1.
        """
        self.num_shared = max_batch
        self._limit = SharingLimit()
        self._waiting: list[EntryT] = []
        self._is_led = False
        # Held wherever the worker's thread may take entries.
        self._lock = threading.Lock()

    @abc.abstractmethod
    async def _lead(self, leader: EntryT) -> None:
        """Run one job, with entries that wait, and end those. May raise if it has taken none."""

    def _interrupt(self, entry: EntryT) -> None:
        """End the part of an entry that a job has taken as soon as the job allows. Harmless once it is over."""

    @property
    def _most(self) -> int:
        """Most entries in the next job."""
        return min(self.num_shared, self._limit.value)

    def _failures(self, error: JobError, are_suspects: Sequence[bool]) -> list[JobError]:
        """The error of each entry of a job that failed.

        Args:
            error: of the job.
            are_suspects: whether each entry may have been the cause; some are.
        """
        if len(are_suspects) == 1:
            return [error]
        suspects = Suspects(sum(are_suspects), partial(self._limit.halve, len(are_suspects)))
        return [SharedJobError(error, suspects if is_suspect else None) for is_suspect in are_suspects]

    def _add(self, entry: EntryT) -> None:
        with self._lock:
            self._waiting.append(entry)

    async def _until_over(self, entry: EntryT) -> None:
        """Wait for an entry's end, leading jobs while nobody else does.

        Cancellation: an entry that no job has taken is taken back. One that a job has taken is interrupted, and its end
            is waited for.
        """
        try:
            while not entry.is_over:
                if self._is_led:
                    await self._wait(entry)
                    continue
                self._is_led = True
                self._limit.count_job()
                try:
                    await self._lead(entry)
                finally:
                    self._is_led = False
        finally:
            self._take_back(entry)
            if not self._is_led and self._waiting:
                self._waiting[0].wake()

    async def _wait(self, entry: EntryT) -> None:
        """Wait until the entry is over, or its task has to lead."""
        try:
            await entry.change()
        except trio.Cancelled:
            if self._take_back(entry):
                raise
            self._interrupt(entry)
            with trio.CancelScope(shield=True):
                while not entry.is_over:
                    await entry.change()

    def _take_back(self, entry: EntryT) -> bool:
        """Take back an entry. Returns: whether no job had taken it."""
        with self._lock:
            if entry not in self._waiting:
                return False
            self._waiting.remove(entry)
            return True
