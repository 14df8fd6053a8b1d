"""Middleware: headers of every response, and checks of the host name and the API key of every request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.server.errors import ErrorResponse

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class CommonHeaders:
    """Adds the headers that every response has."""

    def __init__(self, app: ASGIApp) -> None:
        """Around an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class HostNames:
    """Rejects requests whose Host header is not a name of this server.

    This keeps out DNS rebinding: a web page of another host whose name was made to resolve to this machine.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        """Around an application.

        Args:
            app: the application.
            names: host names; an IPv6 address with or without brackets; "*" allows any.
        """
        self._app = app
        self._allows_any = "*" in names
        self._names = {_normalized(name) for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and not self._allows_any:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            name = _without_port(hosts[0]) if len(hosts) == 1 else ""
            if _normalized(name) not in self._names:
                error = ErrorResponse(
                    400,
                    f"the host name {name[:100]!r} is not allowed; to allow it, start the server with "
                    "--allow-host NAME or with an API key",
                    code="unknown_host",
                )
                await _send_error(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKey:
    """Rejects requests to `/v1` without the API key, if the server has one."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        """Around an application.

        Args:
            app: the application.
            key: the API key, in ASCII; None for no key.
        """
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if self._key is not None and scope["type"] == "http" and scope["path"].startswith("/v1"):
            scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # In constant time: the time must not tell how many characters of a wrong key are right.
            if not secrets.compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
                error = ErrorResponse(
                    401,
                    "the API key is missing or wrong; send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _send_error(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _send_error(error: ErrorResponse, scope: Scope, receive: Receive, send: Send) -> None:
    response = JSONResponse(error.body(), status_code=error.status, headers=error.headers)
    await response(scope, receive, send)


def _without_port(host: str) -> str:
    # An IPv6 address contains colons, and is in brackets.
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _normalized(name: str) -> str:
    return name.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
