"""The handles on a stream, a conversation and a runtime that asyncio (`runtime.aio`) and plain threads (`runtime.sync`)
share.

The runtime, its streams and its conversations live in the trio thread. A handle refers to one of them from elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import ConversationBusyError
from protocol.session_state import Commit
from protocol.statistics import Statistics
from runtime.bridge.iterator_handle import IteratorHandle
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.engine.runtime import Health
from runtime.generation.consumers import StreamState
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import Message
from runtime.generation.text import Prompt
from runtime.generation.token_reader import Token, TokenReader
from runtime.generation.token_stream import SessionFile, warn_unread
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tool_calls.events import ToolCall
from runtime.generation.tool_calls.function_caller import FunctionCaller
from runtime.generation.tool_calls.functions import Functions
from runtime.generation.tool_calls.messages import calls_without_results


class CommitSource:
    """The commits of one generation, as a source for a bridge stream.

    Attributes:
        stream: the trio stream. Nobody iterates over it; it tells the trio thread whether the generation is over.
        reader: the stream's token reader, used in the consumer's thread.
        arrivals: the stream's commits, received in the trio thread.
    """

    def __init__(self, stream: TrioTokenStream) -> None:
        self.stream = stream
        self.reader = stream.reader
        self.arrivals = stream.arrivals

    async def receive(self) -> Sequence[Commit]:
        """See `Source.receive`."""
        commit = await self.arrivals.receive()
        return () if commit is None else (commit, *self.arrivals.receive_ready())

    def drain(self) -> Sequence[Commit]:
        """See `Source.drain`."""
        return self.arrivals.receive_rest()

    def close(self) -> None:
        """See `Source.close`."""
        self.stream.hang_up()


class StreamHandle(StreamState, IteratorHandle[CommitSource, Commit, Token]):
    """A handle on one generation from outside the trio thread; gives its tokens."""

    _how_to_close: str  # the call that closes a stream, for messages
    _source: CommitSource | None = None  # set once the prompt was checked

    def __del__(self) -> None:
        # A stream whose making failed has no bridge stream, and is closed.
        is_dropped_unread = not self._is_closed and self._is_unread and self._is_open
        super().__del__()
        if is_dropped_unread:
            warn_unread(self, self._how_to_close)

    @property
    def _is_open(self) -> bool:
        """Whether the generation has neither ended nor failed."""
        source = self._bridge_stream.source
        return not self._bridge_stream.is_over and (source is None or source.arrivals.is_open)

    @property
    def _opened_reader(self) -> TokenReader | None:
        return None if self._source is None else self._source.reader

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. See `runtime.Statistics`."""
        if self._source is None:
            return self._bridge.unopened_statistics()
        return self._source.reader.statistics(is_over=self._is_closed)

    def _source_once_opened(self) -> CommitSource:
        if self._source is None:
            self._source = super()._source_once_opened()
            if self.finish_reason is not None:  # a loaded stream that was saved at its end
                self._close()
        return self._source

    def _make_save(self, path: SessionFile) -> Callable[[], Awaitable[int]]:
        """A function that saves the stream, in the trio thread, behind the last token given by now."""
        self._is_unread = False
        source = self._source_once_opened()
        # Commits that are in this thread already; later ones are in the trio thread.
        progress = source.reader.progress.with_commits(self._arrived)
        return lambda: source.stream.write(path, lambda: progress)

    def _must_request(self, source: CommitSource) -> bool:
        reader = source.reader
        return reader.finish_reason is None and not self._is_closed and not reader.has_more and not self._arrived

    def _take_next(self, source: CommitSource) -> Token | None:
        reader = source.reader
        if reader.finish_reason is not None:
            return None
        if self._is_closed:
            raise source.arrivals.error
        if not reader.has_more:
            if not self._arrived:
                self._close()
                raise source.arrivals.error
            reader.begin_commit(self._arrived.popleft())
        token = reader.next_token()
        if token.finish_reason is not None:
            self._close()
        return token

    def _close(self) -> None:
        if not self._is_closed and self._source is not None:
            self._source.reader.end()
            self._source.arrivals.hang_up()
        super()._close()


Handle = TypeVar("Handle", bound=StreamHandle)


