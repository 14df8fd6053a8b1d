"""State that all requests of a server share: models, limits, admission, metrics and threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from runtime.server.admission import RequestAdmission
from runtime.server.connections.client import BodyMemory
from runtime.server.errors import ErrorResponse, short_json
from runtime.server.fair_threads import Background
from runtime.server.limits import Limits
from runtime.server.metrics import Metrics
from runtime.server.models.pool import ModelPool

if TYPE_CHECKING:
    from runtime.server.answers.api import Choices

T = TypeVar("T")

# Bytes or characters of a body or prompt that is short: to read or tokenise it takes a few milliseconds.
SHORT = 2**14

# Long jobs that are done at once, and as many short ones, so that these do not wait for those.
_NUM_THREADS = 2


@attrs.frozen(eq=False)
class ServerContext:
    """State that all requests of a server share.

    Attributes:
        background: runs functions in threads.
        is_strict: whether unknown fields, a `max_tokens` beyond the limit and, where only one model is served, the name
            of another one are refused instead of ignored.
        body_memory: bounds the memory of bodies that are being read.
        started_at: when the server began, in seconds of Unix time.
        running: the answers that are being generated, by the ids of their responses.
    """

    models: ModelPool
    limits: Limits
    admission: RequestAdmission
    background: Background
    is_strict: bool
    metrics: Metrics = attrs.Factory(
        lambda self: Metrics(self.models, is_draining=lambda: self.admission.is_draining), takes_self=True
    )
    body_memory: BodyMemory = attrs.Factory(lambda self: BodyMemory(self.limits.max_bodies_bytes), takes_self=True)
    started_at: int = attrs.Factory(lambda: int(time.time()))
    running: dict[str, Choices] = attrs.field(init=False, factory=dict)
    _short_jobs: trio.CapacityLimiter = attrs.Factory(lambda: trio.CapacityLimiter(_NUM_THREADS))
    _long_jobs: trio.CapacityLimiter = attrs.Factory(lambda: trio.CapacityLimiter(_NUM_THREADS))
    _kept: dict[type, Any] = attrs.field(init=False, factory=dict)

    async def in_thread(self, do: Callable[[], T], length: float = math.inf) -> T:
        """The result of a function that works on `length` bytes, characters or tokens, run in another thread.

        Cancellation: the function still runs to its end, so it must use no model; meanwhile it counts as a job.
        """
        limiter = self._short_jobs if length <= SHORT else self._long_jobs
        return await self.background(do, abandon_on_cancel=True, limiter=limiter)

    def kept(self, kind: type[T], make: Callable[[Limits], T]) -> T:
        """State that an API keeps between its requests: one object of a class, made at the first call."""
        if kind not in self._kept:
            self._kept[kind] = make(self.limits)
        kept: T = self._kept[kind]
        return kept

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
