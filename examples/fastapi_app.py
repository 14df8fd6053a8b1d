"""FastAPI on `runtime.aio`: a client that disconnects cancels its generation at any stage.

    pip install -e '.[examples]'
    python examples/fastapi_app.py
    curl localhost:8000/generate --json '{"prompt": "def quicksort(items):", "max_tokens": 40}'
    curl -N localhost:8000/stream --json '{"prompt": "class Stack:", "max_tokens": 200}'
    curl localhost:8000/health

The runtime lives as long as the application. Errors have statuses: 422 for an invalid request or setting, 400 for a
prompt that cannot be used, 503 if the models are lost or being closed.

A server reports a disconnected client only by the message `http.disconnect`, and cancels no handler: FastAPI lets a
handler that returns JSON run to its end, and before anything is sent, `StreamingResponse` notices only with ASGI 2.3.
So until something is sent (for a stream, the first token), `unless_gone` waits for both the work and that message.
Waiting for the first token also gives an early error its own status. (`request.is_disconnected()` would be polling.)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

import runtime

T = TypeVar("T")

MAX_STREAMS = 4  # streams that generate at once; others wait


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str


class Asked(BaseModel):
    """The body of a request. The runtime checks the ranges, and the client gets its error messages."""

    model_config = ConfigDict(extra="forbid")
    prompt: str | list[Message]
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop: list[str] = []


class ClientGoneError(Exception):
    """The client disconnected before its answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await some work, and cancel it if the client disconnects, which raises `ClientGoneError`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def gone(request: Request) -> None:
    """Wait until the client disconnects; its request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def generate(asked: Asked, request: Request) -> dict[str, Any]:
    """Answer with the whole text."""
    rt: runtime.aio.Runtime = request.app.state.runtime
    completion = await unless_gone(request, rt.generate(**asked.model_dump()))
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.tokens),
        "acceptance_rate": completion.statistics.acceptance_rate,
    }


async def stream(asked: Asked, request: Request) -> StreamingResponse:
    """Answer with lines of JSON, each with a piece of the text; the last one has the reason why it ended."""
    rt: runtime.aio.Runtime = request.app.state.runtime
    tokens = rt.stream(**asked.model_dump())
    first = await unless_gone(request, anext(tokens))
    return StreamingResponse(lines(tokens, first), media_type="application/jsonl")


async def lines(tokens: runtime.aio.TokenStream, first: runtime.Token) -> AsyncIterator[str]:
    """The lines of a streaming answer. Cancelling, closing or dropping them ends the generation."""
    async with tokens:
        try:
            yield line(text=first.text)
            async for token in tokens:
                if token.text:
                    yield line(text=token.text)
            yield line(finish_reason=tokens.finish_reason)
        except runtime.OutriderError as error:
            yield line(error=str(error))


def line(**message: Any) -> str:
    return json.dumps(message) + "\n"


async def health(request: Request) -> dict[str, int]:
    rt: runtime.aio.Runtime = request.app.state.runtime
    return {"streams": rt.num_streams, "waiting": rt.num_waiting}


# --- errors ---------------------------------------------------------------------------------------

# Other errors are bugs, and get status 500.
STATUSES: dict[type[Exception], int] = {
    runtime.SettingsError: 422,
    runtime.PromptError: 400,
    runtime.RuntimeBrokenError: 503,
    runtime.RuntimeClosedError: 503,
    ClientGoneError: 499,  # only a log shows it
}


async def say_what_failed(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return JSONResponse({"error": str(error)}, status)


async def say_what_is_no_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # FastAPI's own answer repeats the input, and fails if JSON cannot express it (NaN).
    said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return JSONResponse({"error": said}, 422)


# --- the application ------------------------------------------------------------------------------


def make_app(target: Any, draft: Any = None, **options: Any) -> FastAPI:
    """An application with a runtime of its own; arguments as for `runtime.aio.open`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with runtime.aio.open(target, draft=draft, **options) as app.state.runtime:
            yield

    app = FastAPI(title="Outrider", lifespan=lifespan)
    for kind in STATUSES:
        app.add_exception_handler(kind, say_what_failed)
    app.add_exception_handler(RequestValidationError, say_what_is_no_request)
    app.post("/generate")(generate)
    app.post("/stream", response_model=None)(stream)
    app.get("/health")(health)
    return app


app = make_app(runtime.DEMO_TARGET, runtime.DEMO_DRAFT, max_streams=MAX_STREAMS)

if __name__ == "__main__":
    uvicorn.run(app, port=8000)
