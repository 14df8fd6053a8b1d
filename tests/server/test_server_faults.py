"""What a client, a model or the network can do to a server, on real sockets; the models are scripted."""

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from asgi import pool_of
from raw_http import HEAD_END, Answer, Client, ask, connect, request
from sample_tokenizers import OneLetterTokenizer
from scripted import ScriptedModel, Simulation, agreeing, continuation, priced, simulated, truthful
from sweeps import sweep

from runtime.server.answers import endpoint
from runtime.server.app import Service, application
from runtime.server.connections.connection import serve
from runtime.server.limits import Limits
from runtime.server.timelines import Timelines

PROMPT = "outrider"
NUM_TOKENS = 4

# So that nobody is told to come back later.
MANY = 10_000

# Nothing here takes long, but a machine may be busy.
LONG_S = 60


class Spelling(OneLetterTokenizer):
    """A tokenizer that can read, too."""

    has_chat_template = False
    bos_token = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.ALPHABET.index(letter) for letter in text]


def true_text(num_tokens: int = NUM_TOKENS) -> str:
    """What the models say after the prompt."""
    return Spelling().decode(continuation(Spelling().encode(PROMPT), num_tokens))


def completion(*, num_tokens: int = NUM_TOKENS, **more: Any) -> bytes:
    return request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": num_tokens, "lookahead": 3, **more})


def chat(**more: Any) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    return request("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": NUM_TOKENS, **more})


PLAIN = {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
post = partial(request, "POST", "/v1/completions")
REQUESTS = {
    "a completion": completion(),
    "a streamed completion": completion(stream=True),
    "a chat": chat(),
    "a streamed chat": chat(stream=True, stream_options={"include_usage": True, "include_speculation": True}),
    "a body in chunks": post(PLAIN, chunks=7),
    "a question before the body": post(PLAIN, headers={"Expect": "100-continue"}),
    "HTTP/1.0": post(PLAIN, version="1.0"),
    "two at once": completion(stream=True) + request("GET", "/v1/models"),
    "health": request("GET", "/health"),
}


def way_after(num_bytes: int) -> Callable[[Client], None]:
    """How a client goes after so many bytes: it leaves or, after an odd number, resets the connection."""
    return Client.reset if num_bytes % 2 else Client.leave


@attrs.define
class Served:
    """A server in the test's own event loop.

    Attributes:
        port: at which it listens.
        simulation: the models.
        stop: ends it.
        is_over: set when it has ended.
        most: tasks of the whole process, and open files, while one client is there.
    """

    port: int
    simulation: Simulation
    stop: trio.Event = attrs.field(factory=trio.Event)
    is_over: trio.Event = attrs.field(factory=trio.Event)
    most: tuple[int, int] = (MANY, MANY)

    async def health(self) -> Answer:
        return await ask(self.port, REQUESTS["health"])

    async def settled(self) -> tuple[int, int]:
        """Return when nothing is left of anybody but the server: the tasks and open files then.

        Whoever goes is not waited for by the server, so it may take some turns of the event loop.
        """
        with await connect(self.port) as doctor:
            while True:
                await doctor.send(REQUESTS["health"])
                if (answer := await doctor.answer()) is None:
                    break  # a connection is good for a thousand requests
                there = trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))
                state = answer.json()
                if state["streams"] == state["waiting"] == 0 and all(
                    n <= m for n, m in zip(there, self.most, strict=True)
                ):
                    return there
        return await self.settled()

    async def assert_unharmed(self) -> None:
        """Nothing is left of anybody, and whoever comes is answered."""
        await self.settled()
        answer = await self.health()
        assert (answer.status, answer.json()["ok"]) == (200, True)
        answer = await ask(self.port, completion())
        assert (answer.status, answer.text) == (200, true_text())
        await self.settled()


