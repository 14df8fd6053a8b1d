"""The example services over real sockets, with clients that ask, cancel, hang up and send garbage."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi_app
import httpx
import trio
import trio.lowlevel
import trio_service
import uvicorn
from blocking_models import BlockingModel, released_on_exit
from chat_models import target, tokenizer
from faces import on_asyncio
from models import Failing, near
from polling import until_in_asyncio, until_in_trio
from sweeps import sweep

import runtime

# Keeps a failing test from hanging.
HANGS_S = 60

LONG = {"prompt": "a prompt that takes the target several passes to read, since it reads it in short steps"}


# --- the trio service -----------------------------------------------------------------------------


class Customer:
    """A client of the trio service."""

    def __init__(self, connection: trio.SocketStream) -> None:
        self.connection = connection
        self._unread = b""

    async def asks(self, **what: Any) -> None:
        await self.connection.send_all(json.dumps(what).encode() + b"\n")

    async def hears(self) -> dict[str, Any] | None:
        """The next line; None if the service has closed the connection."""
        while b"\n" not in self._unread:
            data = await self.connection.receive_some()
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    async def hears_all(self) -> tuple[str, dict[str, Any]]:
        """A whole text, and the message that ended it."""
        text = ""
        while "end" not in (line := await self.hears() or {"end": "hung up"}):
            text += line["text"]
        return text, line


@contextlib.asynccontextmanager
async def service(of: Any, **options: Any) -> AsyncIterator[tuple[runtime.Runtime, Callable[[], Any]]]:
    """A service in this process, and a function that connects to it."""
    with trio.fail_after(HANGS_S):
        async with (
            runtime.open((of, tokenizer(None)), **options) as rt,
            contextlib.AsyncExitStack() as customers,
            trio.open_nursery() as nursery,
        ):
            served = trio_service.Service(rt)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, served.welcome, listeners)
            port = listeners[0].socket.getsockname()[1]

            async def connect() -> Customer:
                connection = await customers.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
                return Customer(connection)

            yield rt, connect
            nursery.cancel_scope.cancel()


async def text_of(rt: runtime.Runtime, prompt: str, num_tokens: int) -> str:
    return (await rt.generate(prompt, max_tokens=num_tokens)).text


@sweep("way", ["hangs up", "cancels", "asks anew"])
@sweep("stage", ["reading", "writing"])
async def test_a_client_ends_its_text_at_any_stage(way: str, stage: str) -> None:
    held = BlockingModel(target())
    async with service(held) as (rt, connect):
        customer = await connect()
        with released_on_exit(held):
            held.block(after=0 if stage == "reading" else 6)
            await customer.asks(**LONG, max_tokens=1000)
            await held.blocked_in_trio()
            if way == "hangs up":
                await customer.connection.aclose()
            elif way == "cancels":
                await customer.asks(cancel=True)
            else:
                await customer.asks(prompt="x = 1", max_tokens=4)
            if way != "hangs up":
                text, end = await customer.hears_all()
                assert end == {"end": "cancelled"}
                assert bool(text) == (stage == "writing")
            # The target blocks in a forward pass, and nothing waits for it.
            await until_in_trio(lambda: rt.num_streams == (way == "asks anew"))
            held.release()
            if way == "asks anew":
                assert (await customer.hears_all())[1] == {"end": "length"}
            other = await connect()
            await other.asks(prompt="y = 2", max_tokens=4)
            assert await other.hears_all() == (await text_of(rt, "y = 2", 4), {"end": "length"})


async def test_what_is_no_request_gets_its_message_and_loses_the_connection() -> None:
    async with service(target()) as (rt, connect):
        for sent, complaint in [
            (b"hello\n", "JSON object"),
            (b"\xff\xfe\n", "JSON object"),
            (b"[" * 60_000 + b"\n", "JSON object"),
            (b"[1]\n", "a line is"),
            (b"{}\n", "a line is"),
            (b'{"prompt": "x", "self": 1}\n', "no setting 'self'"),
            (b"x" * (trio_service.MAX_LINE + 1), "at most 65,536 bytes"),
        ]:
            customer = await connect()
            await customer.connection.send_all(sent)
            said = await customer.hears()
            assert said["end"] == "error"
            assert complaint in said["error"]
            assert await customer.hears() is None
        # The service answers with the runtime's errors.
        customer = await connect()
        await customer.asks(prompt="x", temperature=-1)
        assert "temperature" in (await customer.hears_all())[1]["error"]
        await customer.asks(prompt="")
        assert "empty" in (await customer.hears_all())[1]["error"]
        await customer.asks(prompt="x = 1", max_tokens=3)
        assert (await customer.hears_all())[1] == {"end": "length"}
        await until_in_trio(lambda: rt.num_streams == 0)


# --- FastAPI --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(of: Any, **options: Any) -> AsyncIterator[tuple[Any, int]]:
    """A FastAPI application under a real uvicorn in this loop, and the port that it listens on."""
    app = fastapi_app.make_app((of, tokenizer(None)), (near(target(), noise=0.05), None), **options)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, ws="none", log_level="warning", lifespan="on", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(HANGS_S):
                yield app, listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def answered(port: int, path: str, **body: Any) -> tuple[int, bytes]:
    """The status and the body."""
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(f"http://127.0.0.1:{port}{path}", content=json.dumps(body), headers=headers)
        return answer.status_code, answer.content


async def request(port: int, path: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


@on_asyncio
async def test_fastapi_answers_at_once_and_piece_by_piece() -> None:
    async with served(target()) as (app, port):
        wanted = (await app.state.runtime.generate("x = 1", max_tokens=12)).text
        status, body = await answered(port, "/generate", prompt="x = 1", max_tokens=12)
        said = json.loads(body)
        assert (status, said["text"], said["finish_reason"], said["num_tokens"]) == (200, wanted, "length", 12)
        status, body = await answered(port, "/stream", prompt="x = 1", max_tokens=12)
        *pieces, end = [json.loads(line) for line in body.splitlines()]
        assert (status, "".join(piece["text"] for piece in pieces)) == (200, wanted)
        assert end == {"finish_reason": "length"}


@sweep(("path", "stage"), [("/generate", "reading"), ("/stream", "writing")])
@on_asyncio
async def test_a_client_of_fastapi_that_hangs_up_cancels_its_text(path: str, stage: str) -> None:
    held = BlockingModel(target())
    async with served(held) as (app, port):
        with released_on_exit(held):
            rt = app.state.runtime
            held.block(after=0 if stage == "reading" else 6)
            reader, writer = await request(port, path, **LONG, max_tokens=1000)
            await held.blocked_in_asyncio()
            if stage == "writing" and path == "/stream":
                assert b"text" in await reader.readuntil(b"}\n")
            assert rt.num_streams == 1
            writer.close()
            # The target blocks in a forward pass, and nothing waits for it.
            await until_in_asyncio(lambda: rt.num_streams == 0)
            held.release()
            status, body = await answered(port, "/generate", prompt="x = 1", max_tokens=4)
            assert (status, json.loads(body)["num_tokens"]) == (200, 4)


@on_asyncio
async def test_what_fails_before_the_first_token_has_a_status() -> None:
    failing, paths = Failing(target()), ("/generate", "/stream")
    async with served(failing) as (_, port):
        for body, wanted, complaint in [
            ({"prompt": "x", "temperature": -1}, 422, "temperature"),
            ({"prompt": "x", "max_tokens": 0}, 422, "max_tokens"),
            ({"prompt": "x", "temperature": float("nan")}, 422, "temperature"),
            ({"prompt": float("nan")}, 422, "prompt"),
            ({"prompt": "x", "colour": "red"}, 422, "colour"),
            ({}, 422, "prompt"),
            ({"prompt": ""}, 400, "empty"),
            ({"prompt": [{"role": "user", "content": "x"}]}, 400, "chat template"),
        ]:
            for path in paths:
                status, said = await answered(port, path, **body)
                assert (path, status, complaint in json.loads(said)["error"]) == (path, wanted, True)
        failing.fails = True
        for path in paths * 2:
            status, said = await answered(port, path, prompt="x = 1")
            assert (path, status, "out of memory" in json.loads(said)["error"]) == (path, 503, True)
