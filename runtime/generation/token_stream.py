"""The stream of one generation, which one consumer reads at a time, and the completion made from it."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import BinaryIO, ClassVar, Self, TypeVar

import attrs
import trio

from protocol.errors import StreamBusyError
from protocol.reprs import excerpt
from protocol.session_state import FinishReason
from protocol.statistics import Statistics
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.token_reader import Arrivals, Token, TokenReader
from runtime.generation.tool_calls.events import ToolCall

T = TypeVar("T")


class SingleConsumer(ABC):
    """An async iterator and async context manager that one task reads at a time.

    A subclass implements `__anext__` with `_receive`, and `close`.
    """

    _busy: ClassVar[str]  # message of the error that a second consumer gets

    _is_waiting = False  # a task waits in `_receive`
    _is_closed = False

    @abstractmethod
    def close(self) -> None:
        """End at once, without a checkpoint; closing again does nothing. For trio's thread."""

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """End the generation, or all of them, at once. Then a checkpoint: it is closed even if that is cancelled."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _receive(self, receive: Callable[[], Awaitable[T]]) -> T:
        """The result of `receive`; a cancellation closes this. Raises: StreamBusyError: another task is waiting."""
        if self._is_waiting:
            raise StreamBusyError(self._busy)
        self._is_waiting = True
        try:
            return await receive()
        except trio.Cancelled:
            self.close()
            raise
        finally:
            self._is_waiting = False


_NOTHING_GIVEN = ReasoningTracker(None, ())


class StreamState(ABC):
    """The public state of a stream, from the tokens that it has given."""

    _is_closed: bool

    @property
    @abstractmethod
    def _opened_reader(self) -> TokenReader | None:
        """The stream's token reader; None until the prompt was checked."""

    @property
    def answer(self) -> ReasoningTracker:
        """The tokens given so far, split into reasoning and answer."""
        reader = self._opened_reader
        return _NOTHING_GIVEN if reader is None else reader.answer

    @property
    def content(self) -> str:
        """The text of the given tokens, without reasoning and tool calls."""
        reader = self._opened_reader
        return self.answer.said if reader is None or reader.parts is None else reader.parts.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that are complete with the given tokens, in order; empty for a generation without tools."""
        reader = self._opened_reader
        return () if reader is None or reader.parts is None else tuple(reader.parts.calls)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        reader = self._opened_reader
        return None if reader is None else reader.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, as in `Token`, once its last token was given, or None."""
        reader = self._opened_reader
        return None if reader is None else reader.stop_reason

    @property
    def tail(self) -> str:
        """The text of the given tokens that was withheld: the possible beginning of a stop string, or half a character.

        The texts of the tokens and the tail add up to the decoding of the tokens' ids. The tail comes with a later
        token, unless it turns out to be a stop string; after a `break`, a cancellation or a failure, it is the rest of
        the text. It is empty once the text is over.
        """
        reader = self._opened_reader
        return "" if reader is None else reader.tail

    @property
    def is_closed(self) -> bool:
        """Whether no more tokens come: the last one was given, or the stream was closed or failed."""
        return self._is_closed

    @property
    def _state(self) -> str:
        how = self.finish_reason or ("closed" if self._is_closed else "under way")
        return f"{how}: {self.answer.num_tokens} tokens given"


SessionFile = str | os.PathLike[str] | BinaryIO
"""The file of a saved session: a path, or an open binary file, which is used from its position on."""