@asynccontextmanager
async def served(*, seconds: float = 0.0, sending_bytes: int | None = None, **limits: Any) -> AsyncIterator[Served]:
    """A server over scripted models that mostly agree.

    Args:
        seconds: that a pass takes.
        sending_bytes: room for what clients have not read.
        limits: the server's, see `Limits`.
    """
    bounds = Limits(max_waiting=MANY, **limits)
    price = priced(prefill=seconds, draft=seconds / 8, verify=seconds, decode=seconds, probe=seconds)
    # Warm what is imported or made late, such as the selector of threads.
    await trio.to_thread.run_sync(lambda: None)
    async with (
        simulated(
            ScriptedModel(truthful), ScriptedModel(agreeing(0.7)), tokenizer=Spelling(), max_streams=4, price=price
        ) as simulation,
        pool_of(simulation.runtime, "scripted", Timelines()) as models,
    ):
        app = application(models, Service(bounds))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=MANY)
        port = listeners[0].socket.getsockname()[1]
        if sending_bytes is not None:
            listeners[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending_bytes)
        with trio.fail_after(LONG_S):
            async with trio.open_nursery() as nursery:
                server = Served(port, simulation)

                async def drain() -> None:
                    app.admission.drain()
                    await app.admission.wait_drained()

                async def run() -> None:
                    await serve(app, listeners, server.stop.wait, bounds, drain)
                    server.is_over.set()

                nursery.start_soon(run)
                await ask(port, completion())
                await trio.testing.wait_all_tasks_blocked(0.01)
                server.most = await server.settled()
                yield server
                server.stop.set()


async def told(client: Client, asked: bytes = b"") -> Answer:
    """The next answer that a client gets, once it has asked for something."""
    if asked:
        await client.send(asked)
    answer = await client.answer()
    assert answer is not None
    return answer


@asynccontextmanager
async def client_of(**options: Any) -> AsyncIterator[tuple[Client, Served]]:
    """A client of a server of its own, which is unharmed once the client has gone."""
    async with served(**options) as server:
        with await connect(server.port) as client:
            yield client, server
        await server.assert_unharmed()


async def all_at_once(number: int, do: Callable[[int], Awaitable[None]]) -> None:
    """For each of so many; a few hundred at a time."""
    for begin in range(0, number, 250):
        async with trio.open_nursery() as nursery:
            for n in range(begin, min(begin + 250, number)):
                nursery.start_soon(do, n)


@pytest.fixture(autouse=True)
def _nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> Any:
    """A test says what it means to have there by clearing it."""
    yield
    assert [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING] == []


# --- at every byte --------------------------------------------------------------------------------


@sweep("kind", REQUESTS)
async def test_a_client_that_goes_after_any_byte_of_its_request_leaves_nothing(kind):
    async with served() as server:

        async def go(num_bytes: int) -> None:
            with await connect(server.port) as client:
                await client.send(REQUESTS[kind][:num_bytes])
                way_after(num_bytes)(client)

        await all_at_once(len(REQUESTS[kind]) + 1, go)
        await server.assert_unharmed()


# Every so many bytes of an answer are tried.
STEP = 61


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_client_that_goes_after_any_byte_of_its_answer_leaves_nothing(kind):
    async with served(idle_s=0.5) as server:

        async def go(num_bytes: int) -> None:
            with await connect(server.port) as client:
                await client.send(REQUESTS[kind])
                await client.hear(num_bytes * STEP)
                way_after(num_bytes)(client)

        # In how many pieces a stream comes is a matter of chance. Where fewer do, the server's patience ends it.
        with await connect(server.port) as client:
            await client.send(REQUESTS[kind])
            num_bytes = len(await client.hear_all())
        await all_at_once(num_bytes // STEP + 2, go)
        await server.assert_unharmed()


@pytest.mark.slow
@sweep("kind", REQUESTS)
async def test_a_client_that_falls_silent_after_any_byte_of_its_request_is_let_go(kind):
    async with served(idle_s=0.2, body_s=0.2) as server:
        statuses: list[int] = []

        async def fall_silent(num_bytes: int) -> None:
            with await connect(server.port) as client:
                await client.send(REQUESTS[kind][:num_bytes])
                while (answer := await client.answer()) is not None:
                    assert answer.is_whole
                    statuses.append(answer.status)

        await all_at_once(len(REQUESTS[kind]) + 1, fall_silent)
        assert 200 in statuses
        assert set(statuses) <= {200, 408}
        await server.assert_unharmed()


# --- what is not the request that was expected ----------------------------------------------------


@sweep(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), 400),  # TLS
        (b"\r\n\x00\xff nonsense \r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2**17, 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 505),
        (b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n", 505),
    ],
)
async def test_what_is_no_request_is_answered_and_is_the_last_of_its_connection(garbage, status):
    async with client_of() as (client, _):
        answer = await told(client, garbage)
        assert (answer.status, answer.is_whole) == (status, True)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert await client.hear_all() == b""


