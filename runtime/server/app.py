"""The ASGI application: its routes, its middleware, and the responses that need no model."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import attrs
import trio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.server.admission import RequestAdmission
from runtime.server.answers.ignored_fields import IGNORED_HEADER
from runtime.server.anthropic.api import Messages
from runtime.server.anthropic.token_count import TokenCountEndpoint
from runtime.server.connections.client import BodyMemory
from runtime.server.errors import ErrorResponse
from runtime.server.fair_threads import Background, FairThreads, in_thread
from runtime.server.generation_endpoints import Endpoint, Limits, ServerContext, find_model
from runtime.server.metrics import Metrics
from runtime.server.middleware import ApiKey, CommonHeaders, HostNames, UnversionedPaths
from runtime.server.models.pool import ModelPool
from runtime.server.models.reports import describe, health_report, properties
from runtime.server.openai.api import Chats, Completions, Fims
from runtime.server.openai.openapi import description
from runtime.server.openai.responses import ModelList, Version
from runtime.server.responses.api import Responses, StoredResponses
from runtime.server.responses.store import ResponseStore
from runtime.server.tokenizer_endpoints import DetokenizeEndpoint, TokenizeEndpoint

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Not cached: after an update of the server, no file of an old page may be mixed with a new one.
_PAGE_HEADERS = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"}
# The page of a timeline is one file with inline scripts, which are ours; the text of a model is data in it.
_TIMELINE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

# Paths of other servers, beside those that are answered: what they stand for is asked for at another path.
_SAME_ELSEWHERE = {
    "/completion": "use /v1/completions, in OpenAI's form",
    "/infill": "use /v1/fim/completions, in Mistral's form",
}


@attrs.frozen
class Service:
    """Settings of a server: how much it serves, and to whom.

    Attributes:
        max_waiting: requests that may wait, >= 0, beside as many as a model works on at once.
        limits: of each request.
        api_key: the key that requests must send, except for the pages and for figures; None for no key.
        hosts: host names that requests may use, or ["*"] for any; see `HostNames`.
        origins: origins of web pages of other hosts that may use the server (CORS).
        is_strict: whether what means nothing here is refused instead of ignored; see `ServerContext`.
    """

    max_waiting: int = 256
    limits: Limits = attrs.field(factory=Limits)
    api_key: str | None = attrs.field(default=None, repr=False)
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()
    is_strict: bool = False


@attrs.frozen
class Application:
    """An ASGI application, for a server on trio; made by `application`.

    Attributes:
        app: answers the requests.
        admission: of its requests. A server that is about to stop drains it, which `/health` reports.
    """

    app: ASGIApp
    admission: RequestAdmission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def application(
    models: ModelPool,
    service: Service,
    *,
    background: Background = in_thread,
) -> Application:
    """The ASGI application, for a server on trio.

    Args:
        models: those that generate.
        service: the settings.
        background: runs the tokenizer, and makes long responses.
    """
    admission = RequestAdmission(lambda: models.max_streams, service.max_waiting, trio.current_time)
    metrics = Metrics(models, is_draining=lambda: admission.is_draining)
    context = ServerContext(
        models,
        service.limits,
        admission,
        metrics,
        FairThreads(background),
        FairThreads(background),
        BodyMemory(service.limits.max_bodies_bytes),
        is_strict=service.is_strict,
    )
    responses = ResponseStore(service.limits.max_stored_responses, service.limits.max_stored_bytes)
    stored_responses = StoredResponses(responses).__call__
    started = int(time.time())
    page = resources.files("runtime").joinpath("server", "page")
    docs = resources.files("runtime").joinpath("server", "docs")
    api_description = description(
        models.specs[0].name, has_key=service.api_key is not None, is_strict=service.is_strict
    )

    async def index(request: Request) -> Response:
        return HTMLResponse(page.joinpath("index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def docs_index(request: Request) -> Response:
        return HTMLResponse(docs.joinpath("index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def list_models(request: Request) -> Response:
        listed = [describe(models, spec.name, started) for spec in models.specs]
        served: ModelList = {"object": "list", "data": listed}
        return JSONResponse(served)

    async def model(request: Request) -> Response:
        name = find_model(models, request.path_params["model"])
        return JSONResponse(describe(models, name, started))

    async def version(request: Request) -> Response:
        report: Version = {"version": importlib.metadata.version("outrider")}
        return JSONResponse(report)

    async def props(request: Request) -> Response:
        return JSONResponse(properties(models))

    async def timeline(request: Request) -> Response:
        for loaded in models.in_memory():
            html = await loaded.timelines.page(request.path_params["id"], loaded.runtime.tokenizer, background)
            if html is not None:
                headers = {"Content-Security-Policy": _TIMELINE_POLICY, "Cache-Control": "no-store"}
                return HTMLResponse(html, headers=headers)
        raise ErrorResponse(
            404,
            "there is no timeline with this id: only the latest streams with include_speculation have one, while their "
            "model is loaded",
        )

    async def health(request: Request) -> Response:
        report = health_report(models, is_draining=admission.is_draining)
        return JSONResponse(report, status_code=503 if report["status"] in ("broken", "draining") else 200)

    async def prometheus(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(request: Request) -> Response:
        return JSONResponse(api_description)

    app = Starlette(
        routes=[
            Route("/", index),
            Mount("/page", _PageFiles(packages=[("runtime", "server/page")])),
            Route("/docs", docs_index),
            Mount("/docs", _PageFiles(packages=[("runtime", "server/docs")])),
            Route("/timelines/{id}", timeline),
            Route("/health", health),
            Route("/metrics", prometheus),
            Route("/openapi.json", openapi),
            Route("/version", version),
            Route("/v1/props", props),
            Route("/v1/tokenize", TokenizeEndpoint(context), methods=["POST"]),
            Route("/v1/detokenize", DetokenizeEndpoint(context), methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/completions", Endpoint(context, Completions()), methods=["POST"]),
            Route("/v1/fim/completions", Endpoint(context, Fims()), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(context, Chats()), methods=["POST"]),
            Route("/v1/responses", Endpoint(context, Responses(responses)), methods=["POST"]),
            Route("/v1/responses/{id}", stored_responses, methods=["GET", "DELETE"]),
            Route("/v1/messages", Endpoint(context, Messages()), methods=["POST"]),
            Route("/v1/messages/count_tokens", TokenCountEndpoint(context), methods=["POST"]),
        ],
        middleware=[
            Middleware(UnversionedPaths),
            Middleware(HostNames, names=service.hosts),
            # Outside of the key's check: a browser's preflight request does not send the key.
            *([_cors(service.origins)] if service.origins else []),
            Middleware(ApiKey, key=service.api_key),
        ],
        exception_handlers={ErrorResponse: _error_response, HTTPException: _http_error, Exception: _server_error},
    )
    # Not in Starlette's list of middleware: the response to an unhandled exception is sent outside of that list.
    return Application(CommonHeaders(app), admission)


class _PageFiles(StaticFiles):
    """The files of a page, with the headers of the page itself."""

    def file_response(self, *arguments: Any, **keywords: Any) -> Response:
        response = super().file_response(*arguments, **keywords)
        response.headers.update(_PAGE_HEADERS)
        return response


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        # Any: clients such as OpenAI's for JavaScript send headers of their own, and only the key grants access.
        allow_headers=["*"],
        expose_headers=["Retry-After", IGNORED_HEADER],
        # Browsers ask whether a public page may use a server on its user's machine.
        allow_private_network=True,
    )


# The handlers of exceptions are async functions, because Starlette runs others in threads.


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorResponse)
    return JSONResponse(error.body(request.url.path), status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    there = _SAME_ELSEWHERE.get(path.removeprefix("/v1"), "/docs lists what there is")
    if path.removeprefix("/v1").startswith("/api/"):
        there = "Ollama's API is not served; use OpenAI's, with a base URL that ends in /v1"
    elif path.startswith("/v1/v1/"):
        # Of a client that adds /v1 by itself, as Anthropic's do.
        there = "leave /v1 out of the client's base URL"
    allowed = (error.headers or {}).get("Allow", "another method")
    messages = {
        404: f"there is nothing at {path}; {there}",
        405: f"{path} does not support {request.method}; use {allowed}",
    }
    if path.endswith("/embeddings"):
        messages[404] = "there are no embeddings here: the served model generates text; ask an embedding model"
    response = ErrorResponse(error.status_code, messages.get(error.status_code, error.detail))
    return JSONResponse(response.body(request.url.path), status_code=error.status_code, headers=error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    response = ErrorResponse(
        500, "the server has failed; its log has the error", type="server_error", code="internal_error"
    )
    return JSONResponse(response.body(request.url.path), status_code=500)
