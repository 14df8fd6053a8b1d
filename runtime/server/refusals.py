"""What a request gets that is not answered: a status, and an error as OpenAI's clients read it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from protocol.errors import (
    OutriderError,
    ProcessorError,
    PromptError,
    PromptTooLongError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SettingsError,
)


class ErrorDetail(BaseModel):
    """What went wrong: in words, and for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 and more."""

    error: ErrorDetail


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP.
        detail: what the body says.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        return ErrorBody(error=self.detail).model_dump()


def refusal_of(error: OutriderError) -> Refusal:
    """What a client is told of an error of the runtime's."""
    said = str(error)
    match error:
        case PromptTooLongError():
            return Refusal(400, said, code="context_length_exceeded", param="prompt")
        case PromptError():
            return Refusal(400, said, param="prompt")
        case SettingsError():
            return Refusal(400, said)
        case ProcessorError() if isinstance(error.__cause__, SettingsError):
            # The one processor that a request can bring along is a grammar.
            return Refusal(400, str(error.__cause__), param="response_format")
        case RuntimeBrokenError() | RuntimeClosedError():
            return Refusal(503, said, type="server_error", code="models_unavailable")
        case _:
            return Refusal(500, said, type="server_error", code="generation_failed")


def refusal_of_body(error: ValidationError, fields: Sequence[str]) -> Refusal:
    """What a client is told of a body that is not as it should be.

    Args:
        error: what pydantic found.
        fields: that there are.
    """
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    # The members of a union are pydantic's business.
    place = [part for part in first["loc"] if isinstance(part, int) or part in fields or len(first["loc"]) == 1]
    param = ".".join(map(str, place or first["loc"])) or None
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][-1])
        near = difflib.get_close_matches(unknown, fields, n=1, cutoff=0.7) if len(first["loc"]) == 1 else []
        message = f"there is no field {unknown!r} here; " + (f"did you mean {near[0]!r}?" if near else "leave it out")
    elif first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    else:
        what = "; ".join(dict.fromkeys(problem["msg"] for problem in found if problem["loc"][:1] == first["loc"][:1]))
        message = f"{param or 'the body'}: {what}"
    return Refusal(400, message, param=param)