async def test_an_error_in_place_of_an_answer_to_a_head_request_has_no_body():
    async with client_of() as (client, _):
        await client.send(request("HEAD", "/health", headers={"Transfer-Encoding": "chunked"}) + b"no length\r\n")
        status, _ = await client.head() or (0, {})
        assert status == 400
        assert await client.hear_all() == b""


@sweep("stream", [False, True])
@sweep("behind", [b"\r\n", REQUESTS["health"]])
@sweep(("version", "headers"), [("1.0", {}), ("1.1", {"Connection": "close"})])
async def test_what_comes_behind_a_last_request_is_no_error(version, headers, behind, stream):
    async with client_of() as (client, _):
        asked = post({**PLAIN, "stream": stream}, version=version, headers=headers)
        answer = await told(client, asked + behind)
        assert (answer.status, answer.text) == (200, true_text())
        assert await client.hear_all() == b""


async def test_a_length_beside_a_transfer_encoding_does_not_count_and_ends_the_connection():
    async with client_of() as (client, _):
        both = REQUESTS["a body in chunks"].replace(b"Host:", b"Content-Length: 999999999\r\nHost:", 1)
        answer = await told(client, both + REQUESTS["health"])
        assert (answer.status, answer.text, answer.headers["connection"]) == (200, true_text(), "close")
        assert await client.hear_all() == b""


@sweep("at", ["within the body", "within a chunk"])
async def test_garbage_in_a_body_ends_the_request(at):
    async with client_of() as (client, _):
        head, _, body = REQUESTS["a body in chunks"].partition(HEAD_END)
        garbage = body[:24] + b"no length\r\n" if at == "within the body" else b"3\r\nfour\r\n"
        assert (await told(client, head + HEAD_END + garbage)).status == 400
        assert await client.hear_all() == b""


HTTP2 = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
KEY = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIA=="}


@sweep("upgrade", [HTTP2, {"Connection": "Upgrade", "Upgrade": "websocket", **KEY}])
async def test_other_protocols_are_not_changed_to(upgrade):
    async with client_of() as (client, _):
        for _ in range(2):
            answer = await told(client, request("GET", "/health", headers=upgrade))
            assert (answer.status, answer.json()["ok"]) == (200, True)


async def test_two_requests_at_once_are_answered_in_turn_on_one_connection():
    async with client_of() as (client, _):
        first = await told(client, REQUESTS["two at once"] + completion())
        second, third = await told(client), await told(client)
        assert (first.text, second.json()["object"], third.text) == (true_text(), "list", true_text())


@sweep("stream", [False, True])
@sweep("behind", [b"\r\n", REQUESTS["health"]])
async def test_a_client_with_more_to_say_that_leaves_is_heard_to_leave(behind, stream):
    async with client_of(seconds=0.001) as (client, server):
        await client.send(completion(num_tokens=10**6, stream=stream) + behind)
        while (await server.health()).json()["streams"] == 0:
            pass


