"""HTTP as bytes on a socket: requests that can be cut anywhere, and responses that may be incomplete."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any

import attrs
import trio

HEAD_END = b"\r\n\r\n"

# An entry of the server's access log for a request that did not fail on the server.
ACCESS_LINE = re.compile(
    r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S+:\d+ "[A-Z]+ [^ "]+" [1-4]\d\d'
    r"( tokens=\d+\+\d+)? seconds=\d+\.\d{3}( unfinished)?"
)


def request(
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
    chunks: int | None = None,
) -> bytes:
    """The bytes of a request.

    Args:
        body: serialized as JSON, bytes excepted; None for no body.
        headers: headers besides those that are necessary.
        chunks: send the body in chunks of this many bytes; None for one piece with a Content-Length.
    """
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    said = {"Host": "localhost"}
    if body is not None:
        said["Content-Type"] = "application/json"
        if chunks is None:
            said["Content-Length"] = str(len(data))
        else:
            said["Transfer-Encoding"] = "chunked"
    said |= headers or {}
    head = f"{method} {path} HTTP/{version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return head.encode() + b"\r\n" + (data if chunks is None else chunked(data, chunks))


def chunked(data: bytes, size: int) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@attrs.frozen
class Answer:
    """A response, which may be incomplete; headers are in lower case, and the body is without transfer encoding."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of server-sent events, without [DONE]."""
        lines = [event for event in self.body.decode().split("\n\n") if event.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]

    @property
    def text(self) -> str:
        """The text of a completion or a chat, from one body or from events."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            choice = self.json()["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        choices = [choice for event in self.events() for choice in event["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


class Client:
    """A connection; a context manager that closes it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._heard = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def hear(self, num_bytes: int) -> bytes:
        """Receive `num_bytes` bytes, or fewer if no more come."""
        while len(self._heard) < num_bytes and await self._more():
            pass
        heard, self._heard = self._heard[:num_bytes], self._heard[num_bytes:]
        return heard

    async def hear_all(self) -> bytes:
        """Receive until the server closes the connection."""
        while await self._more():
            pass
        heard, self._heard = self._heard, b""
        return heard

    async def event(self) -> str | None:
        """The next event of a response whose head was read with `head`, or None at the end."""
        while b"\n\n" not in self._heard:
            if not await self._more():
                return None
        raw, self._heard = self._heard.split(b"\n\n", 1)
        # The server sends each event as a chunk: before it stand the previous chunk's end and the length of this one.
        event = raw.split(b"\r\n")[-1].decode()
        return None if event == "data: [DONE]" else event

    async def head(self) -> tuple[int, dict[str, str]] | None:
        """The status and headers of the next response, or None if none comes."""
        while HEAD_END not in self._heard:
            if not await self._more():
                return None
        head, self._heard = self._heard.split(HEAD_END, 1)
        first, *rest = head.decode("latin1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        return int(first.split(" ")[1]), headers

    async def answer(self) -> Answer | None:
        """The next response, or None if none comes; "100 Continue" is skipped."""
        while (head := await self.head()) is not None and head[0] == 100:
            pass
        if head is None:
            return None
        status, headers = head
        if headers.get("transfer-encoding") == "chunked":
            body, is_whole = await self._chunks()
        elif "content-length" in headers:
            num_bytes = int(headers["content-length"])
            body = await self.hear(num_bytes)
            is_whole = len(body) == num_bytes
        else:
            body, is_whole = await self.hear_all(), True
        return Answer(status, headers, body, is_whole)

    def leave(self) -> None:
        """Close the socket: what was sent arrives, unless something received is unread here."""
        self.stream.socket.close()

    def reset(self) -> None:
        """Reset the connection, as when the process is killed: nothing more arrives."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    async def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            while b"\r\n" not in self._heard:
                if not await self._more():
                    return body, False
            size, self._heard = self._heard.split(b"\r\n", 1)
            num_bytes = int(size, 16)
            piece = await self.hear(num_bytes + 2)
            body += piece[:num_bytes]
            if len(piece) < num_bytes + 2:
                return body, False
            if num_bytes == 0:
                return body, True

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(2**16)
        except trio.BrokenResourceError:
            return False
        self._heard += data
        return bool(data)


async def connect(port: int, *, buffer_bytes: int | None = None) -> Client:
    """A connection to a server on this machine; `buffer_bytes` limits the receive buffer."""
    connection = trio.socket.socket()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    try:
        await connection.connect(("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return Client(trio.SocketStream(connection))


async def ask(port: int, data: bytes) -> Answer:
    with await connect(port) as client:
        await client.send(data)
        answer = await client.answer()
        assert answer is not None, "no answer came"
        return answer
