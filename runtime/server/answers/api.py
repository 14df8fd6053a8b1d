"""The interface that an API implements to turn the tokens of generations into a response."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.scores import Score
from protocol.statistics import Statistics
from runtime.generation.token_stream import TokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta
from runtime.server.answers.preparation import Echo
from runtime.server.answers.request import GenerationRequest
from runtime.server.answers.tokens import AnswerSplitter, ShownTokens
from runtime.server.errors import ErrorResponse
from runtime.server.timelines import Timeline

# The longest time between two events. Clients and proxies give up a connection that is silent for a minute.
_KEEP_ALIVE_S = 15.0


# In ASCII, since clients may split events at Unicode's line separators.
event_json = json.JSONEncoder(separators=(",", ":")).encode


@attrs.frozen
class Event:
    """A server-sent event.

    Attributes:
        data: an object to send as JSON, or a text to send as it is.
        name: its type, for APIs that name it outside of the data.
    """

    data: Mapping[str, Any] | str
    name: str | None = None

    def encoded(self) -> str:
        """The event as it is sent."""
        data = self.data if isinstance(self.data, str) else event_json(self.data)
        return f"data: {data}\n\n" if self.name is None else f"event: {self.name}\ndata: {data}\n\n"


class Serializer(ABC):
    """Serializer of the response to one request.

    For a response as one body, `whole` is called once. For events, `first_events` (of the first choice), then `events`
    for the tokens as they arrive, and at the end `last_events` or `error_events`.

    Attributes:
        keep_alive: what is sent after `interval_s` without tokens if there are no `idle_events`.
        id: the response's id; random, so that other clients cannot guess it.
        id_header: the header that has it, by the name that the API's clients know.
        interval_s: seconds without tokens after which `idle_events` are sent.
    """

    content_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    id_header: ClassVar[bytes] = b"x-request-id"
    keep_alive: ClassVar[str] = ": keep-alive\n\n"
    id: str = ""
    interval_s: float = _KEEP_ALIVE_S

    def __init__(self, answer: BegunAnswer) -> None:
        self._answer = answer
        self._shown = ShownTokens(answer.request, answer.tokenizer)
        self._last_token: Token | None = None

    def _parts(self, tokens: Sequence[Token]) -> list[Delta]:
        tokens = self._shown(tokens)
        self._last_token = tokens[-1] if tokens else self._last_token
        return self._answer.splitter.add(tokens)

    @abstractmethod
    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        """The whole response as one body, for JSON."""

    def first_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events before any token, by which some APIs say that the request was accepted."""
        return ()

    @abstractmethod
    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[Event]:
        """The events of the next tokens, of which there is at least one."""

    def idle_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events to send when no token has come for `interval_s`; if there are none, `keep_alive` is sent."""
        return ()

    @abstractmethod
    def last_events(self, statistics: Statistics) -> Sequence[Event]:
        """The events after the last token."""

    @abstractmethod
    def error_events(self, error: ErrorResponse) -> Sequence[Event]:
        """The events that end a response whose generation has failed."""

    def whole_of(self, choices: Sequence[Choice]) -> Mapping[str, Any]:
        """The response as one body, with all choices; the first one's serializer is called. By default there is one."""
        (choice,) = choices
        return self.whole(choice.tokens, choice.statistics())

    def last_events_of(self, choices: Sequence[Choice]) -> Sequence[Event]:
        """The events after the last token of all choices; called likewise."""
        (choice,) = choices
        return self.last_events(choice.statistics())


@attrs.define
class Choice:
    """One generation of a request, which has begun.

    Attributes:
        stream: gives its tokens; None if nothing is to be generated.
        tokens: all of its tokens, for a response as one body.
    """

    serializer: Serializer
    stream: TokenStream | None
    statistics: Callable[[], Statistics]
    tokens: Sequence[Token] = ()

    def finish(self, tokens: Sequence[Token]) -> None:
        """Store all tokens and freeze the statistics, so that another thread can make the response."""
        self.tokens, statistics = tokens, self.statistics()
        self.statistics = lambda: statistics


Begin = Callable[[Sequence[Choice]], Choice]
"""Begins one choice of a response; it is given those before it. Raises OutriderError where it cannot."""


@attrs.define
class Choices:
    """The choices of one response, which begin in order and a few at a time.

    The models take up generations in the order in which they began. If a request for many texts began them all at
    once, the requests of others would wait for all of them.

    Attributes:
        begins: functions that begin one choice each; at least one.
        max_at_once: how many may be at work or wait for the models, >= 1; None for all.
        is_cancelled: whether the response ends with what there is by now.
    """

    _begins: Iterator[Begin]
    _max_at_once: int | None
    begun: list[Choice] = attrs.field(factory=list, init=False)
    is_cancelled: bool = attrs.field(default=False, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    async def begin_first(self) -> None:
        """Begin the first `max_at_once` choices. Raises: OutriderError: one cannot begin."""
        most = math.inf if self._max_at_once is None else self._max_at_once
        while len(self.begun) < most and await self.begin_next() is not None:
            pass

    async def begin_next(self) -> int | None:
        """Begin the next choice, once another has ended. Returns its index; None if none is left.

        Raises: OutriderError: it cannot begin. Cancellation: nothing has begun.
        """
        # Other tasks may run first: with a long prompt, beginning takes a while.
        await trio.lowlevel.checkpoint()
        begin = None if self._is_closed else next(self._begins, None)
        if begin is None:
            return None
        self.begun.append(begin(self.begun))
        return len(self.begun) - 1

    def cancel(self) -> None:
        """As `close`, and end the response as if its texts were over."""
        self.is_cancelled = True
        self.close()

    def close(self) -> None:
        """End all generations, and begin no other."""
        self._is_closed = True
        for choice in self.begun:
            if choice.stream is not None:
                choice.stream.close()


@attrs.frozen
class BegunAnswer:
    """A generation that has begun, as its serializer sees it.

    Attributes:
        splitter: splits the tokens into parts; it has had none yet.
        watch: records the models' activity under the response's id from now on, and returns the record.
        prompt: the token ids that the answer follows.
        index: of this choice in the response.
        counts_prompt: whether its usage includes the prompt's tokens, which count once for all choices of a prompt.
        echo, score: the prompt, if the response repeats it, and the log-probabilities of its tokens, if it has them.
        first: the serializer of the response's first choice; None if this is the first.
        defaults: the model's settings, for requests that do not set them.
    """

    request: GenerationRequest
    model: str
    tokenizer: TokenizerWrapper
    splitter: AnswerSplitter
    watch: Callable[[str], Timeline]
    prompt: Sequence[int] = ()
    index: int = 0
    counts_prompt: bool = True
    echo: Echo | None = None
    score: Score | None = None
    first: Serializer | None = None
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
