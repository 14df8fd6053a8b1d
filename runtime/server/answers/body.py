"""Request bodies: JSON objects with strict types, fields without effect, and fields that are ignored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import attrs
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from starlette.types import Message, Send

from runtime.server.errors import error_response_of_body, unknown_field
from runtime.server.middleware import with_headers


class _WithoutEffect: ...


# A field that clients send but that cannot affect any answer; of any type.
NoEffect = Annotated[Any, _WithoutEffect(), Field(description="accepted, but has no effect")]

# A field of responses, which clients send back as part of a conversation; of any type.
SentBack = Annotated[Any, Field(description="a field of responses, which may be sent back; has no effect")]

T = TypeVar("T")
# A list of objects, bounded for the time that it takes to read them.
BoundedList = Annotated[list[T], Field(max_length=1000, fail_fast=True)]


class Body(BaseModel):
    """A JSON object with strict types. Fields that it does not have are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def take_other_names(self) -> None:
        """Where a field is null under its first name, take the value that was given under one of its other names.

        Raises: pydantic.ValidationError: the value is invalid.
        """
        for name, field in type(self).model_fields.items():
            if not isinstance(field.validation_alias, AliasChoices) or getattr(self, name) is not None:
                continue
            extra = self.model_extra or {}
            for other in field.validation_alias.choices:
                if (value := extra.get(str(other))) is not None:
                    del extra[str(other)]
                    self.__pydantic_validator__.validate_assignment(self, name, value)
                    break

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """Names of the given fields that are ignored, dotted within nested objects, and whether each is known.

        Unknown fields that are null or [] are left out: they ask for nothing. A name may come more than once.
        """
        for name, value in (self.model_extra or {}).items():
            if value is not None and value != []:
                yield name, False
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is not None and any(isinstance(mark, _WithoutEffect) for mark in field.metadata):
                yield name, True
            # An object that is kept as it came, such as a JSON schema, has no fields to ignore.
            for body in value if isinstance(value, list) else [value]:
                if isinstance(body, Body):
                    yield from ((f"{name}.{inner}", is_known) for inner, is_known in body.ignored_names())


IGNORED_HEADER = "X-Outrider-Ignored"

# The client chooses the names of unknown fields. Only these can stand in a header.
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_HEADER_NAMES = 32


@attrs.define
class IgnoredFields:
    """The names of a request's fields that are ignored.

    Attributes:
        names: dotted within nested objects, with whether the body's type has the field, without effect on any answer.
        known: names of all fields of the body's type.
    """

    names: dict[str, bool] = attrs.field(factory=dict)
    known: Sequence[str] = ()

    def add(self, name: str) -> None:
        """Add a field, as one without effect."""
        self.names.setdefault(name, True)

    @property
    def header(self) -> str | None:
        """The value of the header that names them, or None. Names beyond 32, or unfit for it, are only counted."""
        names = sorted(self.names, key=lambda name: self.names[name])  # unknown ones first
        fit = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_HEADER_NAMES]
        others = [f"+{len(names) - len(fit)} more"] if len(names) > len(fit) else []
        return ", ".join([*fit, *others]) or None

    def refuse(self) -> None:
        """Raises: ErrorResponse: a field is unknown, which a strict server refuses."""
        for name, is_known in self.names.items():
            if not is_known:
                raise unknown_field(name, self.known)

    def named_by(self, send: Send) -> Send:
        """`send` of ASGI that adds the header to the response, if any field is ignored by then."""

        async def send_naming_ignored(message: Message) -> None:
            value = self.header if message["type"] == "http.response.start" else None
            headers = [] if value is None else [(IGNORED_HEADER.lower().encode(), value.encode())]
            await with_headers(send, headers)(message)

        return send_naming_ignored


class RequestBody(Body):
    """The whole body of a request."""

    model: str | None = Field(None, description="a name in `/v1/models`; any name if only one model is served")

    _ignored: IgnoredFields = PrivateAttr(default_factory=IgnoredFields)

    @property
    def ignored(self) -> IgnoredFields:
        """The fields that are ignored."""
        return self._ignored


R = TypeVar("R", bound=RequestBody)

# A pair of surrogates, any other escape sequence of one character, or half a pair.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL
)


def _validated(request_type: type[R], body: bytes) -> R:
    """The body of a request, with U+FFFD for each half of a surrogate pair, which clients leave where they cut a text.

    Raises: pydantic.ValidationError: it is invalid.
    """
    try:
        request = request_type.model_validate_json(body)
    except ValidationError as error:
        # Searched only now: hardly any body has one.
        if error.errors()[0]["type"] != "json_invalid" or (whole := without_halves(body)) == body:
            raise
        request = request_type.model_validate_json(whole)
    request.take_other_names()
    return request


def without_halves(json: bytes) -> bytes:
    """JSON with U+FFFD for each half of a surrogate pair."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if _is_half(found[0]) else found[0], json)


def _is_half(escape: bytes) -> bool:
    return len(escape) == 6 and escape[2:3] in b"dD"


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse and validate the body of a request. Raises: ErrorResponse: it is invalid."""
    try:
        request = _validated(request_type, body)
    except ValidationError as error:
        raise error_response_of_body(error) from error
    request._ignored = IgnoredFields(dict(request.ignored_names()), tuple(request_type.model_fields))
    return request
