"""The operations of a server, each declared once: its path, its endpoint, and its OpenAPI description."""

from __future__ import annotations

import importlib.metadata
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
from pydantic import TypeAdapter

from runtime.server.answers.body import IGNORED_HEADER
from runtime.server.context import ServerContext
from runtime.server.errors import ErrorBody, ErrorResponse
from runtime.server.middleware import needs_key


@attrs.frozen
class ErrorForm:
    """The form of an API's error bodies: their type, and the function that makes one."""

    type: type
    body: Callable[[ErrorResponse], Mapping[str, Any]]


# The form of all paths whose API has none of its own.
COMMON_ERRORS = ErrorForm(ErrorBody, ErrorResponse.body)

_MEANINGS = {
    "400": "A field, a setting or the prompt is wrong",
    "401": "The API key is missing or wrong",
    "404": "Not found",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The content type of the body is not JSON",
    "429": "Too many requests; Retry-After says when to try again",
    "500": "The generation failed",
    "503": "The models are unavailable",
}
_OF_BODIES = ("400", "404", "408", "413", "415", "429")
_OF_GENERATIONS = (*_OF_BODIES, "500", "503")


@attrs.frozen
class Operation:
    """One method at one path."""

    path: str
    endpoint: Callable[[ServerContext], Any]  # makes the ASGI application, or the endpoint of Starlette's, that answers
    id: str
    summary: str
    response: type | str = "text/html"  # the type of the body, for JSON; or the content type of any other
    request: type | None = None  # the type of the body of a request
    example: Any = None
    method: str = attrs.Factory(lambda self: "GET" if self.request is None else "POST", takes_self=True)
    is_streamed: bool = False  # whether the response comes as server-sent events with `stream: true`
    errors: ErrorForm = COMMON_ERRORS  # also at further paths below this one
    statuses: Sequence[str] = ()  # of errors, besides those of every operation with a request body
    responses: Mapping[str, str] | None = None  # descriptions by status, instead of `summary` and `statuses`

    def described(self, *, has_key: bool) -> dict[str, Any]:
        """The description, without path and method."""
        is_guarded = has_key and needs_key(self.path)
        default = () if self.request is None else _OF_GENERATIONS if self.is_streamed else _OF_BODIES
        statuses = sorted({*default, *self.statuses, *(("401",) if is_guarded else ())})
        content: dict[str, Any]
        if isinstance(self.response, str):
            content = {self.response: {"schema": {"type": "string"}}}
        else:
            content = {"application/json": {"schema": _ref(self.response)}}
        described: dict[str, Any] = {"operationId": self.id, "summary": self.summary}
        if self.is_streamed:
            content["text/event-stream"] = {"schema": {}}  # events of any form
            described["description"] = (
                "With stream: true, the answer comes as server-sent events. Disconnecting cancels it."
            )
        if self.request is not None:
            body = {"schema": _ref(self.request), "example": self.example}
            described["requestBody"] = {"required": True, "content": {"application/json": body}}
        if needs_key(self.path):
            described["security"] = [{"bearer": []}] if has_key else []
        if names := [part[1:-1].partition(":")[0] for part in self.path.split("/") if part.startswith("{")]:
            described["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if self.responses is not None:
            described["responses"] = {
                status: {"description": text, "content": content} for status, text in self.responses.items()
            }
            return described
        answer: dict[str, Any] = {"description": self.summary, "content": content}
        if self.request is not None:
            text = "Names of the request's fields that are ignored; absent if there are none"
            answer["headers"] = {IGNORED_HEADER: {"description": text, "schema": {"type": "string"}}}
        error = {"application/json": {"schema": _ref(self.errors.type)}}
        described["responses"] = {
            "200": answer,
            **{status: {"description": _MEANINGS[status], "content": error} for status in statuses},
        }
        return described


def description(
    operations: Sequence[Operation], model: str, *, has_key: bool, is_strict: bool = False
) -> dict[str, Any]:
    """The OpenAPI 3.1 description, for JSON."""
    types = (each for operation in operations for each in (operation.errors.type, operation.response))
    sent = dict.fromkeys(each for each in types if not isinstance(each, str))
    received = dict.fromkeys(operation.request for operation in operations if operation.request is not None)
    schemas: dict[str, Any] = json.loads(_schemas(tuple(sent), tuple(received)))
    if is_strict:
        for schema in schemas.values():
            # This spares objects that are kept as they came, such as JSON schemas: they have no definition here.
            if schema.get("additionalProperties") is True:
                schema["additionalProperties"] = False
    components: dict[str, Any] = {"schemas": schemas}
    if has_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        methods = paths.setdefault(operation.path.replace(":path}", "}"), {})
        methods[operation.method.lower()] = operation.described(has_key=has_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": importlib.metadata.version("outrider"),
            "description": f"Speculative decoding of {model}, with OpenAI's and Anthropic's APIs.",
        },
        "paths": paths,
        "components": components,
    }


def _ref(named: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{named.__name__}"}


@cache
def _schemas(sent: tuple[type, ...], received: tuple[type, ...]) -> str:
    """The schemas of all types by name, as JSON. They take pydantic a while, and are the same for every server."""
    modes: list[tuple[tuple[type, ...], typing.Literal["serialization", "validation"]]] = [
        (sent, "serialization"),
        (received, "validation"),
    ]
    inputs: list[Any] = [((mode, i), mode, TypeAdapter(each)) for types, mode in modes for i, each in enumerate(types)]
    _, schemas = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    return json.dumps(_with_any_of(schemas["$defs"]))


def _with_any_of(schema: Any) -> Any:
    """A schema in which unions without a discriminator are "anyOf": a part of an unknown type fits several of its
    kinds, of which pydantic is told by a function, and would be none of "oneOf".
    """
    if isinstance(schema, list):
        return [_with_any_of(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_told_apart = "discriminator" in schema
    return {
        "anyOf" if key == "oneOf" and not is_told_apart else key: _with_any_of(value) for key, value in schema.items()
    }
