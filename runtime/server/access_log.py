"""The access log: one line for each request, when it has ended."""

from __future__ import annotations

import string
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Key in a request's ASGI scope: the number of tokens of its prompt and of its answer, set once an answer has begun.
TOKENS = "outrider.tokens"

# Monitoring requests these paths every few seconds. Successes are not logged, and neither are further failures of the
# same status: they would bury everything else.
_PROBE_PATHS = ("/health", "/metrics")

# nginx's status for a client that left before it got a response.
_CLIENT_CLOSED_REQUEST = 499

_MAX_PATH_CHARACTERS = 200
_SAFE_CHARACTERS = string.punctuation.replace('"', "")


class AccessLog:
    """Middleware that logs each request: end time, client, request, status, tokens of prompt and answer, duration.

        2026-11-22T10:15:00Z 127.0.0.1:50412 "POST /v1/completions" 200 tokens=7+24 seconds=0.532

    The line of a response that was not sent to its end, because the client left or the server stopped, ends in
    "unfinished"; if nothing was sent, its status is 499. Prompts, answers, API keys and query strings are not logged.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], object]) -> None:
        """Around an application.

        Args:
            app: the application.
            write: writes a line; an OSError that it raises is ignored.
        """
        self._app = app
        self._write = write
        self._probe_statuses = dict.fromkeys(_PROBE_PATHS, 200)  # the latest one of each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_whole = trio.current_time(), _CLIENT_CLOSED_REQUEST, False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if self._is_news(scope["path"], status):
                with suppress(OSError):  # whatever read the log has closed it
                    self._write(_log_line(scope, status, is_whole, trio.current_time() - began))

    def _is_news(self, path: str, status: int) -> bool:
        if path not in _PROBE_PATHS:
            return True
        before, self._probe_statuses[path] = self._probe_statuses[path], status
        return status not in (200, before)


def _log_line(scope: Scope, status: int, is_whole: bool, seconds: float) -> str:
    host, port = scope.get("client") or ("-", 0)
    client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Percent-encoded: the decoded path could contain line breaks, quotes, and terminal escape sequences.
    path = quote(scope["raw_path"].partition(b"?")[0], safe=_SAFE_CHARACTERS)
    if len(path) > _MAX_PATH_CHARACTERS:
        path = path[: _MAX_PATH_CHARACTERS - 1] + "…"
    fields = [f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", client, f'"{scope["method"]} {path}"', str(status)]
    if TOKENS in scope:
        num_prompt_tokens, num_answer_tokens = scope[TOKENS]
        fields.append(f"tokens={num_prompt_tokens}+{num_answer_tokens}")
    fields.append(f"seconds={seconds:.3f}")
    if not is_whole:
        fields.append("unfinished")
    return " ".join(fields)
