"""What a request gets that is not answered: a status, and an error as OpenAI's clients read it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from protocol.synonyms import SYNONYMS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class ErrorDetail(BaseModel):
    """What went wrong: in words, and for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 and more."""

    error: ErrorDetail


class ErrorResponse(Exception):
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


def error_response_of(error: OutriderError, prompt_field: str = "prompt") -> ErrorResponse:
    """What a client is told of an error of the runtime's.

    Args:
        error: the error.
        prompt_field: what the prompt is called in the request.
    """
    said = str(error)
    match error:
        case PromptTooLongError():
            return ErrorResponse(400, said, code="context_length_exceeded", param=prompt_field)
        case PromptError():
            return ErrorResponse(400, said, param=prompt_field)
        case SettingsError():
            return ErrorResponse(400, said)
        case ProcessorError() if isinstance(error.__cause__, SettingsError):
            # The one processor that a request can bring along is a grammar.
            return ErrorResponse(400, str(error.__cause__), param="response_format")
        case RuntimeBrokenError() | RuntimeClosedError():
            return ErrorResponse(503, said, type="server_error", code="models_unavailable")
        case _:
            return ErrorResponse(500, said, type="server_error", code="generation_failed")


# --- bodies that are not as they should be --------------------------------------------------------

# What to do where a field asks for what is not there.
_REMEDIES = {
    "n": "send several requests, they are worked on side by side",
    "best_of": "there is one answer a request; leave it out",
    "echo": "leave it out, and put the prompt in front of the text",
    "suffix": "nothing can be filled in here; leave it out",
    "tools": "there are no tools here; leave it out",
    "tool_calls": "there are no tools here; leave it out",
    "function_call": "there are no tools here; leave it out",
    "tool_choice": "there are no tools here; leave it out",
    "audio": "there is only text here; leave it out",
    "modalities": "there is only text here; leave it out",
    "role": "there are no tools here, and no other roles",
    "functions": "there are no tools here; leave it out",
    "web_search_options": "there are no tools here; leave it out",
    "image_url": "there is only text here; leave it out",
    "prediction": "the drafter predicts; leave it out",
    "reasoning_effort": "the model cannot be told; leave it out",
    "verbosity": "the model cannot be told; leave it out",
}

# What pydantic calls the members of a union; it is of no interest which of them did not fit.
_MEMBER = re.compile(r"(constrained-)?(str|int|float|bool|dict|none)|[A-Z]\w*|.*\[.*", re.DOTALL)

_TYPES = {
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


def short(value: Any) -> str:
    """A value as a message can have it: as JSON, and not at length."""
    said = json.dumps(value, ensure_ascii=False, default=str)
    return said if len(said) <= 60 else f"{said[:57]}…"


def error_response_of_body(error: ValidationError, fields: Sequence[str]) -> ErrorResponse:
    """What a client is told of a body that is not as it should be.

    Args:
        error: what pydantic found.
        fields: that there are.
    """
    found = error.errors(include_url=False)
    # Of a union each member complains; the one that got furthest was meant.
    field = found[0]["loc"][:1]
    ours = [(problem, _place(problem["loc"])) for problem in found if problem["loc"][:1] == field]
    place = max((place for _, place in ours), key=len)
    problems = [problem for problem, there in ours if there == place]
    param = ".".join(map(str, place)) or None
    named = [part for part in place if isinstance(part, str)]
    first = problems[0]
    match first["type"]:
        case "json_invalid":
            # Where bytes are no text, there may be no better words.
            return ErrorResponse(
                400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}; send an object"
            )
        case "extra_forbidden":
            message = f"there is no field {short(str(place[-1]))} here; {_instead(place, fields)}"
        case "missing":
            message = f"{param} is missing; add it"
        case "string_pattern_mismatch":
            message = f"{place[0]} must have token ids for keys, got {short(first['input'])}"
        case _ if place[:1] == ("prompt",):
            message = (
                "prompt must be one text, or one list of token ids of at least 0, "
                f"got {short(first['input'])}; of several, send a request each, they are worked on side by side"
            )
        case _:
            wanted = _wanted(problems)
            message = f"{param or 'the body'} must be {wanted}, got {short(first['input'])}"
            if named and named[-1] in _REMEDIES:
                message += f"; {_REMEDIES[named[-1]]}"
    return ErrorResponse(400, message, param=None if param is None else param[:100])


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where something is wrong in a body."""
    place = [
        part
        for i, part in enumerate(loc)
        # A format's type is said once more, behind its name. A name in first place is the client's own.
        if isinstance(part, int) or i == 0 or (loc[i - 1] != "response_format" and _MEMBER.fullmatch(part) is None)
    ]
    return tuple(place)


def _instead(place: tuple[int | str, ...], fields: Sequence[str]) -> str:
    unknown = str(place[-1])
    if unknown in _REMEDIES:
        return _REMEDIES[unknown]
    if SYNONYMS.get(unknown) in fields:
        return f"did you mean {SYNONYMS[unknown]!r}?"
    near = difflib.get_close_matches(unknown, fields, n=1, cutoff=0.7) if len(place) == 1 else []
    return f"did you mean {near[0]!r}?" if near else "leave it out"


def _wanted(problems: Sequence[ErrorDetails]) -> str:
    """What a value must be, by what is wrong with it."""
    # One that is of the right type and out of its bounds says more than all that are of another type.
    bounds = [problem for problem in problems if problem["type"] not in _TYPES and problem["type"] != "literal_error"]
    if bounds:
        return _bound(bounds[0])
    types = [
        str(problem["ctx"]["expected"]).replace("False", "false")
        if problem["type"] == "literal_error"
        else _TYPES[problem["type"]]
        for problem in problems
    ]
    *others, last = dict.fromkeys(types)
    return f"{', '.join(others)} or {last}" if others else last


def _bound(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    match problem["type"]:
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "less_than_equal":
            return f"at most {short(context['le'])}"
        case "string_too_short" | "too_short":
            return "there, and not empty"
        case "string_too_long":
            return f"of at most {context['max_length']} characters"
        case "too_long":
            most = context["max_length"]
            if context["field_type"] != "List":
                return f"of at most {most} entries"
            return "an empty list" if most == 0 else f"a list of at most {most}"
        case "union_tag_invalid":
            return f"an object whose type is one of {context['expected_tags']}"
        case "union_tag_not_found":
            return "an object with a type"
        case _:
            return problem["msg"].removeprefix("Input should be ")
