"""Clients that read slowly, or not at all, and the bytes of their connection; in simulated time."""

import json
import math
import re
import socket
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from asgi import DEF, STREAMED, looping, on_server, watched_streams
from raw_http import HEAD_END, request
from scripted import priced
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.server.answers import endpoint
from runtime.server.connections.connection import ClientConnection
from runtime.server.limits import Limits

STALLED_S = 2
RATE = 50_000  # bytes a second
FAST = priced(prefill=2**-10, decode=2**-10, verify=2**-10, probe=2**-10)


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
    connection = ClientConnection(app, reader, trio.Event(), stalled_s=STALLED_S, idle_s=math.inf)
    await connection.run()
    return reader


# A server that has little patience.
impatient = on_server(looping, limits=Limits(stalled_s=STALLED_S), price=FAST)


async def test_what_an_application_sends_at_once_may_be_read_slowly(autojump_clock):
    whole = bytes(5 * RATE * STALLED_S)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(whole)(scope, receive, send)

    assert (await read_by(app, {}, rate=RATE)).heard.endswith(HEAD_END + whole)


@STREAMED
@impatient
async def test_who_reads_nothing_is_cut_off_when_its_time_is_over(server, stream):
    reader = await read_by(server.app, {**DEF, "max_tokens": 200, "stream": stream}, rate=0)
    assert (reader.heard, reader.gone_at - reader.began_at) == (b"", STALLED_S)
    assert server.simulation.runtime.num_streams == 0


@impatient
async def test_clients_that_read_nothing_do_not_keep_the_places_of_others(server):
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(partial(read_by, server.app, {**DEF, "max_tokens": 200, "stream": True}, rate=0))
        await trio.testing.wait_all_tasks_blocked()
        answer = await server.ask("/v1/completions", {**DEF, "max_tokens": 4})
        assert answer.status == 200
        assert trio.current_time() < STALLED_S
        assert server.simulation.runtime.num_streams == 0


@impatient
async def test_what_waits_for_a_client_that_reads_slowly_is_bounded(server, monkeypatch):
    num_logprobs, max_buffered = 7, 100
    monkeypatch.setattr(endpoint, "_MAX_BUFFERED", max_buffered * (1 + num_logprobs))
    asked = {**DEF, "max_tokens": 300, "logprobs": num_logprobs, "stream": True}
    streams = watched_streams(server)
    async with server.exchange("/v1/completions", asked) as client:
        client.is_stalled = True
        await trio.testing.wait_all_tasks_blocked()
        [(_, stream)] = streams
        await trio.sleep(STALLED_S / 2)
        # Beside those that wait, one waits for room.
        assert stream.statistics().generated_tokens == max_buffered + 1
        client.leave()


@impatient
async def test_what_has_waited_for_a_client_comes_whole_and_in_pieces(server):
    asked = {**DEF, "max_tokens": 500, "logprobs": 7, "stream": True}
    expected = (await server.ask("/v1/completions", {**asked, "stream": False})).json["choices"][0]
    options = {"include_usage": True, "continuous_usage_stats": True}
    reader = await read_by(server.app, {**asked, "stream_options": options}, rate=RATE)
    *chunks, last = [json.loads(data) for data in re.findall(rb"data: ({.*})\n", reader.heard)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    named = [len((choice["logprobs"] or {"tokens": ()})["tokens"]) for choice in choices]
    assert max(named) == 64
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(accumulate(named))
    assert last["usage"]["completion_tokens"] == 500