async def test_the_answer_to_head_is_that_to_get_without_its_body():
    async with served() as server:
        for path in ("/v1/models", "/health", "/nothing"):
            with await connect(server.port) as client:
                get = await told(client, request("GET", path) + request("HEAD", path) + request("GET", path))
                status, headers = await client.head() or (0, {})
                assert (status, headers["content-type"]) == (get.status, get.headers["content-type"])
                assert int(headers["content-length"]) == len(get.body)
                # What follows it is the next answer.
                again = await told(client)
                assert (again.status, again.body) == (get.status, get.body)
        with await connect(server.port) as client:
            await client.send(request("HEAD", "/v1/completions"))
            status, headers = await client.head() or (0, {})
            assert (status, headers["allow"]) == (405, "POST")
        await server.assert_unharmed()


# --- half a connection ----------------------------------------------------------------------------


async def test_a_client_that_only_listens_has_what_needs_no_models_and_else_has_left():
    async with served() as server:
        with await connect(server.port) as client:
            await client.send(REQUESTS["health"])
            await client.stream.send_eof()
            assert (await told(client)).json()["ok"]
            assert await client.hear_all() == b""
        with await connect(server.port) as client:
            await client.send(completion(num_tokens=10**6, stream=True))
            await client.stream.send_eof()
            await client.hear_all()
        await server.assert_unharmed()


# --- answers that come before the request has --------------------------------------------------------


@sweep("size", [1, 1000, 2**16])
async def test_too_long_a_body_is_answered_while_it_is_sent(size):
    async with client_of(max_body_bytes=5000) as (client, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, request("POST", "/v1/completions", b" " * 2**20, chunks=size))
            answer = await told(client)
            nursery.cancel_scope.cancel()
        assert (answer.status, answer.is_whole) == (413, True)


UNREAD = {"Content-Type": "text/plain"}
EARLY = sweep(("path", "status"), [("/v1/completions", 415), ("/health", 405), ("/nothing", 404)])


@EARLY
async def test_a_body_that_nobody_reads_does_not_hold_the_answer(path, status):
    async with served() as server:
        for way in (Client.leave, Client.reset):
            with await connect(server.port) as client:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.send, request("POST", path, b"x" * 2**20, headers=UNREAD, chunks=1000))
                    answer = await told(client)
                    nursery.cancel_scope.cancel()
                assert (answer.status, answer.is_whole) == (status, True)
                way(client)
        await server.assert_unharmed()


@EARLY
async def test_a_connection_is_kept_behind_a_body_that_nobody_reads_and_that_has_come(path, status):
    async with client_of() as (client, _):
        whole = request("POST", path, b"x" * 100, headers=UNREAD)
        for body, connection in ((whole, None), (whole, None), (whole[:-1], "close")):
            answer = await told(client, body)
            assert (answer.status, answer.headers.get("connection")) == (status, connection)
        await client.send(whole[-1:])
        assert await client.hear_all() == b""


async def test_a_client_that_asks_before_it_sends_a_body_is_told_to_go_on():
    async with client_of() as (client, _):
        head, _, body = REQUESTS["a question before the body"].partition(HEAD_END)
        await client.send(head + HEAD_END)
        status, _ = await client.head() or (0, {})
        assert status == 100
        assert (await told(client, body)).text == true_text()


# --- clients that do not read -------------------------------------------------------------------------

ENDLESS = completion(num_tokens=10**6, stream=True)
SMALL = 4096


async def quiet(simulation: Simulation) -> int:
    """How many jobs the target had, once it gets no more."""
    num_jobs = -1
    while num_jobs != (num_jobs := len(simulation.target_worker.handed)):
        await trio.testing.wait_all_tasks_blocked(0.05)
    return num_jobs


async def nobody_is_let_in(port: int) -> None:
    """Return when it is so."""
    with suppress(OSError):
        while True:
            (await connect(port)).leave()


async def test_whoever_does_not_read_does_not_hold_up_the_end_of_the_server(monkeypatch):
    monkeypatch.setattr(endpoint, "_MAX_BUFFERED", 100)
    async with served(sending_bytes=SMALL, stalled_s=MANY, grace_s=0.1) as server:
        with await connect(server.port, buffer_bytes=SMALL) as stalled, await connect(server.port) as idle:
            await stalled.send(ENDLESS)
            await quiet(server.simulation)
            server.stop.set()
            assert await idle.hear_all() == b""
            await server.is_over.wait()


