"""The interface of serializers: from the tokens of a generation to the body or the events of its response."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from protocol.statistics import Statistics

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token
    from runtime.server.errors import ErrorResponse

# The longest time between two events. Clients and proxies give up connections on which nothing comes for a minute.
_KEEP_ALIVE_S = 15.0


@attrs.frozen
class Event:
    """A server-sent event.

    Attributes:
        data: for JSON; or a text as it is.
        name: its type, for APIs that name it outside of the data.
    """

    data: Mapping[str, Any] | str
    name: str | None = None

    def encoded(self) -> str:
        """The event as it is sent."""
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, separators=(",", ":"))
        return f"data: {data}\n\n" if self.name is None else f"event: {self.name}\ndata: {data}\n\n"


class Serializer(ABC):
    """Serializer of the response to one request.

    For a response as one body, `whole` is called once. For events, `first_events`, then `events` for the tokens as they
    arrive, and at the end `last_events` or `error_events`.

    Attributes:
        id: the response's id; random, so that other clients cannot guess it.
        interval_s: seconds without tokens after which `idle_events` are sent.
    """

    id: str
    interval_s: float = _KEEP_ALIVE_S

    @abstractmethod
    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        """The whole response as one body, for JSON; `tokens` are all of its tokens."""

    @abstractmethod
    def first_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events that come before any token: that the request was accepted, in APIs that say so."""

    @abstractmethod
    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[Event]:
        """The events of the next tokens; not empty."""

    def idle_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events to send where no token has come for `interval_s`; none for a comment."""
        return ()

    @abstractmethod
    def last_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events after the last token."""

    @abstractmethod
    def error_events(self, error: ErrorResponse, statistics: Statistics) -> Sequence[Event]:
        """The events that end a response whose generation has failed."""
