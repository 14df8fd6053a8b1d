"""The application: which address answers what, and who may ask."""

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
from runtime.server.endpoint import Endpoint, Limits, ServerContext
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.checker import GrammarCheck
from runtime.server.grammars.schemas import Schemas
from runtime.server.metrics import Metrics, service_status
from runtime.server.middleware import AlwaysHeaders, ApiKey, HostNames
from runtime.server.openai.openapi import description
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.timelines import Timelines

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# It may be a newer one by the next time, of which no part may be left from before.
_PAGE_HEADERS = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"}
# What is inline there is ours; what a model wrote is data.
_TIMELINE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


@attrs.frozen
class Service:
    """What a server offers, and to whom.

    Attributes:
        model: what the target is called.
        draft: what drafts for it, or None.
        max_streams: requests that the models work on at once, >= 1; `runtime.open` has the same.
        max_waiting: requests that may wait beside those, >= 0.
        limits: for each.
        api_key: what `/v1` is to be asked with, or None for anybody.
        hosts: names under which the server may be asked for, which keeps out pages of other hosts whose name was made
            to point here; ["*"] for any.
        origins: of pages of other hosts that may use the server.
    """

    model: str
    draft: str | None = None
    max_streams: int = 4
    max_waiting: int = 32
    limits: Limits = attrs.field(factory=Limits)
    api_key: str | None = attrs.field(default=None, repr=False)
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()


def application(
    runtime: Runtime, service: Service, timelines: Timelines, check: GrammarCheck, *, aside: Background = in_thread
) -> ASGIApp:
    """An ASGI application, for a server on trio.

    Args:
        runtime: whose models answer; its target has a tokenizer.
        service: what is offered.
        timelines: that the runtime was opened with, as its trace.
        check: tries out grammars, as `grammar_checker` does.
        aside: see `Background`.
    """
    meters = Metrics(runtime)
    house = RequestAdmission(service.max_streams, service.max_waiting, trio.current_time)
    schemas = Schemas(runtime.tokenizer, check, aside, service.limits.schema_s)
    desk = ServerContext(runtime, service.model, service.limits, house, timelines, meters, aside, schemas)
    started = int(time.time())
    page = resources.files("runtime").joinpath("server", "page")
    docs = resources.files("runtime").joinpath("server", "docs")
    described = description(service.model, has_key=service.api_key is not None)

    async def index(request: Request) -> Response:
        return HTMLResponse(
            page.joinpath("index.html").read_text(encoding="utf-8"),
            headers=_PAGE_HEADERS,
        )

    async def docs_index(request: Request) -> Response:
        return HTMLResponse(docs.joinpath("index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(runtime, service, started)]})

    async def model(request: Request) -> Response:
        if request.path_params["model"] != service.model:
            raise ErrorResponse(404, f"there is no such model here; it is {service.model!r}", code="model_not_found")
        return JSONResponse(_model(runtime, service, started))

    async def timeline(request: Request) -> Response:
        found = await timelines.page(request.path_params["id"], runtime.tokenizer)
        if found is None:
            raise ErrorResponse(404, "this answer is not remembered, or was not watched")
        return HTMLResponse(found, headers={"Content-Security-Policy": _TIMELINE_POLICY, "Cache-Control": "no-store"})

    async def health(request: Request) -> Response:
        state = runtime.health()
        return JSONResponse(
            {
                "status": service_status(state),
                "ok": state.ok,
                "target": state.target,
                "draft": state.draft,
                "streams": runtime.num_streams,
                "waiting": runtime.num_waiting,
            },
            status_code=200 if state.target else 503,
        )

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(meters.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    app = Starlette(
        routes=[
            Route("/", index),
            Mount("/page", _PageFiles(packages=[("runtime", "server/page")])),
            Route("/docs", docs_index),
            Mount("/docs", _PageFiles(packages=[("runtime", "server/docs")])),
            Route("/timelines/{id}", timeline),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/completions", Endpoint(desk, CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(desk, ChatRequest), methods=["POST"]),
        ],
        middleware=[
            Middleware(HostNames, names=service.hosts),
            # Before the key, which a browser does not send along when it asks whether it may.
            *([_origins(service.origins)] if service.origins else []),
            Middleware(ApiKey, key=service.api_key),
        ],
        exception_handlers={ErrorResponse: _refused, HTTPException: _not_found, Exception: _failed},
    )
    # Not among the others: those are within what answers a failure of the application.
    return AlwaysHeaders(app)


class _PageFiles(StaticFiles):
    """What the page is made of, with the headers that it has itself."""

    def file_response(self, *arguments: Any, **keywords: Any) -> Response:
        response = super().file_response(*arguments, **keywords)
        response.headers.update(_PAGE_HEADERS)
        return response


def _origins(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        # Any: clients have headers of their own, as OpenAI's for JavaScript, and none opens a door here but the key.
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


def _model(runtime: Runtime, service: Service, started: int) -> dict[str, Any]:
    assert runtime.tokenizer is not None
    return {
        "id": service.model,
        "object": "model",
        "created": started,
        "owned_by": "outrider",
        "draft": service.draft,
        "has_chat_template": bool(runtime.tokenizer.has_chat_template),
    }


# Coroutines: what is none, Starlette has done by a thread.


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorResponse)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    refusal = ErrorResponse(error.status_code, said.get(error.status_code, error.detail))
    return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    refusal = ErrorResponse(500, "the server has failed; its log says how", type="server_error", code="internal_error")
    return JSONResponse(refusal.body(), status_code=500)
