"""A service in trio that has the runtime in its own nursery: a line of JSON asks, lines of JSON answer.

    python examples/trio_service.py --port 7711
    nc 127.0.0.1 7711
    {"prompt": "def quicksort(items):", "max_tokens": 40}

Each line of a client asks for a text, with settings of `SETTINGS`, or cancels the one that is under way:
`{"cancel": true}`. What comes back are lines with `text`, and in the end one with `end`: "stop", "length", "cancelled"
(by a line, or by a new prompt, which takes the place of the old one) or "error", with `error` saying which. A client
that hangs up, also in the middle of its prompt's being read, cancels its text. (So does one that only closes its own
side, as `echo ... | nc` may: the two look alike from here.)

Everything is bounded: how many clients there are, how many of their texts the models are at (the others wait their
turn), how long a line is, how long a client may keep its place without reading what it asked for. SIGTERM and Ctrl-C
let nobody else in, give those who are there a few seconds to have their answers, and end with status 0.
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
MAX_STREAMS = 4  # at the models at the same time
MAX_LINE = 64 * 1024  # bytes
PATIENCE_S = 30.0  # with a client that does not read
GRACE_S = 5.0  # for answers that are under way when the service ends


class RefusedError(Exception):
    """What a client sent makes no sense."""


class Client:
    """One connection: at most one text at a time."""

    def __init__(self, rt: runtime.Runtime, connection: trio.SocketStream) -> None:
        self._rt = rt
        self._connection = connection
        self._sending = trio.Lock()
        self._listening = trio.CancelScope()
        self._answering = trio.CancelScope()
        self._turn = trio.Lock()  # one text has said how it ended before the next begins

    async def serve(self) -> None:
        """Answer until the client hangs up, or makes no sense.

        Raises: RuntimeBrokenError: the models are lost.

        Cancellation: ends its text.
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
                # Nobody is there any more, or nobody that could be talked with.
                nursery.cancel_scope.cancel()

    def listen_no_more(self) -> None:
        """Finish the text that is under way, and hang up."""
        self._listening.cancel()

    async def _answer(self, scope: trio.CancelScope, asked: dict[str, Any]) -> None:
        async with self._turn:
            with scope:
                try:
                    async with self._rt.stream(asked.pop("prompt"), **asked) as stream:
                        async for token in stream:
                            if token.text:
                                await self.send(text=token.text)
                    await self.send(end=stream.finish_reason)
                except runtime.RuntimeBrokenError:
                    raise
                except runtime.OutriderError as error:
                    await self.send(end="error", error=str(error))
            if scope.cancelled_caught:
                await self.send(end="cancelled")

    async def send(self, **message: Any) -> None:
        """Send a line.

        Cancellation: the line is sent whole all the same, since half of one would spoil the next; a client that does
            not take it for `PATIENCE_S` loses its connection.
        """
        with trio.move_on_after(PATIENCE_S, shield=True) as patience:
            try:
                async with self._sending:
                    await self._connection.send_all(json.dumps(message).encode() + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # whoever reads from it will notice
        if patience.cancelled_caught:
            self._answering.cancel()
            await self._connection.aclose()


async def lines(connection: trio.SocketStream) -> AsyncIterator[bytes]:
    """The lines that come, until the other side hangs up."""
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
    """A runtime, and whoever wants something of it."""

    def __init__(self, rt: runtime.Runtime) -> None:
        self._rt = rt
        self._clients: set[Client] = set()

    async def welcome(self, connection: trio.SocketStream) -> None:
        """Serve a client, if there is room for one more."""
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
        """Have every client's text finished, and no other begun."""
        for client in self._clients:
            client.listen_no_more()


async def main(port: int) -> None:
    # From here on a signal is heard, and waits for the models to be loaded.
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
    """Let clients in, until the door is closed."""
    with door:
        await trio.serve_listeners(service.welcome, listeners, handler_nursery=clients)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=7711, help="0 takes one that is free")
    trio.run(main, parser.parse_args().port)
