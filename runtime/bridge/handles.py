"""What the handles for asyncio (`runtime.aio`) and for plain threads (`runtime.sync`) have in common.

The runtime itself, its streams and its conversations live in trio's thread. A handle holds on to them from elsewhere.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.memory import peak_memory
from protocol.errors import ConversationBusyError, RuntimeClosedError
from protocol.session_state import Commit, FinishReason
from protocol.statistics import Counts, Statistics
from runtime.bridge.call import BridgeCall
from runtime.bridge.stream import BridgeStream, S
from runtime.bridge.trio_thread import TrioThread
from runtime.engine import runtime as engine
from runtime.engine.health import Health
from runtime.generation import conversation, token_stream
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import Prompt
from runtime.generation.token_stream import SessionFile

T = TypeVar("T")
Thread = TypeVar("Thread", bound=TrioThread[Any])

_NOTHING = ReasoningTracker(None, ())


class Commits:
    """What is committed of a stream, as a source for a relay.

    Attributes:
        stream: trio's, which nobody iterates over; it says in trio's thread whether the generation is over.
        reading: the stream's, for the consumer's thread.
        arrivals: the stream's.
    """

    def __init__(self, stream: token_stream.TokenStream) -> None:
        self.stream = stream
        self.reading = stream.reader
        self.arrivals = stream.arrivals

    async def take(self) -> Sequence[Commit]:
        """See `Source.take`."""
        commit = await self.arrivals.receive()
        return () if commit is None else (commit, *self.arrivals.receive_ready())

    def rest(self) -> Sequence[Commit]:
        """See `Source.rest`."""
        return self.arrivals.receive_rest()

    def close(self) -> None:
        """See `Source.close`."""
        self.stream.hang_up()


class StreamHandle:
    """Holds on to a generation from outside trio's thread; a subclass waits for its tokens."""

    _how_to_close: str

    def __init__(self, relay: BridgeStream[Commits, Commit], unopened: Callable[[], Statistics]) -> None:
        """Nothing was given so far.

        Args:
            relay: of what is committed; it must not know this object.
            unopened: the statistics of a stream whose prompt was not looked at yet.
        """
        self._relay = relay
        self._unopened = unopened
        self._source: Commits | None = None  # once the prompt was looked at
        self._commits: deque[Commit] = deque()
        self._is_closed = False
        self._is_unread = True

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        return None if self._source is None else self._source.reading.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, once its last token was given, or None."""
        return None if self._source is None else self._source.reading.stop_reason

    @property
    def answer(self) -> ReasoningTracker:
        """What was given so far, told apart into what the model thinks and what it says."""
        return _NOTHING if self._source is None else self._source.reading.answer

    @property
    def tail(self) -> str:
        """The text of the tokens given that was not given with them; see `runtime.TokenStream.tail`."""
        return "" if self._source is None else self._source.reading.tail

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes: the last token was given, or the stream was closed, or failed."""
        return self._is_closed

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. See `runtime.Statistics`."""
        if self._source is None:
            return self._unopened()
        return self._source.reading.statistics(is_over=self._is_closed)

    @property
    def _state(self) -> str:
        """In words, for a repr."""
        state = self.finish_reason or ("closed" if self._is_closed else "under way")
        num_given = 0 if self._source is None else self._source.reading.num_given
        return f"{state}: {num_given} tokens given"

    def __del__(self) -> None:
        if not self._is_closed:
            if self._source is not None:
                self._source.reading.end()
            self._relay.hang_up()
            self._is_closed = True  # whoever shows the warning may keep the stream
            if self._is_unread and not self._relay.is_over:
                token_stream.warn_unread(self, self._how_to_close)

    def _begun(self) -> Commits:
        """The source, once the relay has begun.

        Raises: what opening the stream raised.
        """
        if self._source is None:
            if self._relay.failure is not None:
                self._close()
                raise self._relay.failure
            self._source = self._relay.source
            assert self._source is not None
            if self.finish_reason is not None:  # it was saved at its end
                self._close()
        return self._source

    def _writing(self, path: SessionFile) -> Callable[[], Awaitable[int]]:
        """What saves the stream in trio, as far as its tokens were given by now."""
        self._is_unread = False
        source = self._begun()
        # What has come into this thread by now; the rest is in trio's.
        here = source.reading.progress.with_commits(self._commits)
        return lambda: source.stream.write(path, lambda: here)

    def _must_ask(self, source: Commits) -> bool:
        """Whether the next token is still to come from trio's thread."""
        reading = source.reading
        return reading.finish_reason is None and not self._is_closed and not reading.has_more and not self._commits

    def _has_next(self, source: Commits) -> bool:
        """Whether there is a next token, after what was asked for has come; False where the text is over.

        Raises: why nothing more comes of a text that is not over.
        """
        reading = source.reading
        if reading.finish_reason is not None:
            return False
        if self._is_closed:
            raise source.arrivals.error
        if not reading.has_more:
            if not self._commits:
                self._close()
                raise source.arrivals.error
            reading.begin_commit(self._commits.popleft())
        return True

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._source is not None:
                self._source.reading.end()
                self._source.arrivals.hang_up()
            self._relay.hang_up()


