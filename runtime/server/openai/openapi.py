"""The OpenAPI description of the server, made from the types of its requests and responses."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import TypeAdapter

from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ErrorBody,
    HealthReport,
    ModelDescription,
    ModelList,
)

_RESPONSES = (ChatChunk, ChatCompletion, Completion, ErrorBody, ModelDescription, ModelList, HealthReport)
_REQUESTS = (ChatRequest, CompletionRequest)

# Fields of every example of a request.
_EXAMPLE = {"max_tokens": 32, "stream": True}


def description(model: str, *, has_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 description, for JSON.

    Args:
        model: the target's name.
        has_key: whether `/v1` requires an API key.
    """
    adapters: list[TypeAdapter[Any]] = [TypeAdapter(each) for each in (*_RESPONSES, *_REQUESTS)]
    _, schemas = TypeAdapter.json_schemas(
        [(i, "serialization" if i < len(_RESPONSES) else "validation", adapter) for i, adapter in enumerate(adapters)],
        ref_template="#/components/schemas/{model}",
    )
    key_statuses = ("401",) if has_key else ()
    security: list[dict[str, Any]] = [{"bearer": []}] if has_key else []
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if has_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}

    def generation(id: str, request: str, response: str, chunk: str, example: dict[str, Any]) -> dict[str, Any]:
        return {
            "post": {
                "operationId": id,
                "summary": "Generate a text; disconnecting cancels it",
                "security": security,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref(request), "example": {**example, **_EXAMPLE}}},
                },
                "responses": {
                    "200": {
                        "description": "The text; with `stream`, server-sent events, one for each chunk, then [DONE]",
                        "content": {
                            "application/json": {"schema": _ref(response)},
                            "text/event-stream": {"schema": _events(chunk)},
                        },
                    },
                    **_errors("400", *key_statuses, "404", "408", "413", "415", "429", "500", "503"),
                },
            }
        }

    def getter(
        id: str, summary: str, content_type: str, schema: dict[str, Any], *error_statuses: str, **fields: Any
    ) -> dict[str, Any]:
        return {
            "get": {
                "operationId": id,
                "summary": summary,
                **fields,
                "responses": {
                    "200": {"description": summary, "content": {content_type: {"schema": schema}}},
                    **_errors(*error_statuses),
                },
            }
        }

    text = {"type": "string"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": importlib.metadata.version("outrider"),
            "description": f"Speculative decoding of {model}, with OpenAI's API.",
        },
        "paths": {
            "/v1/completions": generation(
                "complete", "CompletionRequest", "Completion", "Completion", {"prompt": "def quicksort(items):"}
            ),
            "/v1/chat/completions": generation(
                "chat",
                "ChatRequest",
                "ChatCompletion",
                "ChatChunk",
                {"messages": [{"role": "user", "content": "def quicksort(items):"}]},
            ),
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
                    "summary": "Whether the models work; degraded while the drafter has ended, hangs or is late",
                    "responses": {
                        status: {"description": text, "content": {"application/json": {"schema": _ref("HealthReport")}}}
                        for status, text in (("200", "The target works"), ("503", "The target has failed"))
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


def _events(chunk: str) -> dict[str, Any]:
    """The schema of one server-sent event: a chunk, an error (then it is the last), or the end."""
    content = {"anyOf": [_ref(chunk), _ref("ErrorBody")]}
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    data = {"anyOf": [{"const": "[DONE]"}, json_text]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": _ref("ErrorBody")}}}
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
