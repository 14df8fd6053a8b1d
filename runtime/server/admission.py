"""How many requests there may be, and how long one that finds the house full should wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.server.errors import ErrorResponse

# Answers whose durations are remembered, to say when there will be room.
_REMEMBERED = 32
_LONGEST_WAIT_S = 60


class RequestAdmission:
    """Counts requests that are being answered, and refuses those for which there is no room.

    Attributes:
        num_within: requests that are being answered or wait for the models.
    """

    def __init__(self, max_streams: int, max_waiting: int, clock: Callable[[], float]) -> None:
        """Empty.

        Args:
            max_streams: requests that the models work on at once, >= 1.
            max_waiting: requests that may wait beside those, >= 0.
            clock: seconds.
        """
        self.num_within = 0
        self._max_streams = max_streams
        self._max_waiting = max_waiting
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._began: list[float] = []  # of the requests within

    def check_room(self) -> None:
        """Raises: Refusal: there is no room for another request at present."""
        if self.num_within >= self._max_streams + self._max_waiting:
            seconds = self.retry_after_s
            raise ErrorResponse(
                429,
                f"{self._max_streams} requests are being answered and {self._max_waiting} wait, which is as many as "
                f"may; try again in {seconds} s",
                type="rate_limit_error",
                code="full_house",
                headers={"Retry-After": str(seconds)},
            )

    @contextmanager
    def room(self) -> Iterator[None]:
        """Room for one request.

        Raises: Refusal: there is none.
        """
        self.check_room()
        self.num_within += 1
        began = self._clock()
        self._began.append(began)
        is_refused = False
        try:
            yield
        except ErrorResponse:
            is_refused = True
            raise
        finally:
            self.num_within -= 1
            self._began.remove(began)
            if not is_refused:  # in no time, which says nothing of how long answers take
                self._durations_s.append(self._clock() - began)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, at least 1, until somebody is likely to have left: the streams take turns at leaving."""
        past = sum(self._durations_s) / len(self._durations_s) if self._durations_s else 1.0
        # Those that are there will have taken at least as long as they have by now.
        ages = [self._clock() - began for began in self._began]
        mean = max(past, sum(ages) / len(ages)) if ages else past
        return min(_LONGEST_WAIT_S, max(1, math.ceil(mean / self._max_streams)))
