"""The OpenAPI description of the server, made from the types of its requests and responses."""

from __future__ import annotations

import importlib.metadata
import json
import typing
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from runtime.server.answers.ignored_fields import IGNORED_HEADER
from runtime.server.anthropic.requests import MessagesRequest, TokenCountRequest
from runtime.server.anthropic.responses import AnthropicMessage, MessagesErrorBody, MessagesEvent, TokenCount
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest
from runtime.server.openai.requests.tokens import DetokenizeRequest, TokenizeRequest
from runtime.server.openai.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    HealthReport,
    ModelDescription,
    ModelList,
    Props,
    Tokenized,
    Version,
)
from runtime.server.responses.bodies import DeletedResponse, ResponseBody, ResponsesEvent
from runtime.server.responses.requests import ResponsesRequest

_RESPONSES = (
    *(ChatChunk, ChatCompletion, Completion, ErrorBody, ModelDescription, ModelList, HealthReport),
    *(AnthropicMessage, MessagesErrorBody, TokenCount),
    *typing.get_args(MessagesEvent),
    *(ResponseBody, DeletedResponse),
    *(Tokenized, Detokenized, Props, Version),
    *typing.get_args(ResponsesEvent),
)
_REQUESTS = (
    *(ChatRequest, CompletionRequest, FimRequest, MessagesRequest, TokenCountRequest, ResponsesRequest),
    *(TokenizeRequest, DetokenizeRequest),
)

_HEADERS = {
    IGNORED_HEADER: {
        "description": "Names of the request's fields that mean nothing here and are ignored; left out if none",
        "schema": {"type": "string"},
    }
}

# Examples of requests.
_CONVERSATION = {"messages": [{"role": "user", "content": "def quicksort(items):"}]}
_ANSWER = {"max_tokens": 32, "stream": True}


