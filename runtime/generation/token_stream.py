"""The stream of one generation, which one consumer reads at a time, and the completion made from it."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import BinaryIO, ClassVar, Self, TypeVar

import attrs
import mlx.core as mx
import trio

from actors.session import Session
from protocol.errors import RuntimeClosedError, StreamBusyError
from protocol.prices import Estimates
from protocol.reprs import excerpt
from protocol.scores import TopLogprob
from protocol.session_state import Commit, FinishReason
from protocol.statistics import Statistics
from runtime.generation.answers.message_reader import Reader
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Answer, ToolCall

T = TypeVar("T")

STREAM_CLOSED = "this stream was closed; begin another with stream()"

SessionFile = str | os.PathLike[str] | BinaryIO
"""The file of a saved session: a path, or an open binary file, which is used from its position on."""


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


class TokenStream(SingleConsumer):
    """The tokens of one generation: an async iterator, and an async context manager.

    The generation runs from the moment the stream exists, as far ahead of the consumer as its buffer allows.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `__anext__`, and dropping the last
    reference (as `break` does with a stream that has no other) all end the generation. Each returns at once; the
    models are free after the forward pass that is running.

    Dropping a stream that was never read or closed is a `ResourceWarning`, unless its runtime has been closed.

    Attributes:
        finish_reason: why the text ended, once its last token was given; None before, and after a cancellation.
        stop_reason: the stop string or stop token that ended the text, as in `Token`, once its last token was given, or
            None.
    """

    # Commits arrive in trio's thread. The consumer, who may be in another thread, decodes their tokens one by one: the
    # texts below are those of the tokens that it was given, and the readers of tags and calls must not be ahead of it.

    _busy = "another task is waiting for this stream's next token; a stream has one consumer"

    _is_unread = True

    def __init__(
        self,
        session: Session,
        commits: trio.MemoryReceiveChannel[Commit],
        text: GrowingText,
        answer: ReasoningTracker,
        calls: Reader | None,
        *,
        end_soon: Callable[[], None],
        end_thinking_soon: Callable[[], None],
        clock: Callable[[], float],
        estimates: Callable[[], Estimates],
    ) -> None:
        """Made by `Sessions.begin`. `calls` tells content, reasoning and calls apart; None for a generation without
        tools. `end_soon` and `end_thinking_soon` may be called in any thread, and more than once.
        """
        self.answer = answer
        self.parts = None if calls is None else Answer()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._session, self._opened, self._commits = session, session.opened, commits
        self._text, self._calls = text, calls
        self._end_soon, self._end_thinking_soon = end_soon, end_thinking_soon
        self._clock, self._estimates = clock, estimates
        self._began = clock()
        self._arrived: deque[Commit] = deque()
        self._num_taken = 0  # of the tokens of the first arrived commit
        self._num_in_first_round = 0  # tokens of the first round that were given
        self._first_at: float | None = None
        self._last_at: float | None = None

    def __repr__(self) -> str:
        return f"<outrider TokenStream, {self.state}>"

    @property
    def state(self) -> str:
        """How far the stream has come, for its representation."""
        how = self.finish_reason or ("closed" if self._is_closed else "under way")
        return f"{how}: {self.answer.num_tokens} tokens given"

    @property
    def session(self) -> int:
        """The number of this generation in a trace."""
        return self._opened.session

    @property
    def began(self) -> float:
        """When the stream was made, in seconds on the clock of a trace's events; its generation may begin later."""
        return self._began

    @property
    def content(self) -> str:
        """The text of the given tokens, without reasoning and tool calls."""
        return self.answer.said if self.parts is None else self.parts.content

    @property
    def thinking(self) -> str:
        """The reasoning among the given tokens."""
        return self.answer.thinking

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that are complete with the given tokens, in order; empty for a generation without tools."""
        return () if self.parts is None else tuple(self.parts.calls)

    @property
    def tail(self) -> str:
        """The text of the given tokens that was withheld: the possible beginning of a stop string, or half a character.

        The texts of the tokens and the tail add up to the decoding of the tokens' ids. The tail comes with a later
        token, unless it turns out to be a stop string; after a `break`, a cancellation or a failure, it is the rest of
        the text. It is empty once the text is over.
        """
        return self._text.tail

    @property
    def is_closed(self) -> bool:
        """Whether no more tokens come: the last one was given, or the stream was closed or failed."""
        return self._is_closed

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. The time ends now, or with the last token if the stream is over.

        See `runtime.Statistics`.
        """
        end = self._last_at if self._is_closed and self._last_at is not None else self._clock()
        return self._session.counts.snapshot(
            elapsed=end - self._began,
            generation_seconds=end - self._first_at if self._first_at is not None else 0.0,
            num_untimed=self._num_in_first_round,
            time_to_first_token=None if self._first_at is None else self._first_at - self._began,
            peak_memory=mx.get_peak_memory(),
            estimates=self._estimates(),
            lookahead=self._opened.settings.lookahead if self._opened.drafted else 0,
        )

    def end_thinking(self) -> None:
        """End the reasoning: the tag that closes it is forced, and the answer follows.

        Returns at once, in any thread. Tokens of the reasoning that are generated by then still come first. An answer
        that has not begun to reason will not; one that has ended to, or cannot, is not changed.
        """
        self._end_thinking_soon()

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
        if (token := self.take()) is None:
            raise StopAsyncIteration
        if token.finish_reason is not None:
            self.close()
        return token

    def __del__(self) -> None:
        if not self._is_closed:
            self.end()  # before the warning: whoever shows it may keep the stream
            self._end_soon()
            if self._is_unread and self.is_open:
                warn_unread(self, "aclose()")

    # --- in trio's thread -------------------------------------------------------------------------

    async def _wait_for_token(self) -> None:
        if self.needs_commits:
            await self.receive()
            if not self._arrived:
                self.close()
        else:
            # A checkpoint for each token, even if several came in one commit.
            await trio.lowlevel.checkpoint()

    async def receive(self) -> None:
        """Wait until a commit has arrived, or no more come."""
        try:
            commit = await self._commits.receive()
        except trio.EndOfChannel:
            self._receive_unsent()
        except trio.ClosedResourceError:
            pass  # closed by another task, while this one was waiting
        else:
            self._arrived.append(commit)
            self._session.make_room()

    async def receive_all(self) -> None:
        """As `receive`, and take all commits that have arrived by then. For a consumer in another thread."""
        if self._receive_ready() == 0:
            await self.receive()
            self._receive_ready()

    def receive_rest(self) -> None:
        """As `receive_all`, once trio's loop has ended; for any thread."""
        self._receive_ready()
        self._receive_unsent()

    def _receive_ready(self) -> int:
        """Take the commits that have arrived. Returns: how many."""
        num_received = 0
        while True:
            try:
                self._arrived.append(self._commits.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return num_received
            num_received += 1
            if self._session.error is None:
                self._session.make_room()

    def _receive_unsent(self) -> None:
        # The consumer still gets a commit that was not sent. It may be the end of the text, which must not count as a
        # failure: an actor that is still at work would drop its cached tokens.
        session = self._session
        unsent, session.unsent = session.unsent, None
        if unsent is not None:
            self._arrived.append(unsent)
        elif session.error is None:
            session.error = RuntimeClosedError("the runtime was closed before the text was over")

    def close(self) -> None:
        self.end()
        self._commits.close()
        self._end_soon()

    # --- in the consumer's thread -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether neither the session nor its runtime has ended with an error."""
        return self._session.error is None

    @property
    def needs_commits(self) -> bool:
        """Whether the next token must still arrive."""
        return not self._arrived and not self._is_closed

    def take(self) -> Token | None:
        """The next token, after commits have arrived; None once all were given.

        Raises: the reason why no more tokens come, if the text is not over.
        """
        if self.finish_reason is not None:
            return None
        if self._is_closed or not self._arrived:
            self.end()
            raise self._session.error or RuntimeClosedError(STREAM_CLOSED)
        return self._next_token()

    def end(self) -> None:
        """Give no more tokens."""
        if self._is_closed:
            return
        self._is_closed = True
        self._arrived.clear()
        if self.finish_reason is None and self._calls is not None and self.parts is not None:
            self.parts.add(self._calls.finish(is_complete=False))
        self.answer.is_over, self.answer.tail = True, self._text.tail

    def _next_token(self) -> Token:
        commit, index = self._arrived[0], self._num_taken
        self._num_taken += 1
        is_last_in_commit = self._num_taken == len(commit.tokens)
        finish_reason = commit.finish_reason if is_last_in_commit else None
        if is_last_in_commit:
            self._arrived.popleft()
            self._num_taken = 0
        self._last_at = self._clock()
        if self._first_at is None:
            self._first_at = self._last_at
        position = len(self.answer.texts)
        self._num_in_first_round += position == index
        self._session.counts.give(commit, index)
        likelihood = commit.likelihoods[index] if commit.likelihoods else None
        top = () if likelihood is None else likelihood.top
        is_last, is_cut = finish_reason is not None, finish_reason == "length"
        id = commit.tokens[index]
        text = self._text.add(id, is_last=is_last, is_cut=is_cut)
        self.answer.texts.append(text)
        token = Token(
            id=id,
            text=text,
            index=position,
            drafted_by=commit.drafted_by(index),
            finish_reason=finish_reason,
            logprob=None if likelihood is None else likelihood.logprob,
            top_logprobs=tuple(TopLogprob(id, self._text.alone(id), logprob) for id, logprob in top),
            stop_reason=commit.stop_reason if is_last_in_commit else None,
            is_thinking=self.answer.has_marks and self.answer.mark(id, self._text.readable),
        )
        if self._calls is not None and self.parts is not None:
            token = self._with_deltas(token, self._calls, self.parts)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, commit.stop_reason
        return token

    def _with_deltas(self, token: Token, calls: Reader, parts: Answer) -> Token:
        was_in_block = calls.is_in_block
        deltas = calls.add(token.text)
        is_tool_call = was_in_block or calls.is_in_block or any(delta.kind == "call_ended" for delta in deltas)
        if token.finish_reason is not None:
            deltas += calls.finish(is_complete=token.is_complete)
        parts.add(deltas)
        return attrs.evolve(token, is_tool_call=is_tool_call, deltas=tuple(deltas))


def warn_unread(stream: object, how_to_close: str) -> None:
    """Warn of a stream that was dropped unread; the last step of a stream's `__del__`."""
    warnings.warn(
        f"a token stream was dropped unread, which ended its generation; read it, or close it with {how_to_close}",
        ResourceWarning,
        stacklevel=3,
        source=stream,
    )


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
        thinking=stream.thinking,
        content=stream.content,
        tool_calls=stream.tool_calls,
    )