class ConversationHandle(Generic[Handle]):
    """A handle on a conversation from outside the trio thread; a subclass waits for its answers."""

    _how_to_close: str  # the call that closes a stream, for messages

    def __init__(
        self,
        bridge: RuntimeBridge[Any],
        open_handle: Callable[[Callable[[], TrioTokenStream]], Handle],
        functions: Functions,
        make_conversation: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """A conversation that is made in the trio thread before its first turn.

        Args:
            bridge: to the conversation's runtime.
            open_handle: makes the handle of a stream, from a function that opens the stream in the trio thread.
            functions: that the model may call; called by the handle, and not in the trio thread.
            make_conversation: makes the trio conversation, in the trio thread; the functions are told to it.
            conversation: one that exists already; `make_conversation` makes another like it, in which nothing was said.
        """
        self._bridge = bridge
        self._open_handle = open_handle
        self._caller = FunctionCaller(functions)
        self._make_conversation = make_conversation
        self._conversation = conversation
        self._last: weakref.ref[Handle] | None = None  # weak, since dropping the stream is a way to end it

    @property
    def messages(self) -> list[Message]:
        """The messages so far, oldest first; a copy. A turn is part of them from the first token on that was given."""
        return [] if self._conversation is None else self._conversation.messages

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer, of which the model was not told any results yet; empty during an answer."""
        return () if self._is_answering else calls_without_results(self.messages)

    def _begin_turn(self, text: str | None, overrides: dict[str, Any]) -> Handle:
        self._bridge.check_settings(overrides)
        self._check_idle("say something")
        stream = self._open_handle(partial(self._open_turn, text, overrides))
        self._last = weakref.ref(stream)
        return stream

    def _forget(self) -> None:
        self._check_idle("forget what was said")
        self._conversation, self._last = None, None

    def _add_results(self, results: Sequence[Message]) -> None:
        if results:
            assert self._conversation is not None, "there were calls"
            self._conversation.add_results(results)

    @property
    def _is_answering(self) -> bool:
        stream = None if self._last is None else self._last()
        return stream is not None and not stream.is_closed

    def _check_idle(self, what: str) -> None:
        self._caller.check_idle(what)
        if self._is_answering:
            raise ConversationBusyError(
                f"cannot {what} while an answer is under way; read it to its end, or close its stream with "
                f"{self._how_to_close}"
            )

    # --- in the trio thread, where turns begin in the order of the calls ---------------------------

    def _open_turn(self, text: str | None, overrides: dict[str, Any]) -> TrioTokenStream:
        return self._made_conversation().stream(text, **overrides)

    async def _save(self, path: SessionFile) -> int:
        return await self._made_conversation().save(path)

    def _made_conversation(self) -> TrioConversation:
        if self._conversation is None:
            self._conversation = self._make_conversation()
        return self._conversation


B = TypeVar("B", bound=RuntimeBridge[Any])


class RuntimeHandle(Generic[B]):
    """A handle on a runtime from outside the trio thread; a subclass generates texts."""

    def __init__(self, bridge: B) -> None:
        self._bridge = bridge

    def __repr__(self) -> str:
        return repr(self._bridge.runtime)

    def statistics(self) -> Statistics:
        """As `runtime.Runtime.statistics`. The models go on working meanwhile: if a round ends at this moment, only
        some of its figures may be counted. No count is ever less than it was before.
        """
        return self._bridge.runtime.statistics()

    def health(self) -> Health:
        """As `runtime.Runtime.health`."""
        return self._bridge.runtime.health()

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it."""
        return self._bridge.runtime.tokenizer

    @property
    def max_streams(self) -> int | None:
        """Most streams that are at work at the same time; None for no bound."""
        return self._bridge.runtime.max_streams

    @property
    def num_streams(self) -> int:
        """Streams that are under way. A stream that begins or ends at this moment may or may not be counted."""
        return self._bridge.runtime.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait because `max_streams` others are at work; as inexact as `num_streams`."""
        return self._bridge.runtime.num_waiting


def copy_prompt(prompt: Prompt) -> Prompt:
    """A copy of a prompt that the caller cannot change any more, and that any thread can read."""
    if hasattr(prompt, "tolist"):
        listed: Prompt = prompt.tolist()
        return listed
    if isinstance(prompt, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    return prompt
