"""The ASGI application: its routes, its middleware, and the responses that need no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

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
from starlette.types import ASGIApp

from runtime.server.admission import RequestAdmission
from runtime.server.background import Background, in_thread
from runtime.server.connections.body_memory import BodyMemory
from runtime.server.errors import ErrorResponse
from runtime.server.generation_endpoints import Endpoint, Limits, ServerContext
from runtime.server.grammars.checker import GrammarCheck
from runtime.server.grammars.schemas import Schemas
from runtime.server.metrics import Metrics, service_status
from runtime.server.middleware import ApiKey, CommonHeaders, HostNames
from runtime.server.openai.openapi import description
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses import HealthReport, ModelDescription, ModelList
from runtime.server.preparation import Preparation
from runtime.server.timelines import Timelines

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.grammar import Grammar

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


@attrs.frozen
class Service:
    """Settings of a server: what it serves, and to whom.

    Attributes:
        model: the target's name.
        draft: the drafter's name, or None.
        max_streams: requests that the models work on at once, >= 1; the same as for `runtime.open`.
        max_waiting: further requests that may wait, >= 0.
        limits: of each request.
        api_key: the key that requests to `/v1` must send; None for no key.
        hosts: host names that requests may use, or ["*"] for any; see `HostNames`.
        origins: origins of web pages of other hosts that may use the server (CORS).
    """

    model: str
    draft: str | None = None
    max_streams: int = 4
    max_waiting: int = 256
    limits: Limits = attrs.field(factory=Limits)
    api_key: str | None = attrs.field(default=None, repr=False)
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()


def application(
    runtime: Runtime,
    service: Service,
    timelines: Timelines,
    check: GrammarCheck,
    *,
    background: Background = in_thread,
    any_object: Grammar | None = None,
) -> ASGIApp:
    """The ASGI application, for a server on trio.

    Args:
        runtime: the runtime that generates; its target has a tokenizer.
        service: the settings.
        timelines: the runtime's trace: what was passed to `runtime.open`.
        check: measures the cost of grammars, as `grammar_checker` does.
        background: runs the tokenizer and compiles grammars.
        any_object: see `Schemas`.
    """
    metrics = Metrics(runtime)
    context = ServerContext(
        runtime,
        service.model,
        service.limits,
        RequestAdmission(service.max_streams, service.max_waiting, trio.current_time),
        timelines,
        metrics,
        Preparation(background),
        Schemas(runtime.tokenizer, check, background, service.limits.schema_s, any_object),
        BodyMemory(service.limits.max_bodies_bytes),
    )
    started = int(time.time())
    page = resources.files("runtime").joinpath("server", "page")
    docs = resources.files("runtime").joinpath("server", "docs")
    api_description = description(service.model, has_key=service.api_key is not None)

    async def index(request: Request) -> Response:
        return HTMLResponse(page.joinpath("index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def docs_index(request: Request) -> Response:
        return HTMLResponse(docs.joinpath("index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def models(request: Request) -> Response:
        served: ModelList = {"object": "list", "data": [_model(runtime, service, started)]}
        return JSONResponse(served)

    async def model(request: Request) -> Response:
        if request.path_params["model"] != service.model:
            raise ErrorResponse(404, f"there is no such model here; use {service.model!r}", code="model_not_found")
        return JSONResponse(_model(runtime, service, started))

    async def timeline(request: Request) -> Response:
        html = await timelines.page(request.path_params["id"], runtime.tokenizer, background)
        if html is None:
            raise ErrorResponse(
                404, "there is no timeline with this id: only the latest streams with include_speculation have one"
            )
        return HTMLResponse(html, headers={"Content-Security-Policy": _TIMELINE_POLICY, "Cache-Control": "no-store"})

    async def health(request: Request) -> Response:
        state = runtime.health()
        report: HealthReport = {
            "status": service_status(state),
            "ok": state.ok,
            "target": state.target,
            "draft": state.draft,
            "streams": runtime.num_streams,
            "waiting": runtime.num_waiting,
        }
        return JSONResponse(report, status_code=200 if state.target else 503)

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
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/completions", Endpoint(context, CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(context, ChatRequest), methods=["POST"]),
        ],
        middleware=[
            Middleware(HostNames, names=service.hosts),
            # Outside of the key's check: a browser's preflight request does not send the key.
            *([_cors(service.origins)] if service.origins else []),
            Middleware(ApiKey, key=service.api_key),
        ],
        exception_handlers={ErrorResponse: _error_response, HTTPException: _http_error, Exception: _server_error},
    )
    # Not in Starlette's list of middleware: the response to an unhandled exception is sent outside of that list.
    return CommonHeaders(app)


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
        allow_methods=["GET", "POST"],
        # Any: clients such as OpenAI's for JavaScript send headers of their own, and only the key grants access.
        allow_headers=["*"],
        expose_headers=["Retry-After"],
        # Browsers ask whether a public page may use a server on its user's machine.
        allow_private_network=True,
    )


def _model(runtime: Runtime, service: Service, started: int) -> ModelDescription:
    assert runtime.tokenizer is not None
    return {
        "id": service.model,
        "object": "model",
        "created": started,
        "owned_by": "outrider",
        "draft": service.draft,
        "has_chat_template": bool(runtime.tokenizer.has_chat_template),
    }


# The handlers of exceptions are async functions, because Starlette runs others in threads.


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorResponse)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {404: f"there is nothing at {path}", 405: f"{path} does not support {request.method}"}
    response = ErrorResponse(error.status_code, messages.get(error.status_code, error.detail))
    return JSONResponse(response.body(), status_code=error.status_code, headers=error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    response = ErrorResponse(
        500, "the server has failed; its log has the error", type="server_error", code="internal_error"
    )
    return JSONResponse(response.body(), status_code=500)
