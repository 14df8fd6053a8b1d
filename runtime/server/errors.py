"""Error responses: an HTTP status, and the error in the body."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

# pydantic cannot read `typing.TypedDict` before Python 3.12.
from typing_extensions import TypedDict

from protocol.argument_aliases import meant
from protocol.errors import (
    MemoryLimitError,
    OutriderError,
    ProcessorError,
    PromptError,
    PromptTooLongError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SettingsError,
)


class ModelLoadError(OutriderError):
    """A model cannot be loaded; the error of the load is the cause."""


class ConstraintError(SettingsError):
    """A constraint, in a `field` of a request, is invalid, or cannot be followed to its end."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ErrorDetail(TypedDict):
    """An error: a message for people, the rest for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ErrorResponse(Exception):
    """An error response, raised while a request is handled, before anything was sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        usual = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.detail: ErrorDetail = {"message": message, "type": type or usual, "param": param, "code": code}
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def body(self) -> ErrorBody:
        """The body, in the form of all paths whose API has no form of its own (`Operation.errors`)."""
        return {"error": self.detail}


def error_response_of(error: OutriderError, prompt_field: str = "prompt") -> ErrorResponse:
    """The error response for an error of the runtime; `prompt_field` is the request's field with the prompt."""
    message = str(error)
    match error:
        case PromptError():
            is_long = isinstance(error, PromptTooLongError)
            return ErrorResponse(400, message, code="context_length_exceeded" if is_long else None, param=prompt_field)
        case SettingsError():
            return ErrorResponse(400, message)
        case ProcessorError() if isinstance(error.__cause__, SettingsError):
            # The only logits processor of a request that can fail is the grammar of its answer.
            param = error.__cause__.field if isinstance(error.__cause__, ConstraintError) else None
            return ErrorResponse(400, str(error.__cause__), param=param)
        case ModelLoadError():
            return ErrorResponse(503, message, code="model_not_loaded")
        case MemoryLimitError():
            return ErrorResponse(503, message, code="memory_short")
        case RuntimeBrokenError() | RuntimeClosedError():
            return ErrorResponse(503, message, code="models_unavailable")
        case _:
            return ErrorResponse(500, message, code="generation_failed")


# Remedies for fields of OpenAI's that are not supported here, or not with every value.
_REMEDIES = {
    "n": "send several requests, they are worked on side by side",
    "audio": "answers are text; leave it out",
    "modalities": "answers are text; leave it out",
    "web_search_options": "the server searches nothing; leave it out",
    "image_url": "only text is supported; leave it out",
    "verbosity": "the model has no such setting; leave it out",
}

# Most problems of one body that are examined: 100,000 take a second.
_MAX_PROBLEMS = 1000

# pydantic's names of the members of a union, which it adds to the location of an error.
_UNION_MEMBER = re.compile(r"(constrained-)?(str|int|float|bool|dict|none)|[A-Z]\w*|.*\[.*", re.DOTALL)

# The types of a format of answers, which it adds likewise.
_FORMAT_TYPES = ("text", "json_object", "json_schema")

# Expected types, by the type of pydantic's error.
_EXPECTED_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}


# Likewise for values of the right type that are out of bounds; the placeholders are names of pydantic's.
_EXPECTED_BOUNDS = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le}",
    "string_too_short": "text of at least {min_length} character",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "union_tag_invalid": "an object whose type is one of {expected_tags}",
    "union_tag_not_found": "an object with a type",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


def short_json(value: Any) -> str:
    """A value for an error message: as JSON, cut to 58 characters if it is longer than 60."""
    text = ""
    # Piece by piece: a value may have megabytes.
    for piece in _ENCODER.iterencode(value):
        text += piece
        if len(text) > 60:
            return f"{text[:57]}…"
    return text


def error_response_of_body(error: ValidationError) -> ErrorResponse:
    """The error response for an invalid body."""
    if (num_problems := error.error_count()) > _MAX_PROBLEMS:
        return ErrorResponse(400, f"the body has {num_problems} errors, too many to look at; see /docs for its fields")
    problems = error.errors(include_url=False)
    # For a union, pydantic reports a problem for each member. The client meant the member that was read furthest.
    field = problems[0]["loc"][:1]
    problems = [problem for problem in problems if problem["loc"][:1] == field]
    location = max((_location(problem["loc"]) for problem in problems), key=len)
    problems = [problem for problem in problems if _location(problem["loc"]) == location]
    param = ".".join(map(str, location)) or None
    first, names = problems[0], [part for part in location if isinstance(part, str)]
    match first["type"]:
        case "json_invalid":
            reason = first["msg"].removeprefix("Invalid JSON: ")
            return ErrorResponse(400, f"the body is not JSON: {reason}; send an object")
        case "missing":
            message = f"{param} is missing; add it"
        case _ if location[:1] == ("prompt",):
            message = (
                "prompt must be a text, a list of token ids of at least 0, or a list of up to 128 texts or "
                f"of up to 128 lists of token ids, got {short_json(first['input'])}"
            )
        case _:
            message = f"{param or 'the body'} must be {_expected(problems)}, got {short_json(first['input'])}"
            # The remedy for n does not help with n = 0.
            if names and names[-1] in _REMEDIES and first["type"] != "greater_than_equal":
                message += f"; {_REMEDIES[names[-1]]}"
    return ErrorResponse(400, message, param=None if param is None else param[:100])


def unknown_field(name: str, known: Sequence[str]) -> ErrorResponse:
    """The error response of a strict server for an unknown field of a body; `known` are the names of its fields."""
    path, _, last = name.rpartition(".")
    near = meant(last, () if path else known, cutoff=0.7)
    hint = _REMEDIES.get(last) or ("leave it out" if near is None else f"did you mean {near!r}?")
    return ErrorResponse(400, f"there is no field {short_json(last)} here; {hint}", param=name[:100])


def _location(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location of a problem in the body: pydantic's, without its names of members of unions."""
    location = []
    for i, part in enumerate(loc):
        # The first part is the name of a field, which the client may have made up to look like a member.
        is_member = i > 0 and isinstance(part, str) and _UNION_MEMBER.fullmatch(part) is not None
        is_format_type = i > 0 and part in _FORMAT_TYPES and loc[i - 1] in ("response_format", "format")
        if not (is_member or is_format_type):
            location.append(part)
    return tuple(location)


def _expected(problems: Sequence[ErrorDetails]) -> str:
    types = []
    for problem in problems:
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "literal_error":
            types.append(str(context["expected"]).replace("False", "false"))
        elif kind in _EXPECTED_TYPES:
            types.append(_EXPECTED_TYPES[kind])
        # A value of the right type that is out of bounds: the other types of the union do not matter.
        elif kind == "too_long" and context["field_type"] != "List":
            return f"an object of at most {context['max_length']} entries"
        elif kind in _EXPECTED_BOUNDS:
            return _EXPECTED_BOUNDS[kind].format(**context)
        else:
            return problem["msg"].removeprefix("Input should be ")
    *others, last = dict.fromkeys(types)
    return f"{', '.join(others)} or {last}" if others else last
