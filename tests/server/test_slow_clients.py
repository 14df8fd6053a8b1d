"""Clients that read slowly, or not at all, and the bytes of their connection; in simulated time."""

from __future__ import annotations

import json
import math
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from asgi import Served, looping, simulated_server
from raw_http import HEAD_END, request
from scripted import ScriptedModel, run
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.server.connections.connection import Connection
from runtime.server.generation_endpoints import Limits

STALLED_S = 2
RATE = 50_000  # bytes a second
ASKED = {"prompt": "def f", "max_tokens": 1500, "logprobs": 20}


class Reader:
    """The server's end of a connection to a client that asks one thing.

    Attributes:
        rate: bytes a second that the client reads.
        heard: that it has read.
        began_at, gone_at: when it was first sent something, and when the server closed the connection.
    """

    def __init__(self, asked: bytes, rate: float) -> None:
        self.rate = rate
        self.heard = b""
        self.began_at = self.gone_at = math.nan
        self.socket = SimpleNamespace(
            family=socket.AF_INET,
            getpeername=lambda: ("127.0.0.1", 50000),
            getsockname=lambda: ("127.0.0.1", 8000),
            close=self._close,
        )
        self._asked = asked

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        asked, self._asked = self._asked, b""
        if not asked:
            await trio.sleep_forever()
        return asked

    async def send_all(self, data: bytes) -> None:
        if math.isnan(self.began_at):
            self.began_at = trio.current_time()
        await trio.sleep(len(data) / self.rate if self.rate else math.inf)
        self.heard += data

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    def _close(self) -> None:
        self.gone_at = trio.current_time()


async def read_by(app: Any, body: Any, *, rate: float) -> Reader:
    """What becomes of a request whose client reads at a rate."""
    reader = Reader(request("POST", "/v1/completions", body, headers={"Connection": "close"}), rate)
    connection = Connection(
        app,
        reader,  # type: ignore[arg-type]
        trio.Event(),
        stalled_s=STALLED_S,
        idle_s=math.inf,
    )
    await connection.run()
    return reader


def with_slow_clients(test: Any) -> None:
    """Run a test with a server that has little patience."""
    simulated_server(test, ScriptedModel(looping), limits=Limits(stalled_s=STALLED_S))


def test_who_reads_steadily_gets_all_of_a_long_answer_however_slowly() -> None:
    async def test(server: Served) -> None:
        expected = (await server.ask("/v1/completions", ASKED)).json["choices"]
        head, _, body = (await read_by(server.app, ASKED, rate=RATE)).heard.partition(HEAD_END)
        assert len(body) > 5 * RATE * STALLED_S
        assert b"content-length: %d\r\n" % len(body) in head
        assert json.loads(body)["choices"] == expected

    with_slow_clients(test)


def test_what_an_application_sends_at_once_may_be_read_slowly() -> None:
    whole = bytes(5 * RATE * STALLED_S)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(whole)(scope, receive, send)

    async def test() -> None:
        assert (await read_by(app, {}, rate=RATE)).heard.endswith(HEAD_END + whole)

    run(test)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_who_reads_nothing_is_cut_off_when_its_time_is_over(stream: bool) -> None:
    async def test(server: Served) -> None:
        reader = await read_by(server.app, {**ASKED, "stream": stream}, rate=0)
        assert reader.heard == b""
        assert reader.gone_at - reader.began_at == STALLED_S
        assert server.simulation.runtime.num_streams == 0

    with_slow_clients(test)
