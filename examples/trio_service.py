"""A trio service with the runtime in its own nursery: requests and answers are lines of JSON over TCP.

    python examples/trio_service.py --port 7711
    nc 127.0.0.1 7711
    {"prompt": "def quicksort(items):", "max_tokens": 40}

A client's line requests a text, with settings from `SETTINGS`, or cancels the current one: `{"cancel": true}`. The
answer is lines with `text`, followed by one with `end`: "stop", "length", "cancelled" (by a line, or by a new prompt,
which replaces the current text) or "error", with the message in `error`. A client that disconnects cancels its text,
also during prefill. (So does a client that only closes its sending side, as `echo ... | nc` may: the two look alike.)

Everything is bounded: the number of clients, the number of texts that generate at once (others wait), the length of a
line, and the time that a client may leave its answer unread. SIGTERM and Ctrl-C stop accepting clients, give the
current answers a few seconds to end, and exit with status 0.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import trio

import runtime

SETTINGS = {"max_tokens", "temperature", "top_p", "seed", "stop"}
MAX_CLIENTS = 64
MAX_STREAMS = 4  # texts that generate at once
MAX_LINE = 64 * 1024  # bytes
PATIENCE_S = 30.0  # how long a client may leave its answer unread
GRACE_S = 5.0  # how long current answers may go on when the service ends


class RefusedError(Exception):
    """A client sent an invalid line."""


class Client:
    """A connection, with at most one text at a time."""

    def __init__(self, rt: runtime.Runtime, connection: trio.SocketStream) -> None:
        self._rt = rt
        self._connection = connection
        self._sending = trio.Lock()
        self._listening = trio.CancelScope()
        self._answering = trio.CancelScope()
        self._turn = trio.Lock()  # so that the end of a text is sent before the next text starts

    async def serve(self) -> None:
        """Answer until the client disconnects or sends an invalid line.

        Raises: RuntimeBrokenError: the models are lost.

        Cancellation: ends the current text.
        """
        async with trio.open_nursery() as nursery:
            with self._listening:
                try:
                    async with aclosing(lines(self._connection)) as arriving:
                        async for line in arriving:
                            asked = parsed(line)
                            self._answering.cancel()
                            if "prompt" in asked:
                                self._answering = trio.CancelScope()
                                nursery.start_soon(self._answer, self._answering, asked)
                except RefusedError as error:
                    await self.send(end="error", error=str(error))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                # The client has gone, or sent an invalid line.
                nursery.cancel_scope.cancel()

    def listen_no_more(self) -> None:
        """Finish the current text, and disconnect."""
        self._listening.cancel()

    async def _answer(self, scope: trio.CancelScope, asked: dict[str, Any]) -> None:
        end: dict[str, Any] = {"end": "cancelled"}
        async with self._turn:
            try:
                with scope:
                    async with self._rt.stream(asked.pop("prompt"), **asked) as stream:
                        async for token in stream:
                            if token.text:
                                await self.send(text=token.text)
                    end = {"end": stream.finish_reason}
            except runtime.OutriderError as error:
                end = {"end": "error", "error": str(error)}
                if isinstance(error, runtime.RuntimeBrokenError):
                    raise
            finally:
                # Also where the service ends before the text does.
                await self.send(**end)

    async def send(self, **message: Any) -> None:
        """Send a line.

        Cancellation: the line is still sent whole, since half a line would spoil the next one. A client that does not
            read it within `PATIENCE_S` is disconnected.
        """
        with trio.move_on_after(PATIENCE_S, shield=True) as patience:
            try:
                async with self._sending:
                    await self._connection.send_all(json.dumps(message).encode() + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the task that reads from it notices
        if patience.cancelled_caught:
            self._answering.cancel()
            await self._connection.aclose()


async def lines(connection: trio.SocketStream) -> AsyncIterator[bytes]:
    """The lines of a connection, until the other side closes it."""
    received = bytearray()
    async for data in connection:
        received += data
        while (end := received.find(b"\n")) >= 0:
            line = bytes(received[:end])
            del received[: end + 1]
            yield line
        if len(received) > MAX_LINE:
            raise RefusedError(f"a line has at most {MAX_LINE:,} bytes")


def parsed(line: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"a line is a JSON object: {error}") from error
    if not isinstance(asked, dict) or ("prompt" in asked) == ("cancel" in asked):
        raise RefusedError('a line is {"prompt": ..., and settings} or {"cancel": true}')
    if unknown := asked.keys() - SETTINGS - {"prompt", "cancel"}:
        raise RefusedError(f"there is no setting {min(unknown)!r} here; there are {', '.join(sorted(SETTINGS))}")
    return asked


class Service:
    """A runtime and its clients."""

    def __init__(self, rt: runtime.Runtime) -> None:
        self._rt = rt
        self._clients: set[Client] = set()

    async def welcome(self, connection: trio.SocketStream) -> None:
        """Serve a client, unless there are `MAX_CLIENTS` already."""
        client = Client(self._rt, connection)
        async with connection:
            if len(self._clients) == MAX_CLIENTS:
                await client.send(end="error", error=f"there are {MAX_CLIENTS} clients already; come back later")
                return
            self._clients.add(client)
            try:
                await client.serve()
            finally:
                self._clients.remove(client)

    def say_goodbye(self) -> None:
        """Let every client's current text finish, and start no other."""
        for client in self._clients:
            client.listen_no_more()


async def main(port: int) -> None:
    # A signal that arrives while the models load is handled after that.
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            serve = partial(runtime.keep_open, runtime.DEMO_TARGET, runtime.DEMO_DRAFT, max_streams=MAX_STREAMS)
            rt = await nursery.start(serve)
            service = Service(rt)
            listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
            async with trio.open_nursery() as clients:
                door = trio.CancelScope()
                clients.start_soon(let_in, door, service, listeners, clients)
                print(f"listening on 127.0.0.1:{listeners[0].socket.getsockname()[1]}", flush=True)
                await anext(signals)
                print(f"ending; {rt.num_streams + rt.num_waiting} texts are under way", flush=True)
                door.cancel()
                service.say_goodbye()
                clients.cancel_scope.deadline = trio.current_time() + GRACE_S
            nursery.cancel_scope.cancel()
    print("ended")


async def let_in(
    door: trio.CancelScope, service: Service, listeners: list[trio.SocketListener], clients: trio.Nursery
) -> None:
    """Accept clients until `door` is cancelled."""
    with door:
        await trio.serve_listeners(service.welcome, listeners, handler_nursery=clients)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=7711, help="0 takes one that is free")
    trio.run(main, parser.parse_args().port)
