"""Handles on streams in trio's thread, for their consumers elsewhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx

from protocol.errors import RuntimeClosedError, StreamBusyError
from protocol.session_state import FinishReason
from protocol.statistics import Counts, Statistics
from runtime.bridge.portal import Call, Portal
from runtime.generation.many_prompts import C
from runtime.generation.many_prompts import Completions as TrioCompletions
from runtime.generation.token_stream import Completion, SingleConsumer, completion_of, warn_unread
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import ToolCall

T = TypeVar("T")
S = TypeVar("S", bound=SingleConsumer)


class Handle(Generic[S]):
    """A consumer's handle on a stream that lives in trio's thread; one task, or one thread, reads it at a time.

    Dropping the last reference to the handle closes the stream.
    """

    _is_closed = True  # until there is something to close
    _is_unread = True

    def __init__(self, portal: Portal, begin: Callable[[], S]) -> None:
        """`begin` begins the stream, in trio's thread; it must not refer to this handle.

        Raises: RuntimeClosedError: trio's thread has ended.
        """
        self._portal = portal
        self._in_use = threading.Lock()
        self._begun = Call[S](portal.thread, begin)
        self._is_closed = False

    def __del__(self) -> None:
        self._close()

    async def aclose(self) -> None:
        """End the generation, or all of them. Returns at once; closing again does nothing."""
        self._portal.thread.check_caller()
        self._close()
        await self._portal.thread.pause()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __aiter__(self) -> Self:
        return self

    async def _receive(self, receive: Callable[[], Awaitable[T]]) -> T:
        """The result of `receive`; whatever interrupts it closes the stream."""
        thread = self._portal.thread
        thread.check_caller()
        is_ours = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                self._is_unread = False
                return await receive()
        except Exception:
            raise
        except BaseException:  # a cancellation, a Ctrl-C, or the event loop drops the task
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError(f"another {thread.consumer} is waiting for the next item; a stream has one consumer")

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._post(lambda stream: stream.close())

    async def _ask(self, ask: Callable[[S], Awaitable[T]]) -> T:
        """The result of a coroutine of the stream, once that has begun."""
        stream = await self._begun.result()
        return await Call[T](self._portal.thread, lambda: ask(stream)).result()

    def _post(self, do: Callable[[S], None]) -> None:
        """Have `do` called with the stream, in trio's thread; not if it could not be begun."""
        begun = self._begun  # alone: nothing in trio's thread may refer to this handle

        def do_if_begun() -> None:
            if begun.value is not None:
                do(begun.value)

        self._portal.thread.run_soon(do_if_begun)


class StreamState(ABC):
    """What a handle tells of a generation: of the tokens that it has given."""

    @property
    @abstractmethod
    def _stream(self) -> TrioTokenStream | None:
        """The stream in trio's thread; None until its prompt was checked."""

    @property
    def content(self) -> str:
        """The text of the given tokens, without reasoning and tool calls."""
        return "" if self._stream is None else self._stream.content

    @property
    def thinking(self) -> str:
        """The reasoning among the given tokens."""
        return "" if self._stream is None else self._stream.thinking

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """As `runtime.TokenStream.tool_calls`."""
        return () if self._stream is None else self._stream.tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """As `runtime.TokenStream.finish_reason`."""
        return None if self._stream is None else self._stream.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """As `runtime.TokenStream.stop_reason`."""
        return None if self._stream is None else self._stream.stop_reason

    @property
    def tail(self) -> str:
        """As `runtime.TokenStream.tail`."""
        return "" if self._stream is None else self._stream.tail

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether no more tokens come: the last one was given, or the stream was closed or failed."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. See `runtime.Statistics`."""


class TokenStream(StreamState, Handle[TrioTokenStream]):
    """The tokens of one generation: `runtime.TokenStream` for asyncio. See there for what ends the generation.

    Cancelling the task that waits in `__anext__` has the effect of a cancel scope there.
    """

    def __repr__(self) -> str:
        face, stream = self._portal.thread.face, self._stream
        state = f"{'closed' if self._is_closed else 'under way'}: 0 tokens given" if stream is None else stream.state
        return f"<outrider {face}.TokenStream, {state}>"

    def __del__(self) -> None:
        # A stream that could not be begun is closed.
        was_open = not self._is_closed and self._begun.error is None and (self._stream is None or self._stream.is_open)
        super().__del__()
        if was_open and self._is_unread:
            warn_unread(self, self._portal.thread.how_to_close)

    async def __anext__(self) -> Token:
        """The next token.

        Raises: as `runtime.TokenStream.__anext__`, and:
            PromptError, SettingsError: the prompt or its settings are invalid; raised by the first call.
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: ends the generation.
        """
        if (token := await self._receive(self._next)) is None:
            raise StopAsyncIteration
        return token

    async def opened(self) -> None:
        """Wait until the prompt was checked; `async with` does so too.

        Raises: as `runtime.Runtime.stream`.

        Cancellation: ends the generation.
        """
        self._portal.thread.check_caller()
        try:
            await self._begun.result()
        except BaseException:  # a cancellation, too
            self._close()
            raise

    async def __aenter__(self) -> Self:
        await self.opened()
        return self

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def statistics(self) -> Statistics:
        if (stream := self._stream) is None:  # the prompt was not checked yet: all counts are zero
            return Counts().snapshot(peak_memory=mx.get_peak_memory(), estimates=self._portal.runtime.estimates)
        return stream.statistics()

    def end_thinking(self) -> None:
        """As `runtime.TokenStream.end_thinking`."""
        self._post(lambda stream: stream.end_thinking())

    async def read_whole(self) -> Completion:
        """Read the stream to its end. A cancellation ends the generation."""
        tokens: list[Token] = []
        try:
            while (token := await self._receive(self._next)) is not None:
                tokens.append(token)
        finally:
            self._close()
        assert self._stream is not None
        return completion_of(self._stream, tokens)

    @property
    def _stream(self) -> TrioTokenStream | None:
        return self._begun.value

    async def _next(self) -> Token | None:
        if self._stream is None:
            await self.opened()
        stream = self._stream
        assert stream is not None
        if stream.needs_commits and not self._is_closed:
            try:
                await Call[None](self._portal.thread, stream.receive_all).result()
            except RuntimeClosedError:
                stream.receive_rest()
        else:
            # One pass of the loop for each token, even if several arrived at once.
            await self._portal.thread.pause()
        try:
            token = stream.take()
        finally:
            if stream.is_closed or stream.finish_reason is not None:
                self._close()
        return token

    def _close(self) -> None:
        if not self._is_closed and self._stream is not None:
            self._stream.end()
        super()._close()


class Completions(Handle[TrioCompletions[C]], Generic[C]):
    """The completions of many prompts: `runtime.Completions` for asyncio."""

    def __repr__(self) -> str:
        completions = self._begun.value
        state = "under way: 0 given" if completions is None else completions.state
        return f"<outrider {self._portal.thread.face}.Completions, {state}>"

    def __await__(self) -> Generator[Any, None, list[C]]:
        """All completions, in the order of the prompts; see `runtime.Completions.__await__`."""
        return self._receive(lambda: self._ask(lambda completions: completions.gather())).__await__()

    async def __anext__(self) -> tuple[int, C]:
        """The next finished completion, with the index of its prompt. Raises: as when awaited."""
        return await self._receive(lambda: self._ask(lambda completions: completions.__anext__()))
