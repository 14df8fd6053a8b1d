"""The fields of a request that are ignored: named in a header of the response, or refused by a strict server."""

from __future__ import annotations

import re
from collections.abc import Set

import attrs
from pydantic import PrivateAttr
from starlette.types import Message, Send

from runtime.server.answers.body import Body
from runtime.server.errors import unknown_field

IGNORED_HEADER = "X-Outrider-Ignored"

# Names of unknown fields are the client's. These can stand in a header.
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_HEADER_NAMES = 32


@attrs.frozen
class IgnoredFields:
    """The fields of a request that are ignored.

    Attributes:
        unknown: names of those that a body does not have, in dotted form within other objects.
        without_effect: names of those that it has, and on which no answer depends.
        known: names of all fields of the body.
    """

    unknown: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def header(self) -> str | None:
        """The value of the header that names them; None if there are none.

        Names that cannot stand in a header, and those beyond the first 32, are only counted.
        """
        names = [*self.unknown, *self.without_effect]
        fit = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_HEADER_NAMES]
        others = [f"+{len(names) - len(fit)} more"] if len(names) > len(fit) else []
        return ", ".join([*fit, *others]) or None

    def named_by(self, send: Send) -> Send:
        """`send` of ASGI, with the header in the response if there are any."""
        if (value := self.header) is None:
            return send
        header = IGNORED_HEADER.lower().encode(), value.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        return send_named

    def refuse(self) -> None:
        """Refuse unknown fields, as a strict server does.

        Raises: ErrorResponse: there is one.
        """
        if self.unknown:
            raise unknown_field(self.unknown[0], self.known)


class RequestBody(Body):
    """The whole body of a request."""

    _ignored: IgnoredFields = PrivateAttr(IgnoredFields())

    @property
    def ignored(self) -> IgnoredFields:
        """The fields that are ignored."""
        return self._ignored

    def keep_ignored(self, ignored: IgnoredFields) -> None:
        """Keep what `ignored` returns: it is found where a long body is read, in another thread."""
        self._ignored = ignored

    def check(self) -> None:
        """Check what concerns more than one field.

        Raises: ErrorResponse: fields do not go together.
        """
        return


def ignored_fields(body: Body, taken: Set[str] = frozenset()) -> IgnoredFields:
    """The fields of a body that are ignored.

    Args:
        body: the whole body of a request.
        taken: names of fields that the body does not have, and that have an effect.
    """
    return IgnoredFields(
        tuple(name for name in dict.fromkeys(body.unknown()) if name not in taken),
        tuple(dict.fromkeys(body.without_effect())),
        tuple(type(body).model_fields),
    )
