"""Shared jobs: sessions whose work waits for one worker have it done together, in one job.

The task of one of the sessions leads: it hands the worker a job for those that wait. Once that is over, the task of a
session that still waits leads the next one.
"""

from __future__ import annotations

import abc
import threading
from typing import Any, Generic, TypeVar

import attrs
import outcome
import trio

T = TypeVar("T")


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
    """The entries that wait for a job."""

    def __init__(self) -> None:
        """Make an empty queue."""
        self._waiting: list[EntryT] = []
        self._is_led = False
        # Held wherever the worker's thread may take entries.
        self._lock = threading.Lock()

    @abc.abstractmethod
    async def _lead(self, leader: EntryT) -> None:
        """Run one job, with entries that wait, and end those. May raise if it has taken none."""

    def _interrupt(self, entry: EntryT) -> None:
        """End the part of an entry that a job has taken as soon as the job allows. Harmless once it is over."""

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
