"""The ASGI application: the operations of all APIs and its own, its middleware and its error responses."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.answers.body import IGNORED_HEADER
from runtime.server.anthropic import api as anthropic_api
from runtime.server.anthropic.serializer import AnthropicModel, AnthropicModelList, model_of, models_of
from runtime.server.context import RequestAdmission, ServerContext
from runtime.server.errors import ErrorResponse
from runtime.server.fair_threads import Background, in_thread
from runtime.server.limits import Limits
from runtime.server.middleware import first_part, host_error, key_error
from runtime.server.models.pool import ModelPool
from runtime.server.openai import api as openai_api
from runtime.server.operations import COMMON_ERRORS, Operation, description
from runtime.server.reports import HealthReport, ModelDescription, ModelList, VersionBody, describe, health_report
from runtime.server.responses import api as responses_api
from runtime.tracing.timeline import render, texts_of

_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
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
    """Settings of a server: how much it serves, and to whom."""

    limits: Limits = attrs.field(factory=Limits)
    api_key: str | None = attrs.field(default=None, repr=False)  # see `key_error`
    hosts: Sequence[str] = ("*",)  # see `host_error`
    origins: Sequence[str] = ()  # of web pages that may use the server although another host serves them (CORS)
    is_strict: bool = False  # see `ServerContext`


@attrs.frozen
class _Guard:
    """Middleware that rejects the requests in which a check finds an error."""

    _app: ASGIApp
    _check: Callable[[Scope], ErrorResponse | None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope)
        app = self._app if error is None else _error_response(error, scope["path"])
        await app(scope, receive, send)


@attrs.frozen
class Application:
    """An ASGI application, for a server on trio; made by `application`.

    It takes paths as clients write them: without `/v1`, as for other servers, and with a slash too many. A redirection
    would lead from https to http where a proxy stands in front of the server.

    It adds the headers that every response has. That is no middleware of Starlette's, which would not see the response
    to an unhandled exception.
    """

    app: ASGIApp
    admission: RequestAdmission  # a server that is about to stop drains it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        path = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        # In place: what is noted in the scope later is read outside of here.
        scope["path"] = f"/v1{path}" if first_part(path) in _BELOW_V1 else path
        await self.app(scope, receive, send_with_headers)


def application(models: ModelPool, service: Service, *, background: Background = in_thread) -> Application:
    """The ASGI application. `background` runs long work, such as tokenising prompts, in threads."""
    admission = RequestAdmission(lambda: models.max_streams, service.limits.max_waiting, trio.current_time)
    context = ServerContext(models, service.limits, admission, background, service.is_strict)
    described = partial(
        description, OPERATIONS, models.specs[0].name, has_key=service.api_key is not None, is_strict=service.is_strict
    )

    by_path: dict[str, list[Operation]] = {}
    for each in OPERATIONS:
        by_path.setdefault(each.path, []).append(each)

    async def openapi(request: Request) -> Response:
        # In a thread, and only when asked for: pydantic takes a while to make the schemas the first time.
        return JSONResponse(await context.in_thread(described))

    app = Starlette(
        routes=[
            Mount("/page", _PageFiles(packages=[("runtime", "server/page")])),
            Route("/docs", _page("docs")),
            Mount("/docs", _PageFiles(packages=[("runtime", "server/docs")])),
            Route("/", _page("page")),
            Route("/openapi.json", openapi),
            *(
                Route(path, same[0].endpoint(context), methods=[each.method for each in same])
                for path, same in by_path.items()
            ),
        ],
        middleware=[
            Middleware(_Guard, check=partial(host_error, service.hosts)),
            # Outside of the key's check: a browser's preflight request does not send the key.
            *([_cors(service.origins)] if service.origins else []),
            Middleware(_Guard, check=partial(key_error, service.api_key)),
        ],
        exception_handlers={ErrorResponse: _on_error, HTTPException: _on_http_error, Exception: _on_failure},
    )
    app.router.redirect_slashes = False
    return Application(app, admission)


def _page(folder: str) -> Callable[[Request], Awaitable[Response]]:
    index = resources.files("runtime").joinpath("server", folder, "index.html")

    async def page(request: Request) -> Response:
        return HTMLResponse(index.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    return page


class _PageFiles(StaticFiles):
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
        expose_headers=["Retry-After", "X-Request-Id", "Request-Id", IGNORED_HEADER],
        # Browsers ask whether a public page may use a server on its user's machine.
        allow_private_network=True,
    )


def _error_response(error: ErrorResponse, path: str) -> Response:
    """The response with an error, in the form of the API that a path belongs to."""
    forms = (each.errors for each in OPERATIONS if each.errors is not COMMON_ERRORS and path.startswith(each.path))
    body = next(forms, COMMON_ERRORS).body(error)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


# Exception handlers are async functions, because Starlette runs others in threads.


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorResponse)
    return _error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    there = "/docs lists what there is"
    if path.removeprefix("/v1").startswith("/api/"):
        there = "Ollama's API is not served; use OpenAI's, with a base URL that ends in /v1"
    elif path.startswith("/v1/v1/"):
        # From a client that adds /v1 by itself, as Anthropic's do.
        there = "leave /v1 out of the client's base URL"
    message = error.detail
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} does not support {request.method}; use {allowed}"
    elif error.status_code == 404:
        message = f"there is nothing at {path}; {there}"
        if path.endswith("/embeddings"):
            message = "there are no embeddings here: the served model generates text; ask an embedding model"
    return _error_response(ErrorResponse(error.status_code, message, headers=error.headers), path)


async def _on_failure(request: Request, error: Exception) -> Response:
    message = "the server has failed; its log has the error"
    return _error_response(ErrorResponse(500, message, code="internal_error"), request.url.path)


# --- operations that need no model ----------------------------------------------------------------


def _list_models(context: ServerContext, request: Request) -> ModelList | AnthropicModelList:
    listed = [describe(context.models, spec.name, context.started_at) for spec in context.models.specs]
    return models_of(listed) if _is_anthropic(request) else {"object": "list", "data": listed}


def _model(context: ServerContext, request: Request) -> ModelDescription | AnthropicModel:
    described = describe(context.models, context.find_model(request.path_params["model"]), context.started_at)
    return model_of(described) if _is_anthropic(request) else described


def _is_anthropic(request: Request) -> bool:
    # Both APIs have these paths; Anthropic's clients send the header with every request.
    return "anthropic-version" in request.headers


def _version(context: ServerContext, request: Request) -> VersionBody:
    return {"version": importlib.metadata.version("outrider")}


async def _timeline(context: ServerContext, request: Request) -> Response:
    for loaded in context.models.in_memory():
        if (timeline := loaded.timelines.get(request.path_params["id"])) is not None:
            events, num_lost = list(timeline.events), timeline.num_lost
            texts = await texts_of(events, loaded.runtime.tokenizer)
            html = await context.in_thread(partial(render, events, texts, num_lost=num_lost))
            headers = {"Content-Security-Policy": _TIMELINE_POLICY, "Cache-Control": "no-store"}
            return HTMLResponse(html, headers=headers)
    raise ErrorResponse(
        404,
        "there is no timeline with this id: only the latest streams with include_speculation have one, while their "
        "model is loaded",
    )


async def _health(context: ServerContext, request: Request) -> Response:
    report = health_report(context.models, is_draining=context.admission.is_draining)
    return JSONResponse(report, status_code=503 if report["status"] in ("broken", "draining") else 200)


async def _metrics(context: ServerContext, request: Request) -> Response:
    return Response(generate_latest(context.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _get(path: str, respond: Callable[..., Awaitable[Response]], *description: Any, **fields: Any) -> Operation:
    return Operation(path, lambda context: partial(respond, context), *description, **fields)


def _get_json(path: str, value: Callable[[ServerContext, Request], Any], *description: Any, **fields: Any) -> Operation:
    async def respond(context: ServerContext, request: Request) -> Response:
        return JSONResponse(value(context, request))

    return _get(path, respond, *description, **fields)


OPERATIONS: tuple[Operation, ...] = (
    *openai_api.OPERATIONS,
    *responses_api.OPERATIONS,
    *anthropic_api.OPERATIONS,
    _get_json("/version", _version, "version", "The server's version", VersionBody),
    _get_json("/v1/models", _list_models, "models", "The served models", ModelList),
    _get_json("/v1/models/{model:path}", _model, "model", "A served model", ModelDescription, statuses=("404",)),
    _get(
        "/health",
        _health,
        "health",
        "Whether the server takes requests; degraded while the drafter has ended, hangs or is late",
        HealthReport,
        responses={"200": "Requests are taken", "503": "The target has failed, or the server is stopping"},
    ),
    _get("/metrics", _metrics, "metrics", "Metrics for Prometheus", "text/plain"),
    _get("/timelines/{id}", _timeline, "timeline", "When each model worked on an answer", statuses=("404",)),
)
# First parts of the paths below `/v1`, a prefix that clients of other servers leave out.
_BELOW_V1 = {each.path.split("/")[2] for each in OPERATIONS if each.path.startswith("/v1/")} | {"embeddings"}
