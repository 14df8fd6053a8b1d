"""Contests: contenders take turns on the same cases, so that disturbances of the machine hit all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import attrs

C = TypeVar("C", bound=Hashable)  # contenders
K = TypeVar("K", bound=Hashable)  # cases
R = TypeVar("R")  # runs


@attrs.frozen
class Step(Generic[C, K]):
    """A run that is due."""

    contender: C
    case: K
    repeat: int | None  # from 0 on; None for a run that warms up and does not count
    progress: str  # for a progress line: which run it is of how many, and the time left


@attrs.define
class Contest(Generic[C, K, R]):
    """A contest, and its runs so far. It may be stopped at any step: the turns that are complete by then count.

    Attributes:
        warm_up: cases that each contender runs first, to build kernels and buffers, and to measure first prices.
        size: size of a case, for the estimate of the time left.
        turns: runs by (repeat, case); a turn that was interrupted lacks some.
        failures: why a contender cannot run. The others go on.
    """

    contenders: Sequence[C]
    cases: Sequence[K]
    repeats: int = 1
    warm_up: Sequence[K] = ()
    takes_part: Callable[[C, K], bool] = lambda _contender, _case: True
    size: Callable[[K], float] = lambda _case: 1.0
    turns: dict[tuple[int, K], dict[C, R]] = attrs.field(factory=dict)
    failures: dict[C, str] = attrs.field(factory=dict)

    def contenders_of(self, case: K) -> list[C]:
        """The contenders that run a case."""
        return [contender for contender in self.contenders if self.takes_part(contender, case)]

    def steps(self) -> Iterator[Step[C, K]]:
        """What is due, in order. The caller runs each step, and calls `record` or `fail`."""
        turns: list[tuple[int | None, K]] = [(None, case) for case in self.warm_up]
        turns += [(repeat, case) for repeat in range(self.repeats) for case in self.cases]
        sizes = [len(self.contenders_of(case)) * self.size(case) for _, case in turns]
        total, num_runs = sum(sizes), sum(len(self.contenders_of(case)) for _, case in turns)
        began, done, number = time.perf_counter(), 0.0, 0
        for place, (repeat, case) in enumerate(turns):
            order = self.contenders_of(case)
            if repeat is not None:
                order = running_order(order, place - len(self.warm_up))
                self.turns.setdefault((repeat, case), {})
            for contender in order:
                number += 1
                if contender not in self.failures:
                    left = time_left(time.perf_counter() - began, done, total)
                    yield Step(contender, case, repeat, f"{number} of {num_runs} runs{left}")
                done += self.size(case)

    def record(self, step: Step[C, K], run: R) -> None:
        """Note the run of a step."""
        if step.repeat is not None:
            self.turns[step.repeat, step.case][step.contender] = run

    def fail(self, step: Step[C, K], why: str) -> None:
        """Note that a contender cannot run."""
        self.failures[step.contender] = why

    @property
    def complete(self) -> dict[tuple[int, K], dict[C, R]]:
        """The turns in which every contender has run that can. An incomplete turn would favour some."""
        return {
            (repeat, case): turn
            for (repeat, case), turn in self.turns.items()
            if turn and all(each in turn for each in self.contenders_of(case) if each not in self.failures)
        }

    @property
    def is_complete(self) -> bool:
        """Whether everything was measured."""
        return len(self.complete) == self.repeats * len(self.cases)

    @property
    def repeats_done(self) -> int:
        """Number of repeats in the figures; the last may have only some of the cases."""
        return len({repeat for repeat, _ in self.complete})

    def runs(self, contender: C) -> dict[tuple[int, K], R]:
        """The runs of a contender in complete turns."""
        return {key: turn[contender] for key, turn in self.complete.items() if contender in turn}


T = TypeVar("T")


def running_order(contenders: Sequence[T], turn: int) -> list[T]:
    """The order of contenders in a turn: every second turn is reversed, and every two turns the start moves by one."""
    begin = turn // 2 % len(contenders)
    rotated = [*contenders[begin:], *contenders[:begin]]
    return rotated if turn % 2 == 0 else rotated[::-1]


def time_left(seconds: float, done: float, total: float) -> str:
    """Estimate of the time for the rest, as the end of a progress line; "" before anything is done."""
    if done == 0:
        return ""
    left = seconds / done * (total - done)
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