def assert_refused(answer: Answer) -> None:
    assert (answer.status, answer.headers["connection"]) == (503, "close")
    body = answer.json()
    assert body.get("status") == "draining" or body["error"]["code"] == "draining"


async def test_while_an_answer_ends_others_are_told_to_ask_elsewhere():
    async with served(grace_s=MANY) as server:
        with await connect(server.port) as client, await connect(server.port) as kept:
            await client.send(ENDLESS)
            await client.head()
            assert "connection" not in (await told(kept, REQUESTS["health"])).headers
            server.stop.set()
            while (await server.health()).status == 200:
                pass
            # At a connection of before, and at new ones.
            assert_refused(await told(kept, completion()))
            assert await kept.hear_all() == b""
            for request in (REQUESTS["health"], completion()):
                assert_refused(await ask(server.port, request))
            assert not server.is_over.is_set()
        await server.is_over.wait()


async def test_clients_that_keep_a_connection_do_not_keep_a_server_that_stops():
    async with served(grace_s=MANY, idle_s=MANY) as server:
        with await connect(server.port) as silent, await connect(server.port) as idle:
            await told(idle, REQUESTS["health"])
            server.stop.set()
            assert [await silent.hear_all(), await idle.hear_all()] == [b"", b""]
            await server.is_over.wait()
        await nobody_is_let_in(server.port)


async def test_more_connections_than_may_be_wait_for_others_to_end():
    async with served(max_connections=2) as server:
        with await connect(server.port) as first, await connect(server.port) as second:
            for client in (first, second):
                await client.send(completion(num_tokens=10**6, stream=True))
                assert await client.head() is not None
            with await connect(server.port) as third:
                await third.send(REQUESTS["health"])
                with trio.move_on_after(0.05) as waited:
                    await third.answer()
                assert waited.cancelled_caught
                first.leave()
                await told(third)


async def test_the_longest_idle_connection_makes_room_for_another_client():
    async with served(max_connections=3, idle_s=MANY) as server:
        # Busy before the others come: until its request is read, it is the one that has been idle for the longest.
        busy = await connect(server.port)
        await busy.send(completion(num_tokens=10**6, stream=True))
        assert await busy.head() is not None
        silent, first, second = [await connect(server.port) for _ in range(3)]
        with busy, silent, first, second:
            for client in (first, second):
                await told(client, REQUESTS["health"])
            assert await silent.hear_all() == b""
            assert (await server.health()).status == 200
            assert await first.hear_all() == b""
            await told(second, REQUESTS["health"])
            assert await busy.event() is not None


async def test_a_connection_that_becomes_idle_makes_room_for_a_client_that_waits():
    async with served(max_connections=1, idle_s=MANY) as server:
        with await connect(server.port) as first:
            await first.send(completion(num_tokens=100, stream=True))
            assert await first.head() is not None
            with await connect(server.port) as second:
                await told(second, REQUESTS["health"])
            assert (await first.hear_all()).endswith(b"0\r\n\r\n")


async def test_running_out_of_files_is_logged_once_and_closes_idle_connections(caplog, monkeypatch):
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3
    accept = trio.SocketListener.accept

    async def accept_later(listener: trio.SocketListener) -> trio.SocketStream:
        stream = await accept(listener)
        if failures:
            stream.socket.close()
            raise failures.pop()
        return stream

    async with served(idle_s=MANY) as server:
        with await connect(server.port) as idle:
            await told(idle, REQUESTS["health"])
            monkeypatch.setattr(trio.SocketListener, "accept", accept_later)
            for _ in range(4):
                # The first is accepted by a call that had begun.
                with suppress(AssertionError):
                    await server.health()
            assert await idle.hear_all() == b""
        assert failures == []
        await server.assert_unharmed()
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Too many open files" in record.getMessage()
    caplog.clear()
