"""Readings: what sequences of a trained drafter compute to read their tokens, in passes that several can share.

A reading is a generator that yields its part in a forward pass, is sent the result, and returns what was read. So a
sequence says its order once, whether it is fed alone or with others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

import attrs

T = TypeVar("T")
P = TypeVar("P")


class SharedPass(ABC, Generic[P]):
    """A forward pass of a drafter that texts can share; P is one text's part in it."""

    depth = 0  # passes of less depth run first, so that texts which need both share more of them

    def alone(self, part: P) -> Any:
        """The result of one text's part, lazy."""
        return self.together([part])[0]

    @abstractmethod
    def together(self, parts: Sequence[P]) -> Sequence[Any]:
        """The result of each part, lazy; in one pass, as far as the texts can share one."""

    def begin_feed(self) -> None:
        """Begin what `abandon` undoes."""

    def abandon(self) -> None:
        """Empty the caches of all texts that shared this pass since `begin_feed`, because one has failed."""


@attrs.frozen(eq=False)
class ReadingPart(Generic[P]):
    """One text's part in a pass."""

    of: SharedPass[P]
    inputs: P


SharedReading = Generator[ReadingPart[Any], Any, T]


def read_alone(reading: SharedReading[T]) -> T:
    """Compute a reading by passes of its own. Returns: what it returns."""
    result = None
    while True:
        try:
            part = reading.send(result)
        except StopIteration as end:
            found: T = end.value
            return found
        result = part.of.alone(part.inputs)


def read_together(readings: Sequence[SharedReading[T]]) -> list[T]:
    """Compute readings, each pass for all that need it by then. Returns: what each returns."""
    found: dict[int, T] = {}
    parts: dict[int, ReadingPart[Any]] = {}

    def send(index: int, result: Any) -> None:
        try:
            parts[index] = readings[index].send(result)
        except StopIteration as end:
            found[index] = end.value

    for index in range(len(readings)):
        send(index, None)
    while parts:
        first = min((part.of for part in parts.values()), key=lambda each: each.depth)
        taken = {index: parts.pop(index).inputs for index in [*parts] if parts[index].of is first}
        for index, result in zip(taken, first.together([*taken.values()]), strict=True):
            send(index, result)
    return [found[index] for index in range(len(readings))]