@attrs.frozen
class Completion:
    """A whole generated text.

    Attributes:
        text: without an end-of-text token, and without a stop string and the text after it.
        tokens: in order, including an end-of-text token and the tokens of a stop string.
        finish_reason: "stop" or "length".
        statistics: of this generation.
        stop_reason: the stop string or the stop token that ended the text, as in `Token`, or None.
        thinking: the reasoning, which is the text between reasoning tags (`text` has both); empty where there is none.
        content: the text without reasoning and tool calls.
        tool_calls: the complete calls, in order; empty for a generation without tools.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    statistics: Statistics
    stop_reason: str | int | None = None
    thinking: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        stop = self.stop_reason
        at = "" if stop is None else f" at {excerpt(stop) if isinstance(stop, str) else stop}"
        return f"<outrider Completion, {self.finish_reason}{at}: {len(self.tokens)} tokens, {excerpt(self.text, 60)}>"


class TokenStream(StreamState, SingleConsumer):
    """The tokens of one generation: an async iterator, and an async context manager.

    The generation runs from the moment the stream exists, as far ahead of the consumer as its buffer allows.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `__anext__`, and dropping the last
    reference (as `break` does with a stream that has no other) all end the generation. Each returns at once; the
    models are free after the forward pass that is running.

    Dropping a stream that was never read or closed is a `ResourceWarning`, unless its runtime has been closed.

    Attributes:
        reader: turns commits into tokens; for the thread that consumes the stream.
        arrivals: the commits that arrive; for trio's thread. `runtime.bridge` uses the two in different threads.
    """

    _busy = "another task is waiting for this stream's next token; a stream has one consumer"

    _is_unread = True

    def __init__(self, reader: TokenReader, arrivals: Arrivals) -> None:
        self.reader = reader
        self.arrivals = arrivals

    def __repr__(self) -> str:
        return f"<outrider TokenStream, {self._state}>"

    @property
    def session(self) -> int:
        """The number of this generation in a trace."""
        return self.reader.opened.session

    @property
    def began(self) -> float:
        """When the stream was made, in seconds on the clock of a trace's events; its generation may begin later."""
        return self.reader.began

    @property
    def _opened_reader(self) -> TokenReader:
        return self.reader

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            StopAsyncIteration: the text is over.
            StreamBusyError: another task is waiting for a token of this stream.
            RuntimeClosedError: the stream or its runtime was closed before the text was over.
            RuntimeBrokenError: the target failed; its error is the cause.
            RewindError: a cache did not hold the expected tokens; the tokens given before are right.

        Cancellation: ends the generation.
        """
        self._is_unread = False
        await self._receive(self._wait_for_token)
        token = self.reader.next_token()
        if token.finish_reason is not None:
            self.close()
        return token

    def __del__(self) -> None:
        if not self._is_closed:
            self.reader.end()
            self.arrivals.hang_up()
            self._is_closed = True  # whoever shows the warning may keep the stream
            if self._is_unread and self.arrivals.is_open:
                warn_unread(self, "aclose()")

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot."""
        return self.reader.statistics(is_over=self._is_closed)

    async def _wait_for_token(self) -> None:
        if self.reader.finish_reason is not None:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        if self._is_closed:
            raise self.arrivals.error
        if self.reader.has_more:
            # A checkpoint for each token, even if several came in one commit.
            await trio.lowlevel.checkpoint()
            return
        commit = await self.arrivals.receive()
        if commit is None:
            self.close()
            raise self.arrivals.error
        self.reader.begin_commit(commit)

    def close(self) -> None:
        self.reader.end()
        self.hang_up()

    def hang_up(self) -> None:
        """Receive no more commits. `runtime.bridge` may still read those that have arrived."""
        if not self._is_closed:
            self._is_closed = True
            self.arrivals.close()


def warn_unread(stream: object, how_to_close: str) -> None:
    """Warn of a stream that was dropped unread; the last step of a stream's `__del__`."""
    warnings.warn(
        f"a token stream was dropped unread, which ended its generation; read it, or close it with {how_to_close}",
        ResourceWarning,
        stacklevel=3,
        source=stream,
    )


async def complete(stream: TokenStream) -> Completion:
    """Read a stream to its end. Raises, cancellation: as `TokenStream.__anext__`."""
    async with stream:
        return completion_of(stream, [token async for token in stream])


def completion_of(stream: TokenStream, tokens: Sequence[Token]) -> Completion:
    """The completion of a stream whose tokens have all been given."""
    assert stream.finish_reason is not None
    return Completion(
        text="".join(token.text for token in tokens),
        tokens=tuple(tokens),
        finish_reason=stream.finish_reason,
        statistics=stream.statistics(),
        stop_reason=stream.stop_reason,
        thinking=stream.answer.thinking,
        content=stream.content,
        tool_calls=stream.tool_calls,
    )
