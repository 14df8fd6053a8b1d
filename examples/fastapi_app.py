"""FastAPI on `runtime.aio`: a client that goes away cancels its generation, at whatever stage that is.

    pip install -e '.[examples]'
    python examples/fastapi_app.py
    curl localhost:8000/generate --json '{"prompt": "def quicksort(items):", "max_tokens": 40}'
    curl -N localhost:8000/stream --json '{"prompt": "class Stack:", "max_tokens": 200}'
    curl localhost:8000/health

The runtime lives as long as the application does. Errors are statuses: 422 for what is no request or has a setting out
of its range, 400 for a prompt that will not do, 503 where the models are lost or being closed.

That a client has gone is a message, `http.disconnect`, and nothing else: no server cancels a handler because of it.
FastAPI would let a handler that returns JSON run to its end, and what `StreamingResponse` does while nothing was sent
yet depends on the server: it listens for that message where a server speaks ASGI 2.3, as uvicorn does, and waits for a
`send` to fail where one speaks 2.4. (`request.is_disconnected()` would have to be asked again and again.) So
`unless_gone` waits for the work and for that message at once, in both endpoints, as long as nothing was sent. In a
streaming one that is until the first token: from then on something is sent again and again, and `StreamingResponse`
will do. Waiting for it has another use: what fails before it has a status of its own.
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

MAX_STREAMS = 4  # at the models at the same time; others wait their turn


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str


class Asked(BaseModel):
    """What a client may ask for. Ranges are the runtime's, which says what is wrong with a value."""

    model_config = ConfigDict(extra="forbid")
    prompt: str | list[Message]
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop: list[str] = []


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do something for a client, as long as there is one.

    Raises: ClientGoneError: it has gone, and the work was cancelled; and what the work raises.

    Cancellation: cancels the work.
    """
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
    """Wait until a client, whose request was read, has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def generate(asked: Asked, request: Request) -> dict[str, Any]:
    """The whole text at once."""
    rt: runtime.aio.Runtime = request.app.state.runtime
    completion = await unless_gone(request, rt.generate(**asked.model_dump()))
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.tokens),
        "acceptance_rate": completion.statistics.acceptance_rate,
    }


async def stream(asked: Asked, request: Request) -> StreamingResponse:
    """Lines of JSON, each with a piece of the text; the last one says why it ended."""
    rt: runtime.aio.Runtime = request.app.state.runtime
    tokens = rt.stream(**asked.model_dump())
    first = await unless_gone(request, anext(tokens))
    return StreamingResponse(lines(tokens, first), media_type="application/jsonl")


async def lines(tokens: runtime.aio.TokenStream, first: runtime.Token) -> AsyncIterator[str]:
    """What a streaming answer consists of.

    Cancellation: ends the generation, and so does being closed or dropped.
    """
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


# --- what else a client may be told ---------------------------------------------------------------

# The likeliest first; of what is not here, a 500 is the truth.
STATUSES: dict[type[Exception], int] = {
    runtime.SettingsError: 422,
    runtime.PromptError: 400,
    runtime.RuntimeBrokenError: 503,
    runtime.RuntimeClosedError: 503,
    ClientGoneError: 499,  # nobody sees it but a log
}


async def say_what_failed(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return JSONResponse({"error": str(error)}, status)


async def say_what_is_no_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # FastAPI's own answer repeats what was sent, and fails where JSON cannot say it (NaN).
    said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return JSONResponse({"error": said}, 422)


# --- the application ------------------------------------------------------------------------------


def make_app(target: Any, draft: Any = None, **options: Any) -> FastAPI:
    """An application on a target and a draft model, given as for `runtime.aio.open`."""

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