Handle = TypeVar("Handle", bound=StreamHandle)


class ConversationHandle(Generic[Handle]):
    """Holds on to a conversation from outside trio's thread; a subclass says things in it."""

    _how_to_close: str  # a stream

    def __init__(
        self, make: Callable[[], conversation.Conversation], made: conversation.Conversation | None = None
    ) -> None:
        """Of a conversation that is made when something is said in it first.

        Args:
            make: makes the conversation itself, in trio's thread.
            made: one that there is already; `make` makes another like it, without what was said.
        """
        self._make = make
        self._made = made
        self._last: weakref.ref[Handle] | None = None  # weak, since dropping the stream is a way to end it

    @property
    def messages(self) -> list[conversation.Message]:
        """What was said so far, oldest first; a copy. A turn belongs to it from its first token on that was given."""
        return [] if self._made is None else self._made.messages

    def _forget(self) -> None:
        self._check_idle("forget what was said")
        self._made, self._last = None, None

    def _check_idle(self, what: str) -> None:
        stream = None if self._last is None else self._last()
        if stream is not None and not stream.is_closed:
            raise ConversationBusyError(
                f"cannot {what} while an answer is under way; read it to its end, or close its stream with "
                f"{self._how_to_close}"
            )

    # --- in trio's thread, where one turn begins after the other ------------------------------------

    def _open(self, text: str, overrides: dict[str, Any]) -> token_stream.TokenStream:
        return self._there().stream(text, **overrides)

    async def _save(self, path: SessionFile) -> int:
        return await self._there().save(path)

    def _there(self) -> conversation.Conversation:
        if self._made is None:
            self._made = self._make()
        return self._made


class RuntimeHandle(Generic[Thread]):
    """Holds on to a runtime from outside trio's thread; a subclass asks for texts."""

    def __init__(self, thread: Thread, runtime: engine.Runtime) -> None:
        """Of a runtime that is open.

        Args:
            thread: trio's, with the runtime in it.
            runtime: the same.
        """
        self._thread = thread
        self._runtime = runtime

    def __repr__(self) -> str:
        return repr(self._runtime)

    def statistics(self) -> Statistics:
        """As `runtime.Runtime.statistics`. The models work on meanwhile: of a round that ends at this very moment, some
        figures may be in it and some not. No count is ever less than it was before.
        """
        return self._runtime.statistics()

    def health(self) -> Health:
        """As `runtime.Runtime.health`."""
        return self._runtime.health()

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it."""
        return self._runtime.tokenizer

    @property
    def num_streams(self) -> int:
        """Streams that are under way; one that was begun or ended just now may not be counted, or still be."""
        return self._runtime.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait for others to make room, because `max_streams` are at work; with the same reserve."""
        return self._runtime.num_waiting

    def _relay(self, make_source: Callable[[], S]) -> BridgeStream[S, Any]:
        try:
            return BridgeStream(self._thread, make_source)
        except trio.RunFinishedError:
            raise RuntimeClosedError(engine.CLOSED) from None

    def _errand(self, do: Callable[[], Awaitable[T]]) -> BridgeCall[T]:
        """Something that trio does, while the runtime is open."""
        self._runtime.check_open()
        try:
            return BridgeCall(self._thread, self._runtime.check_open, do)
        except trio.RunFinishedError:
            raise RuntimeClosedError(engine.CLOSED) from None

    def _anew(self, made: conversation.Conversation) -> Callable[[], conversation.Conversation]:
        """Makes a conversation like one that there is, in which nothing was said yet."""
        system = made._system[0]["content"] if made._system else None
        return partial(self._runtime.conversation, system, thinking=made._thinking, **made._settings)

    def _nothing_yet(self) -> Statistics:
        return Counts().snapshot(
            elapsed=0.0,
            generation_seconds=0.0,
            time_to_first_token=None,
            peak_memory=peak_memory(),
            estimates=self._runtime.prices.estimates(),
        )


def own(prompt: Prompt) -> Prompt:
    """A prompt that the caller cannot change any more, and that any thread can read."""
    if hasattr(prompt, "tolist"):
        listed: Prompt = prompt.tolist()
        return listed
    if isinstance(prompt, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    return prompt
