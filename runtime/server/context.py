"""State that all requests of a server share: models, limits, admission, metrics and threads."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from runtime.server.answers.body import BodyMemory
from runtime.server.errors import ErrorResponse, short_json
from runtime.server.fair_threads import Background
from runtime.server.limits import Limits
from runtime.server.models.pool import ModelPool
from runtime.server.reports import Metrics

if TYPE_CHECKING:
    from runtime.server.answers.api import Choices

T = TypeVar("T")

# Bytes or characters of a body or prompt that is short: to read or tokenise it takes a few milliseconds.
SHORT = 2**14

# Long jobs that are done at once, and as many short ones, so that these do not wait for those.
_NUM_THREADS = 2

# How many of the latest durations are kept, to estimate when other requests will end.
_NUM_DURATIONS = 32
_MAX_RETRY_AFTER_S = 60


@attrs.define(eq=False)
class RequestAdmission:
    """Counts the admitted requests; rejects those beyond the limit, and all further ones once the server drains."""

    _max_streams: Callable[[], float]  # how many requests the models are assumed to work on at once, >= 1
    _max_waiting: int  # further requests that may wait, >= 0
    _clock: Callable[[], float]  # in seconds
    num_admitted: int = attrs.field(init=False, default=0)
    is_draining: bool = attrs.field(init=False, default=False)
    _is_empty: trio.Event = attrs.field(init=False, factory=trio.Event)
    _durations_s: deque[float] = attrs.field(init=False, factory=lambda: deque(maxlen=_NUM_DURATIONS))
    _start_times_s: list[float] = attrs.field(init=False, factory=list)  # of the admitted requests
    # When the client that was rejected last is expected to return.
    _last_return_s: float = attrs.field(init=False, default=-math.inf)

    def check(self) -> None:
        """Raises: ErrorResponse: no further request can be admitted now, or ever."""
        if self.is_draining:
            raise ErrorResponse(
                503,
                "the server is stopping and takes no new requests; ask another one, or this one once it runs again",
                code="draining",
                retry_after_s=1,  # behind a load balancer, the next attempt reaches another server
            )
        if self.num_admitted >= self._max_streams() + self._max_waiting:
            seconds = self.retry_after_s
            self._last_return_s = self._next_return_s()
            raise ErrorResponse(
                429,
                f"{self._max_streams()} requests are being answered and {self._max_waiting} wait, which is the limit; "
                f"try again in {seconds} s",
                code="rate_limit_exceeded",
                retry_after_s=seconds,
            )

    def drain(self) -> None:
        """Admit no further request; those that were admitted go on."""
        self.is_draining = True
        self._note_end()

    async def wait_drained(self) -> None:
        """Wait, after `drain`, until all admitted requests have ended."""
        await self._is_empty.wait()

    def _note_end(self) -> None:
        if self.is_draining and self.num_admitted == 0:
            self._is_empty.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Admit one request for the duration of the block. Raises: ErrorResponse: as `check`."""
        self.check()
        self.num_admitted += 1
        start_s = self._clock()
        self._start_times_s.append(start_s)
        is_rejected = False
        try:
            yield
        except ErrorResponse:
            is_rejected = True
            raise
        finally:
            self.num_admitted -= 1
            self._start_times_s.remove(start_s)
            if not is_rejected:  # a rejection takes no time and says nothing about the duration of answers
                self._durations_s.append(self._clock() - start_s)
            self._note_end()

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, at least 1, after which a rejected request is likely to find room.

        On average, a request ends every (mean duration / number of streams) seconds. Each rejected client is told a
        different one of these times, so that they do not all come back for the same place.
        """
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._next_return_s() - self._clock())))

    def _next_return_s(self) -> float:
        now = self._clock()
        mean = sum(self._durations_s) / len(self._durations_s) if self._durations_s else 1.0
        if ages := [now - start_s for start_s in self._start_times_s]:
            # The admitted requests will take at least as long as they have taken so far.
            mean = max(mean, sum(ages) / len(ages))
        interval_s = mean / self._max_streams()
        return min(now + _MAX_RETRY_AFTER_S, max(now, self._last_return_s) + interval_s)


@attrs.frozen(eq=False)
class ServerContext:
    """State that all requests of a server share."""

    models: ModelPool
    limits: Limits
    admission: RequestAdmission
    background: Background
    # Whether unknown fields, a `max_tokens` beyond the limit and, where only one model is served, the name of another
    # one are refused instead of ignored.
    is_strict: bool
    metrics: Metrics = attrs.Factory(
        lambda self: Metrics(self.models, is_draining=lambda: self.admission.is_draining), takes_self=True
    )
    body_memory: BodyMemory = attrs.Factory(lambda self: BodyMemory(self.limits.max_bodies_bytes), takes_self=True)
    started_at: int = attrs.Factory(lambda: int(time.time()))  # in seconds of Unix time
    running: dict[str, Choices] = attrs.field(init=False, factory=dict)  # unfinished answers, by ids of responses
    kept: dict[type, Any] = attrs.field(init=False, factory=dict)  # what APIs keep between requests, by its type
    _short_jobs: trio.CapacityLimiter = attrs.Factory(lambda: trio.CapacityLimiter(_NUM_THREADS))
    _long_jobs: trio.CapacityLimiter = attrs.Factory(lambda: trio.CapacityLimiter(_NUM_THREADS))

    async def in_thread(self, do: Callable[[], T], length: float = math.inf) -> T:
        """The result of a function that works on `length` bytes, characters or tokens, run in another thread.

        Cancellation: the function still runs to its end, so it must use no model; meanwhile it counts as a job.
        """
        limiter = self._short_jobs if length <= SHORT else self._long_jobs
        result: T = await self.background(do, abandon_on_cancel=True, limiter=limiter)
        return result

    def find_model(self, name: str | None, *, param: str | None = None) -> str:
        """The name of a model; None asks for the first. Raises: ErrorResponse: it is unknown; the field is `param`."""
        names = [spec.name for spec in self.models.specs]
        if name is None:
            return names[0]
        if name not in self.models:
            known = f"use {names[0]!r}" if len(names) == 1 else f"the models are {', '.join(map(repr, names))}"
            message = f"there is no model {short_json(name)} here; {known}"
            raise ErrorResponse(404, message, param=param, code="model_not_found")
        return name
