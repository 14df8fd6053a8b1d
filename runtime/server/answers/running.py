"""The answers that are being generated, and the operations by which anybody who knows an answer's id ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from runtime.server.answers.api import Choices
from runtime.server.context import ServerContext
from runtime.server.errors import ErrorResponse
from runtime.server.operations import COMMON_ERRORS, ErrorForm, Operation


class EndedAnswer(TypedDict):
    """An answer that ends now: all of it, or its reasoning."""

    id: str
    status: Literal["cancelled", "in_progress"]


@attrs.define(eq=False)
class RunningAnswers:
    """The choices of the answers that are being generated, by the ids of their responses."""

    _by_id: dict[str, Choices] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, context: ServerContext) -> RunningAnswers:
        """Those of a server."""
        return context.kept(cls, lambda _: cls())

    @contextmanager
    def listed(self, choices: Choices) -> Iterator[None]:
        """List an answer, whose first choice has begun, for as long as the block runs."""
        id = choices.begun[0].serializer.id
        self._by_id[id] = choices
        try:
            yield
        finally:
            self._by_id.pop(id, None)  # an API may have no ids

    def find(self, id: str) -> Choices:
        """The choices of an answer. Raises: ErrorResponse: none with this id is being generated."""
        if id not in self._by_id:
            raise ErrorResponse(404, "there is no such answer, or it has ended by itself", param="id")
        return self._by_id[id]


async def _cancelled(context: ServerContext, request: Request) -> Response:
    id = request.path_params["id"]
    RunningAnswers.of(context).find(id).cancel()
    return JSONResponse(EndedAnswer(id=id, status="cancelled"))


async def _thought(context: ServerContext, request: Request) -> Response:
    id = request.path_params["id"]
    for choice in RunningAnswers.of(context).find(id).begun:
        if choice.stream is not None:
            choice.stream.end_thinking()
    return JSONResponse(EndedAnswer(id=id, status="in_progress"))


def endings(path: str, name: str, errors: ErrorForm = COMMON_ERRORS) -> tuple[Operation, ...]:
    """The operations that end answers to requests to a path, which are called `name`."""

    def post(word: str, respond: Callable[..., Awaitable[Response]], summary: str) -> Operation:
        return Operation(
            f"{path}/{{id}}/{word}",
            lambda context: partial(respond, context),
            f"{word}_{name}",
            summary,
            EndedAnswer,
            "POST",
            errors=errors,
            statuses=("404",),
        )

    return (
        post("cancel", _cancelled, f"End a {name} that is being generated, with what there is by now"),
        post("end_thinking", _thought, f"End the reasoning of a {name} that is being generated"),
    )
