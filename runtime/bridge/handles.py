"""The handles on a stream, a conversation and a runtime that asyncio (`runtime.aio`) and plain threads (`runtime.sync`)
share.

The runtime, its streams and its conversations live in the trio thread. A handle refers to one of them from elsewhere.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Never, TypeVar, Unpack, cast, overload

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.argument_aliases import MISSING
from protocol.session_state import Commit
from protocol.settings import SettingsLike, with_overrides
from protocol.settings_keywords import ScoreArguments, SettingsArguments
from protocol.statistics import Counts, Statistics
from runtime.bridge.opener import evaluate_on_this_thread
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.bridge.trio_thread import BridgeStream, S
from runtime.engine.runtime import Health
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import Message, turn_settings
from runtime.generation.many_prompts import (
    Completions,
    ManyPrompt,
    OnError,
    Prompts,
    check_arguments,
    is_async,
    is_list,
    with_settings,
)
from runtime.generation.text import Prompt
from runtime.generation.token_reader import Token, TokenReader
from runtime.generation.token_stream import Completion, SessionFile, StreamState, completion_of, warn_unread
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tool_calls.events import ToolCall
from runtime.generation.tool_calls.functions import MAX_TOOL_ROUNDS, FunctionCaller, Functions
from runtime.generation.tool_calls.messages import calls_without_results
from runtime.generation.tool_calls.tools import StreamArguments, split_tools
from runtime.loading.model_sources import Source

T = TypeVar("T")
Item = TypeVar("Item")
# What a method that waits returns: the result, or in an event loop a coroutine.
SizeT = TypeVar("SizeT")


class IteratorHandle(ABC, Generic[S, T, Item]):
    """An iterator's state in the consumer's thread, over what a source in the trio thread produces.

    A concrete class turns what arrives (T) into items for the consumer (Item), as `StreamHandle` does. A base waits for
    them: `AsyncIteration` in asyncio, `BlockingIteration` in threads.
    """

    _is_closed = True  # until there is a bridge stream to close
    _is_unread = True

    def __init__(self, bridge: RuntimeBridge, make_source: Callable[[], S]) -> None:
        """`make_source` is called in the trio thread. It must not refer to this handle: dropping the last reference to
        the handle ends the stream.

        Raises: RuntimeClosedError: the trio thread has ended.
        """
        self._bridge = bridge
        self._bridge_stream: BridgeStream[S, T] = bridge.open_stream(make_source)
        self._arrived: deque[T] = deque()
        self._is_closed = False

    def __del__(self) -> None:
        self._close()

    async def _next(self) -> Item | None:
        """The next item; None once all were given."""
        source = await self._wait_opened()
        if self._must_request(source):
            arrived: Sequence[T] = await self._bridge.thread.wait(self._bridge_stream.request_items())
            self._arrived.extend(arrived)
        else:
            # One pass of the loop for each item, even if several arrived at once.
            await self._bridge.pause()
        return self._take_next(source)

    async def _wait_opened(self) -> S:
        """The source, once it was made in the trio thread. Raises: what making it raised."""
        stream = self._bridge_stream
        if not stream.opened.done():
            await self._bridge.thread.wait(stream.opened)
        if stream.failure is not None:
            self._close()
            raise stream.failure
        assert stream.source is not None
        return stream.source

    @abstractmethod
    def _must_request(self, source: S) -> bool:
        """Whether the next item must be requested from the trio thread."""

    @abstractmethod
    def _take_next(self, source: S) -> Item | None:
        """The next item, after requested items have arrived; None once all were given.

        Raises: the reason why no further items come, if not all were given.
        """

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._bridge_stream.close()


class CommitSource:
    """The commits of one generation, as a source for a bridge stream.

    Attributes:
        stream: the trio stream. Nobody iterates over it: its `arrivals` are received in the trio thread, and its
            `reader` is used in the consumer's.
    """

    def __init__(self, stream: TrioTokenStream) -> None:
        self.stream = stream
        self.reader = stream.reader
        self.arrivals = stream.arrivals

    async def receive(self) -> Sequence[Commit]:
        commit = await self.arrivals.receive()
        return () if commit is None else (commit, *self.arrivals.receive_ready())

    def drain(self) -> Sequence[Commit]:
        return self.arrivals.receive_rest()

    def close(self) -> None:
        self.stream.hang_up()


class StreamHandle(StreamState, IteratorHandle[CommitSource, Commit, Token]):
    """A handle on one generation from outside the trio thread; gives its tokens."""

    _source: CommitSource | None = None  # set once the prompt was checked

    def __init__(self, bridge: RuntimeBridge, open_stream: Callable[[], TrioTokenStream]) -> None:
        super().__init__(bridge, lambda: CommitSource(open_stream()))

    def __repr__(self) -> str:
        return f"<outrider {self._bridge.face}.TokenStream, {self._state}>"

    def __del__(self) -> None:
        # A stream that could not be made has no bridge stream, and is closed.
        is_dropped_unread = not self._is_closed and self._is_unread and self._is_open
        super().__del__()
        if is_dropped_unread:
            warn_unread(self, self._bridge.how_to_close)

    @property
    def _is_open(self) -> bool:
        source = self._bridge_stream.source
        return not self._bridge_stream.is_over and (source is None or source.arrivals.is_open)

    @property
    def _opened_reader(self) -> TokenReader | None:
        return None if self._source is None else self._source.reader

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. See `runtime.Statistics`."""
        if self._source is None:  # the prompt was not checked yet: all counts are zero
            return Counts().snapshot(peak_memory=mx.get_peak_memory(), estimates=self._bridge.runtime.estimates)
        return self._source.reader.statistics(is_over=self._is_closed)

    async def _wait_opened(self) -> CommitSource:
        if self._source is None:
            self._source = await super()._wait_opened()
        return self._source

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


