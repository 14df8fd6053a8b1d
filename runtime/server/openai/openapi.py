"""The server's description of itself, as OpenAPI has it, made of the types of what it takes and gives."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from runtime.server.errors import ErrorBody
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses import ChatChunk, ChatCompletion, Completion


class ModelDescription(BaseModel):
    """A model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    draft: str | None
    has_chat_template: bool


class ModelList(BaseModel):
    """The models that are served: one."""

    object: str
    data: list[ModelDescription]


class HealthReport(BaseModel):
    """Whether the actors are alive, and what they have to do."""

    status: Literal["ok", "degraded", "broken"]
    ok: bool
    target: bool
    draft: bool | None
    streams: int
    waiting: int


_GIVEN = (ChatChunk, ChatCompletion, Completion, ErrorBody, ModelDescription, ModelList, HealthReport)
_TAKEN = (ChatRequest, CompletionRequest)


_EXAMPLE = {"max_tokens": 32, "stream": True}


def description(model: str, *, has_key: bool) -> dict[str, Any]:
    """The description.

    Args:
        model: what the target is called.
        has_key: whether `/v1` wants an API key.
    """
    _, schemas = models_json_schema(
        [*((given, "serialization") for given in _GIVEN), *((taken, "validation") for taken in _TAKEN)],
        ref_template="#/components/schemas/{model}",
    )
    refused = ("401",) if has_key else ()
    asked: list[dict[str, Any]] = [{"bearer": []}] if has_key else []
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if has_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}

    def generation(name: str, taken: str, given: str, chunk: str, example: dict[str, Any]) -> dict[str, Any]:
        return {
            "post": {
                "operationId": name,
                "summary": "Generate a text; whoever hangs up cancels it",
                "security": asked,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref(taken), "example": {**example, **_EXAMPLE}}},
                },
                "responses": {
                    "200": {
                        "description": "The text; with `stream`, server-sent events with a chunk each, and [DONE]",
                        "content": {
                            "application/json": {"schema": _ref(given)},
                            "text/event-stream": {"schema": _events(chunk)},
                        },
                    },
                    **_errors("400", *refused, "404", "408", "413", "415", "429", "500", "503"),
                },
            }
        }

    def reading(
        name: str, summary: str, content: str, schema: dict[str, Any], *errors: str, **more: Any
    ) -> dict[str, Any]:
        return {
            "get": {
                "operationId": name,
                "summary": summary,
                **more,
                "responses": {
                    "200": {"description": summary, "content": {content: {"schema": schema}}},
                    **_errors(*errors),
                },
            }
        }

    text = {"type": "string"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": importlib.metadata.version("outrider"),
            "description": f"Speculative decoding of {model}, by OpenAI's interface.",
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
            "/v1/models": reading(
                "models", "The models that are served", "application/json", _ref("ModelList"), *refused, security=asked
            ),
            "/v1/models/{model}": reading(
                "model",
                "A model that is served",
                "application/json",
                _ref("ModelDescription"),
                *refused,
                "404",
                security=asked,
                parameters=[_path("model")],
            ),
            "/health": {
                "get": {
                    "operationId": "health",
                    "summary": "Whether texts come; degraded while the drafter has ended, hangs or is late",
                    "responses": {
                        status: {"description": said, "content": {"application/json": {"schema": _ref("HealthReport")}}}
                        for status, said in (("200", "They do"), ("503", "They do not: the target has failed"))
                    },
                }
            },
            "/metrics": reading("metrics", "Figures for Prometheus", "text/plain", text),
            "/timelines/{id}": reading(
                "timeline", "Who worked when on an answer", "text/html", text, "404", parameters=[_path("id")]
            ),
        },
        "components": components,
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _events(chunk: str) -> dict[str, Any]:
    """Of each event: a chunk, an error after which nothing comes, or the end."""
    one = {"anyOf": [_ref(chunk), _ref("ErrorBody")]}
    written = {"type": "string", "contentMediaType": "application/json", "contentSchema": one}
    data = {"anyOf": [{"const": "[DONE]"}, written]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": _ref("ErrorBody")}}}
        for status in statuses
    }


_MEANINGS = {
    "400": "A field, a setting or the prompt is wrong",
    "401": "The API key is missing or wrong",
    "404": "There is no such thing",
    "408": "The body did not come in time",
    "413": "The body is too long",
    "415": "The body is not said to be JSON",
    "429": "The house is full; Retry-After says when to come again",
    "500": "The generation failed",
    "503": "The models are not there any more",
}
