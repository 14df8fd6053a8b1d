"""Admission of requests: how many there may be at once, when a rejected one should try again, and draining."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from runtime.server.errors import ErrorResponse

# How many of the latest durations are kept, to estimate when other requests will end.
_NUM_DURATIONS = 32
_MAX_RETRY_AFTER_S = 60

# Behind a load balancer, the next attempt reaches another server.
_DRAINING_RETRY_AFTER_S = 1


@attrs.define(eq=False)
class RequestAdmission:
    """Counts the admitted requests; rejects those beyond the limit, and all further ones once the server drains.

    Attributes:
        max_streams: returns how many requests the models are assumed to work on at once, >= 1.
        max_waiting: further requests that may wait, >= 0.
        clock: returns seconds.
        num_admitted: requests that run or wait for the models.
    """

    _max_streams: Callable[[], float]
    _max_waiting: int
    _clock: Callable[[], float]
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
                retry_after_s=_DRAINING_RETRY_AFTER_S,
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
        return min(now + _MAX_RETRY_AFTER_S, max(now, self._last_return_s) + self._interval_s())

    def _interval_s(self) -> float:
        past = sum(self._durations_s) / len(self._durations_s) if self._durations_s else 1.0
        # The admitted requests will take at least as long as they have taken so far.
        ages = [self._clock() - start_s for start_s in self._start_times_s]
        mean = max(past, sum(ages) / len(ages)) if ages else past
        return mean / self._max_streams()