def description(model: str, *, has_key: bool, is_strict: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 description, for JSON.

    Args:
        model: the target's name.
        has_key: whether `/v1` requires an API key.
        is_strict: whether unknown fields of requests are refused.
    """
    schemas: dict[str, Any] = json.loads(_schemas())
    if is_strict:
        for schema in schemas.values():
            # An object that is kept as it came, such as a schema, is a property without a definition of its own.
            if schema.get("additionalProperties") is True:
                schema["additionalProperties"] = False
    key_statuses = ("401",) if has_key else ()
    security: list[dict[str, Any]] = [{"bearer": []}] if has_key else []
    components: dict[str, Any] = {"schemas": schemas}
    if has_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}

    def post(
        id: str,
        summary: str,
        request: str,
        content: dict[str, Any],
        example: Any,
        *statuses: str,
        error: str,
        **fields: Any,
    ) -> dict[str, Any]:
        statuses = (*("400", *key_statuses, "404", "408", "413", "415", "429"), *statuses)
        return {
            "post": {
                "operationId": id,
                "summary": summary,
                **fields,
                "security": security,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref(request), "example": example}},
                },
                "responses": {
                    "200": {"description": summary, "headers": _HEADERS, "content": content},
                    **_errors(*statuses, schema=error),
                },
            }
        }

    def generation(
        id: str,
        summary: str,
        request: str,
        response: str,
        events: dict[str, Any],
        example: dict[str, Any],
        error: str = "ErrorBody",
    ) -> dict[str, Any]:
        return post(
            id,
            summary,
            request,
            {"application/json": {"schema": _ref(response)}, "text/event-stream": {"schema": events}},
            example,
            *("500", "503"),
            error=error,
            description="With stream: true, the answer comes as server-sent events. Disconnecting cancels it.",
        )

    def getter(
        id: str,
        summary: str,
        content_type: str,
        schema: dict[str, Any],
        *error_statuses: str,
        method: str = "get",
        **fields: Any,
    ) -> dict[str, Any]:
        return {
            method: {
                "operationId": id,
                "summary": summary,
                **fields,
                "responses": {
                    "200": {"description": summary, "content": {content_type: {"schema": schema}}},
                    **_errors(*error_statuses),
                },
            }
        }

    def stored(id: str, summary: str, schema: dict[str, Any], method: str = "get") -> dict[str, Any]:
        statuses = (*key_statuses, "404")
        parameters = [_path_parameter("id")]
        return getter(
            id, summary, "application/json", schema, *statuses, method=method, security=security, parameters=parameters
        )

    text = {"type": "string"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": importlib.metadata.version("outrider"),
            "description": f"Speculative decoding of {model}, with OpenAI's and Anthropic's APIs.",
        },
        "paths": {
            "/v1/completions": generation(
                "complete",
                "Continue a text",
                "CompletionRequest",
                "Completion",
                _chunks("Completion"),
                {"prompt": "def quicksort(items):", **_ANSWER},
            ),
            "/v1/fim/completions": generation(
                "fill_in",
                "Write what stands between two texts",
                "FimRequest",
                "ChatCompletion",
                _chunks("ChatChunk"),
                {"prompt": "def quicksort(items):", "suffix": "return items", **_ANSWER},
            ),
            "/v1/chat/completions": generation(
                "chat",
                "Answer a chat",
                "ChatRequest",
                "ChatCompletion",
                _chunks("ChatChunk"),
                {**_CONVERSATION, **_ANSWER},
            ),
            "/v1/responses": generation(
                "respond",
                "Answer a conversation in the form of OpenAI's responses",
                "ResponsesRequest",
                "ResponseBody",
                _events(*_names(ResponsesEvent)),
                {"input": "def quicksort(items):", "max_output_tokens": 32, "stream": True},
            ),
            "/v1/responses/{id}": {
                **stored("response", "A stored response", _ref("ResponseBody")),
                **stored("delete_response", "Drop a stored response", _ref("DeletedResponse"), method="delete"),
            },
            "/v1/messages": generation(
                "message",
                "Answer a conversation in the form of Anthropic's messages",
                "MessagesRequest",
                "AnthropicMessage",
                _events(*_names(MessagesEvent), "MessagesErrorBody"),
                {**_CONVERSATION, **_ANSWER},
                "MessagesErrorBody",
            ),
            "/v1/messages/count_tokens": post(
                "count_tokens",
                "Number of tokens of a conversation",
                "TokenCountRequest",
                {"application/json": {"schema": _ref("TokenCount")}},
                _CONVERSATION,
                error="MessagesErrorBody",
            ),
            "/v1/tokenize": post(
                "tokenize",
                "The token ids of a text or a chat",
                "TokenizeRequest",
                {"application/json": {"schema": _ref("Tokenized")}},
                {"prompt": "def quicksort(items):"},
                error="ErrorBody",
            ),
            "/v1/detokenize": post(
                "detokenize",
                "The text of token ids",
                "DetokenizeRequest",
                {"application/json": {"schema": _ref("Detokenized")}},
                {"tokens": [1, 2, 3]},
                error="ErrorBody",
            ),
            "/v1/props": getter(
                "props",
                "Properties of the server",
                "application/json",
                _ref("Props"),
                *key_statuses,
                security=security,
            ),
            "/version": getter("version", "The server's version", "application/json", _ref("Version")),
            "/v1/models": getter(
                "models", "The served models", "application/json", _ref("ModelList"), *key_statuses, security=security
            ),
            "/v1/models/{model}": getter(
                "model",
                "A served model",
                "application/json",
                _ref("ModelDescription"),
                *key_statuses,
                "404",
                security=security,
                parameters=[_path_parameter("model")],
            ),
            "/health": {
                "get": {
                    "operationId": "health",
                    "summary": "Whether requests are taken; degraded while the drafter has ended, hangs or is late",
                    "responses": {
                        status: {"description": text, "content": {"application/json": {"schema": _ref("HealthReport")}}}
                        for status, text in (
                            ("200", "Requests are taken"),
                            ("503", "The target has failed, or the server is stopping"),
                        )
                    },
                }
            },
            "/metrics": getter("metrics", "Metrics for Prometheus", "text/plain", text),
            "/timelines/{id}": getter(
                "timeline",
                "When each model worked on an answer",
                "text/html",
                text,
                "404",
                parameters=[_path_parameter("id")],
            ),
        },
        "components": components,
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _names(union: Any) -> list[str]:
    return [member.__name__ for member in typing.get_args(union)]


def _json_text(*schemas: str) -> dict[str, Any]:
    content = {"anyOf": [_ref(schema) for schema in schemas]}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": content}


@cache
def _schemas() -> str:
    """The schemas of all types by name, as JSON. They take pydantic a while, and are the same for every server."""
    adapters: list[TypeAdapter[Any]] = [TypeAdapter(each) for each in (*_RESPONSES, *_REQUESTS)]
    _, schemas = TypeAdapter.json_schemas(
        [(i, "serialization" if i < len(_RESPONSES) else "validation", adapter) for i, adapter in enumerate(adapters)],
        ref_template="#/components/schemas/{model}",
    )
    return json.dumps(schemas["$defs"])


def _chunks(chunk: str) -> dict[str, Any]:
    """The schema of one of OpenAI's server-sent events: a chunk, an error (then it is the last), or the end."""
    data = {"anyOf": [{"const": "[DONE]"}, _json_text(chunk, "ErrorBody")]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _events(*schemas: str) -> dict[str, Any]:
    """The schema of one server-sent event whose type is also its name."""
    properties = {"event": {"type": "string"}, "data": _json_text(*schemas)}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(*statuses: str, schema: str = "ErrorBody") -> dict[str, Any]:
    return {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": _ref(schema)}}}
        for status in statuses
    }


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
