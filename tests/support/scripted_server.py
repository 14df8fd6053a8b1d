"""A server that answers the page byte by byte, as a test tells it to."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

# Ends a hang; not an expectation.
HANGS_S = 60

# The real server's policy.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = resources.files("runtime") / "server" / "page"

Word = str | tuple[str, str]  # a text of the target's own; or (text, kind): "drafted", "thought" or both


class Exchange:
    """A completion request, and the response to it."""

    def __init__(self, handler: BaseHTTPRequestHandler, number: int) -> None:
        self.path = handler.path
        self.headers: Message = handler.headers
        self.body: dict[str, Any] = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.id = f"cmpl-{number}"
        self._handler = handler
        self._gone = threading.Event()
        self._has_begun = False
        self._told = 0
        self._clock = 0.0
        self._counts = {"generated_tokens": 0, "proposed": 0, "accepted": 0}

    def wait_gone(self) -> None:
        assert self._gone.wait(HANGS_S), "the browser never hung up"

    def hold(self) -> None:
        """Keep the connection until either side hangs up."""
        with contextlib.suppress(OSError):
            while self._handler.rfile.read(1):
                pass
        self._gone.set()

    # --- the response -----------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send bytes as they are; nothing if the browser has hung up, which it may do at any point of the response."""
        with contextlib.suppress(OSError):
            self._handler.connection.sendall(data)

    def start(self) -> None:
        self._has_begun = True
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"]
        head.append("Connection: close")
        self.send("\r\n".join([*head, "", ""]).encode())

    def stream(self, data: bytes) -> None:
        """Send a part of the body, after the head if that is still to come."""
        if not self._has_begun:
            self.start()
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, data: Any) -> None:
        self.stream(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())

    def refuse(self, status: int, message: str, **headers: str) -> None:
        error = {"message": message, "type": "x", "param": None, "code": None}
        data = json.dumps({"error": error}).encode()
        headers = {"Content_Type": "application/json", "Connection": "close", **headers}
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode() + data)

    def chunk(
        self,
        *words: Word,
        finish_reason: str | None = None,
        spans: Sequence[tuple[str, str, float, float]] = (),
        **statistics: Any,
    ) -> dict[str, Any]:
        """The data of the next chunk.

        Args:
            spans: (actor, kind, begin, end); by default a verify and concurrent drafts, of 30 ms.
            statistics: figures that replace those that follow from the words.
        """
        tokens = [
            {"id": self._told + i, "text": text, "from_draft": "drafted" in kind, "is_thinking": "thought" in kind}
            for i, (text, kind) in enumerate(word if isinstance(word, tuple) else (word, "") for word in words)
        ]
        if words and not spans:
            begin, end = self._clock, self._clock + 0.03
            spans = [("target", "verify", begin, end - 0.002)]
            spans += [("draft", "draft", begin + i * 0.006, begin + i * 0.006 + 0.005) for i in range(4)]
            self._clock = end
        self._clock = max([self._clock, *(span[3] for span in spans)])
        self._told += len(words)
        self._counts["generated_tokens"] += len(words)
        self._counts["accepted"] += sum(token["from_draft"] is True for token in tokens)
        self._counts["proposed"] += 3 * bool(words)
        accepted, proposed = self._counts["accepted"], max(self._counts["proposed"], self._counts["accepted"])
        said = {"text": "".join(token["text"] for token in tokens)}
        if self.path.startswith("/v1/chat"):
            said = {"delta": {"content": said["text"]}}
        return {
            "id": self.id,
            "choices": [{"index": 0, **said, "finish_reason": finish_reason}],
            "speculation": {
                "tokens": tokens,
                "statistics": {
                    **self._counts,
                    "proposed": proposed,
                    "acceptance_rate": accepted / proposed if proposed else None,
                    "prompt_tokens": 7,
                    "generation_tps": self._told / self._clock if self._clock else None,
                    "time_to_first_token": 0.125 if self._told else None,
                    "elapsed": self._clock,
                    **statistics,
                },
                "spans": [
                    {"actor": actor, "kind": kind, "began": began, "ended": ended, "round": None}
                    for actor, kind, began, ended in spans
                ],
                "drafter": [],
            },
        }

    def write(self, *words: Word, **more: Any) -> None:
        self.event(self.chunk(*words, **more))

    def finish(self, reason: str = "stop") -> None:
        self.write(finish_reason=reason)
        self.event({"id": self.id, "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": self._told}})
        self.event("[DONE]")
        self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        self._handler.connection.shutdown(socket.SHUT_RDWR)


class ScriptedServer:
    """A server that serves the page and hands completion requests to a test."""

    def __init__(self) -> None:
        self.model: dict[str, Any] = {"id": "tiny/target", "has_chat_template": False, "draft": "tiny/draft"}
        self.others: list[dict[str, Any]] = []
        self.key: str | None = None
        self._exchanges: queue.Queue[Exchange] = queue.Queue()
        self._num_asked = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._get(self)

            def do_POST(self) -> None:
                server._post(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def next(self) -> Exchange:
        return self._exchanges.get(timeout=HANGS_S)

    @property
    def was_asked(self) -> bool:
        """Whether there is a completion request that the test has not taken."""
        return not self._exchanges.empty()

    @contextlib.contextmanager
    def serving(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()  # waits for the handlers: the browser must have hung up

    def _may(self, handler: BaseHTTPRequestHandler) -> bool:
        return self.key is None or handler.headers["Authorization"] == f"Bearer {self.key}"

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            if self._may(handler):
                self._answer(
                    handler, 200, "application/json", json.dumps({"data": [self.model, *self.others]}).encode()
                )
            else:
                self._answer(handler, 401, "application/json", b'{"error": {"message": "no key"}}')
            return
        if handler.path.startswith("/timelines/"):
            self._answer(handler, 200, "text/html", b"<title>a timeline</title>")
            return
        name = "index.html" if handler.path == "/" else handler.path.removeprefix("/page/")
        file = PAGE / name
        if "/" in name or not file.is_file():
            self._answer(handler, 404, "text/plain", b"")
            return
        self._answer(handler, 200, mimetypes.guess_type(name)[0] or "", file.read_bytes())

    def _answer(self, handler: BaseHTTPRequestHandler, status: int, content_type: str, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Security-Policy", POLICY)
        handler.send_header("Cache-Control", "no-store")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body)

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        self._num_asked += 1
        exchange = Exchange(handler, self._num_asked)
        handler.close_connection = True
        if not self._may(handler):
            exchange.refuse(401, "no key", Connection="close")
            return
        self._exchanges.put(exchange)
        exchange.hold()
