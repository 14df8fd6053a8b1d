"""Middleware: access log, addresses of clients, checks of host names and API keys."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from urllib.parse import quote

import attrs
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.connections.address import IpNetwork
from runtime.server.errors import ErrorResponse

# Key in a request's ASGI scope: the number of tokens of its prompt and of its answer, set once an answer has begun.
TOKENS = "outrider.tokens"

# Monitoring requests these paths every few seconds. Successes are not logged, and neither are further failures of the
# same status: they would bury everything else.
_PROBE_PATHS = ("/health", "/metrics")

# nginx's status for a client that left before it got a response.
_CLIENT_CLOSED_REQUEST = 499

_MAX_PATH_CHARACTERS = 200
_SAFE_CHARACTERS = string.punctuation.replace('"', "")


@attrs.define
class AccessLog:
    """Middleware that logs each request: end time, client, request, status, tokens of prompt and answer, duration.

        2026-11-22T10:15:00Z 127.0.0.1:50412 "POST /v1/completions" 200 tokens=7+24 seconds=0.532

    The line of a response that was not sent to its end, because the client left or the server stopped, ends in
    "unfinished"; if nothing was sent, its status is 499. Prompts, answers, API keys and query strings are not logged.
    """

    _app: ASGIApp
    _write: Callable[[str], object]  # writes a line; an OSError that it raises is ignored
    _probe_statuses: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(_PROBE_PATHS, 200), init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    host, port = scope["client"]
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


# First parts of the paths that need no API key, besides `/`: the web pages, which ask for the key, and paths that show
# no text. Timelines do, but their ids cannot be guessed.
_OPEN = frozenset(("page", "docs", "timelines", "health", "metrics", "openapi.json", "version"))


def host_error(names: Sequence[str], scope: Scope) -> ErrorResponse | None:
    """The error of a request whose Host header is not one of the `names` of this server; "*" allows any.

    This keeps out DNS rebinding: a web page of another host whose name was made to resolve to this machine.
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = hosts[0] if len(hosts) == 1 else ""
    # An IPv6 address contains colons, and is in brackets.
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    if "*" in names or _normalized(name) in map(_normalized, names):
        return None
    return ErrorResponse(
        400,
        f"the host name {name[:100]!r} is not allowed; to allow it, start the server with --allow-host NAME or with an "
        "API key",
        code="unknown_host",
    )


# An address that some proxies write with a port; IPv6 is in brackets then.
_PORT = re.compile(r"^(?:\[(.+)\]|([^:]+))(?::[0-9]+)?$")


@attrs.frozen
class ForwardedClients:
    """Takes the address of a client from X-Forwarded-For, if a trusted proxy has sent the request.

    Each proxy appends the address from which the request reached it. So the client is the last address that is not a
    trusted proxy: any address before it could have been made up.
    """

    _app: ASGIApp
    _proxies: Sequence[IpNetwork]  # where trusted proxies are

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer, _ = scope["client"]
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
        hops = ",".join(values).split(",") if values else []
        client = peer
        while hops and self._is_trusted(client):
            try:
                client = str(ip_address(_PORT.sub(r"\1\2", hops.pop().strip())))
            except ValueError:
                break
        if client != peer:
            scope = {**scope, "client": (client, 0)}  # the header has no port
        await self._app(scope, receive, send)

    def _is_trusted(self, address: str) -> bool:
        found = ip_address(address.partition("%")[0])
        # A socket for both versions of IP shows IPv4 addresses as mapped ones.
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in proxy for proxy in self._proxies)


def key_error(key: str | None, scope: Scope) -> ErrorResponse | None:
    """The error of a request without the API key (in ASCII), if the server has one; not for pages and monitoring."""
    if key is None or not needs_key(scope["path"]):
        return None
    headers, wanted = dict(scope["headers"]), key.encode()
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    # In constant time: the time must not tell how many characters of a wrong key are right.
    is_bearer = secrets.compare_digest(given.strip(), wanted) and scheme.lower() == b"bearer"
    # Anthropic clients send the key in this header.
    if is_bearer or secrets.compare_digest(headers.get(b"x-api-key", b""), wanted):
        return None
    return ErrorResponse(
        401,
        "the API key is missing or wrong; send Authorization: Bearer KEY or x-api-key: KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def needs_key(path: str) -> bool:
    """Whether requests for a path need the API key, if the server has one."""
    return path != "/" and first_part(path) not in _OPEN


def first_part(path: str) -> str:
    """The part of a path in front of its second slash."""
    return path.removeprefix("/").partition("/")[0]


def _normalized(name: str) -> str:
    return name.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
