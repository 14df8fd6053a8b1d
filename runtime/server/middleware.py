"""What every request passes on its way in: by which name it asks, and with which key; and what every answer has."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.server.errors import ErrorResponse

_ALWAYS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class AlwaysHeaders:
    """Headers that every answer has."""

    def __init__(self, app: ASGIApp) -> None:
        """Around an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def send_more(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_ALWAYS]}
            await send(message)

        await self._app(scope, receive, send_more)


class HostNames:
    """Lets nobody in who asks for the server by a name that it does not go by.

    A page of another host whose name was made to point here asks by that name.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        """Around an application.

        Args:
            app: the application.
            names: of hosts, an IPv6 address with or without its brackets; "*" among them is any.
        """
        self._app = app
        self._any = "*" in names
        self._names = {_plain(name) for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and not self._any:
            asked = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            name = _without_port(asked[0]) if len(asked) == 1 else ""
            if _plain(name) not in self._names:
                refusal = ErrorResponse(
                    400,
                    f"this server does not go by the name {name[:100]!r}; if it should, start it with "
                    "--allow-host NAME, or with an API key",
                    code="unknown_host",
                )
                await _refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKey:
    """Lets nobody at `/v1` without the key, if there is one."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        """Around an application; the key is of ASCII."""
        self._app = app
        self._expected = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if self._expected is not None and scope["type"] == "http" and scope["path"].startswith("/v1"):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # In a time that says nothing of how much of it was right.
            if not secrets.compare_digest(given.strip(), self._expected) or scheme.lower() != b"bearer":
                refusal = ErrorResponse(
                    401,
                    "this server wants its API key: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _refuse(refusal: ErrorResponse, scope: Scope, receive: Receive, send: Send) -> None:
    response = JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers)
    await response(scope, receive, send)


def _without_port(host: str) -> str:
    # An IPv6 address has colons of its own, and stands in brackets.
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _plain(name: str) -> str:
    return name.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
