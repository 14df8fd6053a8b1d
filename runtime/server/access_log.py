"""The access log: a line for each request, when it is over."""

from __future__ import annotations

import string
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Where in a request's scope its prompt's and its answer's number of tokens are noted, once it has an answer.
TOKENS = "outrider.tokens"

# Asked every few seconds by machines: as long as all is well, they would be all that there is to read.
_PROBES = ("/health", "/metrics")

# nginx's, for a client that has left before it was answered.
_LEFT = 499

_MOST_CHARACTERS = 200
_SAFE = string.punctuation.replace('"', "")


class AccessLog:
    """Writes a line for each request: when it was over, who asked, what, status, tokens of prompt and answer, seconds.

        2026-11-22T10:15:00Z 127.0.0.1:50412 "POST /v1/completions" 200 tokens=7+24 seconds=0.532

    An answer that did not come to its end, since the client left or the server ended, has "unfinished" behind it; one
    that had not begun has the status 499. Of what was said, and of keys, there is nothing: queries are left out.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], object]) -> None:
        """Around an application.

        Args:
            app: the application.
            write: takes a line.
        """
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_whole = trio.current_time(), _LEFT, False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if status != 200 or scope["path"] not in _PROBES:
                with suppress(OSError):  # whoever read the log has gone
                    self._write(_line(scope, status, is_whole, trio.current_time() - began))


def _line(scope: Scope, status: int, is_whole: bool, seconds: float) -> str:
    host, port = scope.get("client") or ("-", 0)
    who = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Not decoded: it could have line breaks, quotes, and what terminals take for commands.
    path = quote(scope["raw_path"].partition(b"?")[0], safe=_SAFE)
    if len(path) > _MOST_CHARACTERS:
        path = path[: _MOST_CHARACTERS - 1] + "…"
    parts = [f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", who, f'"{scope["method"]} {path}"', str(status)]
    if TOKENS in scope:
        prompt, answer = scope[TOKENS]
        parts.append(f"tokens={prompt}+{answer}")
    parts.append(f"seconds={seconds:.3f}")
    if not is_whole:
        parts.append("unfinished")
    return " ".join(parts)