StreamT = TypeVar("StreamT", bound=StreamHandle)
CompletionT = TypeVar("CompletionT")
CalledT = TypeVar("CalledT")


class ConversationHandle(Generic[StreamT, CompletionT, SizeT, CalledT]):
    """A handle on a conversation from outside the trio thread; a subclass says how its callers wait."""

    _stream_handle: type[StreamT]

    def __init__(
        self,
        bridge: RuntimeBridge,
        functions: Functions,
        system: str | None,
        make_conversation: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """Without `conversation`, `make_conversation` makes it in the trio thread before the first turn; otherwise it
        makes an empty one like it, after `reset`. The handle calls the functions, and not in the trio thread.
        """
        self._bridge = bridge
        self._caller = FunctionCaller(functions)
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._make_conversation = make_conversation
        self._conversation = conversation
        self._last: weakref.ref[StreamT] | None = None  # weak, since dropping the stream is a way to end it

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages so far, oldest first, the system message included. A turn is part of them once a token
        of its answer was given.
        """
        known = self._system if self._conversation is None else self._conversation.messages
        return [dict(message) for message in known]

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer whose results the model was not told yet; empty during an answer."""
        return () if self._is_answering else calls_without_results(self.messages)

    def __repr__(self) -> str:
        return f"<outrider {self._bridge.face}.Conversation: {len(self.messages)} messages>"

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> StreamT:
        """Begin a turn, and stream the answer; see `runtime.Conversation.stream`. ConversationBusyError also while
        functions are being called.
        """
        keywords = turn_settings(settings, overrides)
        self._bridge.check_settings(keywords)
        self._check_idle("say something")
        stream = self._stream_handle(self._bridge, partial(self._open_turn, text, keywords))
        self._last = weakref.ref(stream)
        return stream

    def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> CompletionT:
        """Begin a turn, and wait for the whole answer; see `runtime.Conversation.generate`, and `call_tools` here."""
        return self._bridge.run(self._generate(text, settings, overrides))

    def call_tools(self) -> CalledT:
        """Call the functions that the last answer calls, one after the other; the next prompt has their results.

        In asyncio, an async function is awaited in the loop, and any other called in a thread of its default executor;
        without an event loop, functions are called in this thread. See `runtime.Conversation.call_tools`.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises: ConversationBusyError: an answer is under way, or the functions are being called.

        Cancellation: cancels an async function; one in a thread goes on by itself. Without an event loop, a Ctrl-C
            interrupts the running function. The conversation is as it was.
        """
        return self._bridge.run(self._call_tools())

    def save(self, path: SessionFile) -> SizeT:
        """See `runtime.Conversation.save`. ConversationBusyError also while functions are being called."""
        self._bridge.check_loop()
        self._check_idle("save the conversation")
        return self._bridge.run(self._bridge.call(partial(self._save, path)))

    def reset(self) -> None:
        """Forget everything but the system message. Raises: as `save`."""
        self._bridge.check_loop()
        self._check_idle("forget what was said")
        self._conversation, self._last = None, None

    async def _generate(self, text: str, settings: SettingsLike | None, overrides: SettingsArguments) -> Completion:
        completion = await read_whole(self.stream(text, settings, **overrides))
        for _ in range(MAX_TOOL_ROUNDS):
            if not await self._call_tools():
                break
            completion = await read_whole(self.stream(None, settings, **overrides))
        return completion

    async def _call_tools(self) -> bool:
        self._bridge.check_loop()
        self._check_idle("call its tools")
        results = await self._caller.results(self.pending_calls, self._bridge.call_function)
        if results:
            assert self._conversation is not None, "there were calls"
            self._conversation.add_results(results)
        return bool(results)

    @property
    def _is_answering(self) -> bool:
        stream = None if self._last is None else self._last()
        return stream is not None and not stream.is_closed

    def _close_answer(self) -> None:
        if self._last is not None and (stream := self._last()) is not None:
            stream._close()

    def _check_idle(self, what: str) -> None:
        self._caller.check_idle(what, self._is_answering, self._bridge.how_to_close)

    # --- in the trio thread, where turns begin in the order of the calls ---------------------------

    def _open_turn(self, text: str | None, overrides: dict[str, Any]) -> TrioTokenStream:
        return self._made_conversation().stream(text, **overrides)

    async def _save(self, path: SessionFile) -> int:
        return await self._made_conversation().save(path)

    def _made_conversation(self) -> TrioConversation:
        if self._conversation is None:
            self._conversation = self._make_conversation()
        return self._conversation


ManyT = TypeVar("ManyT")
ManyOrErrorsT = TypeVar("ManyOrErrorsT")
ConversationT = TypeVar("ConversationT", bound=ConversationHandle[Any, Any, Any, Any])
ScoreT = TypeVar("ScoreT")
LoadedT = TypeVar("LoadedT")
DoneT = TypeVar("DoneT")


class RuntimeHandle(ABC, Generic[StreamT, ManyT, ManyOrErrorsT, ConversationT, CompletionT, ScoreT, LoadedT, DoneT]):
    """A handle on a runtime from outside the trio thread; a subclass says how its callers wait.

    Its methods take, return and raise what those of `runtime.Runtime` do. Unless they say otherwise, a cancellation
    (without an event loop, a Ctrl-C) also does what it does there.
    """

    _stream_handle: type[StreamT]
    _conversation_handle: type[ConversationT]

    def __init__(self, bridge: RuntimeBridge) -> None:
        self._bridge = bridge

    def __repr__(self) -> str:
        return repr(self._bridge.runtime)

    # --- generations ------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> StreamT:
        """Begin a generation, which a cancellation ends; see `runtime.Runtime.stream`."""
        arguments = self._checked(settings, overrides)
        return self._stream_handle(self._bridge, partial(self._bridge.runtime.stream, copy_prompt(prompt), **arguments))

    def score(self, prompt: Prompt, continuation: str | Sequence[int], **options: Unpack[ScoreArguments]) -> ScoreT:
        """The log-probability of each token of a continuation; see `runtime.Runtime.score`."""
        score = partial(self._bridge.runtime.score, copy_prompt(prompt), continuation, **options)
        return self._bridge.run(self._bridge.call(score))

    def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> CompletionT:
        """Generate a whole text; see `runtime.Runtime.generate`."""
        return self._bridge.run(self._generate(prompt, settings, overrides))

    @overload
    def generate_many(
        self,
        prompts: Prompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: Literal["raise"] = "raise",
        **overrides: Unpack[StreamArguments],
    ) -> ManyT: ...

    @overload
    def generate_many(
        self,
        prompts: Prompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: OnError,
        **overrides: Unpack[StreamArguments],
    ) -> ManyOrErrorsT: ...

    def generate_many(
        self,
        prompts: Prompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: OnError = "raise",
        **overrides: Unpack[StreamArguments],
    ) -> Any:
        """Generate a whole text for each of many prompts; see `runtime.Runtime.generate_many`.

        Args: as there. An async iterable is asyncio's, and is iterated over in its loop.

        Returns: without an event loop the completions, in the order of the prompts, once all are finished; in asyncio
            `Completions`, as there.

        Raises: as there; in asyncio, the errors of a prompt and its own settings when the completions are awaited.
            PromptError: without an event loop, the prompts are an async iterable.
        """
        arguments = self._checked(settings, overrides)
        check_arguments(max_concurrent, on_error)
        copies = self._bridge.iterated(prompts) if is_async(prompts) else copied_prompts(prompts)
        generate_many = self._bridge.runtime.generate_many
        return self._completions(
            partial(generate_many, copies, max_concurrent=max_concurrent, on_error=on_error, **arguments)
        )

    # --- conversations and saved sessions ---------------------------------------------------------

    def conversation(
        self,
        system: str | None = None,
        settings: SettingsLike | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> ConversationT:
        """Begin a conversation; see `runtime.Runtime.conversation`.

        Raises: as there. In asyncio, the first turn raises what the chat template does not accept. And:
            SettingsError: a function is async, and without an event loop nothing would await it.
        """
        keywords = turn_settings(settings, overrides)
        self._bridge.check_settings(keywords)
        functions = Functions(tools, may_be_async=self._bridge.may_await)
        make = partial(self._bridge.runtime.conversation, system, thinking=thinking, tools=functions.listed, **keywords)
        return self._new_conversation(functions, system, make)

    def load(
        self,
        path: SessionFile,
        *,
        any_draft: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> LoadedT:
        """Load a conversation from a file, and continue it; see `runtime.Runtime.load`."""

        async def loaded() -> ConversationT:
            functions = Functions(tools, may_be_async=self._bridge.may_await)
            load = partial(self._bridge.runtime.load, path, any_draft=any_draft, tools=functions.listed, **overrides)
            conversation = await self._bridge.call(load)
            first = conversation.messages[:1]
            system = first[0]["content"] if first and first[0]["role"] == "system" else None
            return self._conversation_handle(self._bridge, functions, system, conversation.make_new, conversation)

        return self._bridge.run(loaded())

    # --- the drafter ------------------------------------------------------------------------------

    def attach_draft(self, draft: Source = MISSING, **unknown: Never) -> DoneT:
        """Load a draft model into the open runtime; see `runtime.Runtime.attach_draft`."""
        evaluate_on_this_thread(draft)
        return self._bridge.run(self._bridge.call(partial(self._bridge.runtime.attach_draft, draft, **unknown)))

    def detach_draft(self) -> DoneT:
        """Release the draft model, its memory and its thread; see `runtime.Runtime.detach_draft`. A cancellation is
        raised once it is detached.
        """
        return self._bridge.run(self._bridge.call(self._bridge.runtime.detach_draft))

    # --- what the runtime tells of itself ---------------------------------------------------------

    def statistics(self) -> Statistics:
        """As `runtime.Runtime.statistics`. For a round that ends at this moment, only some figures may be counted yet;
        no count ever falls.
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
        """Maximum number of concurrent streams; None for no bound."""
        return self._bridge.runtime.max_streams

    @property
    def num_streams(self) -> int:
        """Streams that are under way; one that begins or ends at this moment may or may not be counted."""
        return self._bridge.runtime.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait because `max_streams` others are at work; as inexact as `num_streams`."""
        return self._bridge.runtime.num_waiting

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _completions(self, begin: Callable[[], Completions[Any]]) -> Any: ...

    @abstractmethod
    def _new_conversation(
        self, functions: Functions, system: str | None, make: Callable[[], TrioConversation]
    ) -> ConversationT: ...

    def _checked(self, settings: SettingsLike | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a stream. This checks the tools and the settings."""
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        return {**keywords, **tools}

    async def _generate(self, prompt: Prompt, settings: SettingsLike | None, overrides: StreamArguments) -> Completion:
        return await read_whole(self.stream(prompt, settings, **overrides))


async def read_whole(stream: StreamHandle) -> Completion:
    """Read a stream to its end. A cancellation ends the generation."""
    try:
        tokens: list[Token] = []
        while (token := await stream._next()) is not None:
            tokens.append(token)
        return completion_of(cast(Any, stream), tokens)
    finally:
        stream._close()


def copied_prompts(prompts: Prompts) -> Prompts:
    """Copies of many prompts, iterated over now; see `copy_prompt`. What is no list of prompts stays as it is."""

    def copied(prompt: ManyPrompt) -> ManyPrompt:
        alone, settings = with_settings(prompt)
        return (copy_prompt(alone), dict(settings)) if settings else copy_prompt(alone)

    return [copied(prompt) for prompt in cast(Iterable[ManyPrompt], prompts)] if is_list(prompts) else prompts


def copy_prompt(prompt: Prompt) -> Prompt:
    """A copy of a prompt that the caller cannot change any more, and that any thread can read."""
    if hasattr(prompt, "tolist"):
        listed: Prompt = prompt.tolist()
        return listed
    if isinstance(prompt, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    return prompt
