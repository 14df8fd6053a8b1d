"""Handles on a runtime in trio's thread, on its streams and its conversations, for callers elsewhere."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial, wraps
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, Unpack, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.argument_aliases import MISSING
from protocol.errors import RuntimeClosedError, StreamBusyError
from protocol.session_state import FinishReason
from protocol.settings import SettingsLike, with_overrides
from protocol.settings_keywords import SettingsArguments
from protocol.statistics import Counts, Statistics
from runtime.bridge.portal import Call, Portal, TrioThread
from runtime.engine import opening
from runtime.engine.runtime import Health, Memory
from runtime.engine.runtime import Runtime as TrioRuntime
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import TurnMessage, calls_without_results, turn_settings
from runtime.generation.many_prompts import (
    C,
    ManyPrompt,
    ManyPrompts,
    OnError,
    check_arguments,
    is_async,
    is_list,
    with_settings,
)
from runtime.generation.many_prompts import Completions as TrioCompletions
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile, SingleConsumer, completion_of, warn_unread
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import ToolCall
from runtime.generation.tool_calls.tools import MAX_TOOL_ROUNDS, Functions, StreamArguments, split_tools
from runtime.loading.model_sources import ModelSource

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=SingleConsumer)


# --- streams --------------------------------------------------------------------------------------


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


# --- conversations --------------------------------------------------------------------------------


class Conversation:
    """`runtime.Conversation` for asyncio: chat templates are rendered, and prompts tokenised, in trio's thread."""

    def __init__(
        self,
        portal: Portal,
        functions: Functions,
        system: str | None,
        make: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """`make` makes the conversation in trio's thread, now and after `reset`; `conversation` is one that was loaded.

        The functions are called in the caller's thread or loop.
        """
        self._portal = portal
        self._functions = functions
        self._system: list[TurnMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._make = make
        self._made = Call[TrioConversation](portal.thread, make if conversation is None else lambda: conversation)
        self._last: weakref.ref[TokenStream] | None = None  # weak, since dropping the stream is a way to end it

    def __repr__(self) -> str:
        return f"<outrider {self._portal.thread.face}.Conversation: {len(self.messages)} messages>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the answer that is under way, if any."""
        self._close_answer()

    @property
    def messages(self) -> list[TurnMessage]:
        """A copy of the messages so far, oldest first, the system message included. A turn is part of them once a token
        of its answer was given.
        """
        conversation = self._made.value
        known = self._system if conversation is None else conversation.messages
        return [dict(message) for message in known]

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer whose results the model was not told yet; empty during an answer."""
        return () if self._is_answering else calls_without_results(self.messages)

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a turn, and stream the answer; see `runtime.Conversation.stream`. ConversationBusyError also while
        functions are being called.
        """
        keywords = turn_settings(settings, overrides)
        self._portal.check_open()
        self._portal.runtime.check_settings(keywords)
        self._check_idle("say something")
        made = self._made

        def begin() -> TrioTokenStream:
            return made.result_now().stream(text, **keywords)

        stream = TokenStream(self._portal, begin)
        self._last = weakref.ref(stream)
        return stream

    async def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Begin a turn, and wait for the whole answer; see `runtime.Conversation.generate`, and `call_tools` here."""
        completion = await self.stream(text, settings, **overrides).read_whole()
        for _ in range(MAX_TOOL_ROUNDS):
            if not await self.call_tools():
                break
            completion = await self.stream(None, settings, **overrides).read_whole()
        return completion

    async def call_tools(self) -> bool:
        """Call the functions that the last answer calls, one after the other; the next prompt has their results.

        In asyncio, an async function is awaited in the loop, and any other called in a thread of its default executor;
        without an event loop, functions are called in this thread. See `runtime.Conversation.call_tools`.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises: ConversationBusyError: an answer is under way, or the functions are being called.

        Cancellation: cancels an async function; one in a thread goes on by itself. Without an event loop, a Ctrl-C
            interrupts the running function. The conversation is as it was.
        """
        self._portal.thread.check_caller()
        self._check_idle("call its tools")
        results = await self._functions.results(self.pending_calls, self._portal.thread.call_function)
        if results:
            self._made.result_now().add_results(results)
        return bool(results)

    async def save(self, path: SessionFile) -> int:
        """See `runtime.Conversation.save`. ConversationBusyError also while functions are being called."""
        self._portal.thread.check_caller()
        self._check_idle("save the conversation")
        made = self._made
        return await self._portal.call(lambda: made.result_now().save(path))

    def reset(self) -> None:
        """Forget everything but the system message. Raises: as `save`."""
        self._portal.thread.check_caller()
        self._check_idle("forget what was said")
        self._made, self._last = Call(self._portal.thread, self._make), None

    async def made(self) -> None:
        """Wait until the conversation was made. Raises: what its chat template does not accept."""
        await self._made.result()

    def _close_answer(self) -> None:
        if self._last is not None and (stream := self._last()) is not None:
            stream._close()

    @property
    def _is_answering(self) -> bool:
        stream = None if self._last is None else self._last()
        return stream is not None and not stream.is_closed

    def _check_idle(self, what: str) -> None:
        self._functions.check_idle(what, self._is_answering, self._portal.thread.how_to_close)


# --- the runtime ----------------------------------------------------------------------------------


OpenRuntime = Callable[[], AbstractAsyncContextManager[TrioRuntime]]


async def opened(
    make_thread: Callable[[OpenRuntime], TrioThread],
    target: ModelSource,
    draft: ModelSource | None,
    options: dict[str, Any],
) -> Portal:
    """Open a runtime in a trio thread. Args, Raises: as `runtime.open`."""
    evaluate_on_this_thread(target)
    evaluate_on_this_thread(draft)
    thread = make_thread(partial(opening.open, target, draft, **options))
    return Portal(thread, await thread.start())


def evaluate_on_this_thread(source: ModelSource | None) -> None:
    """Evaluate a model that is given as `(model, tokenizer)`: only the thread that made a lazy array can."""
    # `open` raises ModelError for anything that is no model.
    if isinstance(source, tuple) and source and isinstance(source[0], Module):
        mx.eval(source[0])


def in_trio(
    method: Callable[Concatenate[TrioRuntime, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Runtime, P], Coroutine[Any, Any, T]]:
    """A method that calls a method of `runtime.Runtime` in trio's thread: the same arguments, result and errors."""

    @wraps(method)
    async def call(self: Runtime, /, *args: P.args, **kwargs: P.kwargs) -> T:
        copies = {name: copied(value) for name, value in kwargs.items()}
        return await self._portal.call(partial(method, self._portal.runtime, *map(copied, args), **copies))

    return call


def of_many(
    method: Callable[Concatenate[TrioRuntime, P], TrioCompletions[C]],
) -> Callable[Concatenate[Runtime, P], Completions[C]]:
    """`Runtime.generate_many`, from that of `runtime.Runtime`."""

    @wraps(method)
    def generate_many(
        self: Runtime,
        prompts: ManyPrompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: OnError = "raise",
        **overrides: Any,
    ) -> Completions[C]:
        arguments = self._checked(settings, overrides)
        check_arguments(max_concurrent, on_error)
        copies = self._portal.thread.iterated(prompts) if is_async(prompts) else copied_prompts(prompts)
        begin: Any = partial(method, self._portal.runtime)
        return Completions(
            self._portal, partial(begin, copies, max_concurrent=max_concurrent, on_error=on_error, **arguments)
        )

    return generate_many  # type: ignore[return-value]  # its arguments are those of the method


class RuntimeState:
    """What a handle on a runtime tells of it, at any time and in any thread."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._portal.runtime)

    def statistics(self) -> Statistics:
        """As `runtime.Runtime.statistics`. For a round that ends at this moment, only some figures may be counted yet;
        no count ever falls.
        """
        return self._portal.runtime.statistics()

    def health(self) -> Health:
        """As `runtime.Runtime.health`."""
        return self._portal.runtime.health()

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it."""
        return self._portal.runtime.tokenizer

    @property
    def max_streams(self) -> int | None:
        """Maximum number of concurrent streams; None for no bound."""
        return self._portal.runtime.max_streams

    @property
    def num_streams(self) -> int:
        """Streams that are under way; one that begins or ends at this moment may or may not be counted."""
        return self._portal.runtime.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait for a place or for memory; as inexact as `num_streams`."""
        return self._portal.runtime.num_waiting

    @property
    def context_in_memory(self) -> int | None:
        """See `runtime.Runtime.context_in_memory`."""
        return self._portal.runtime.context_in_memory

    @property
    def memory(self) -> Memory:
        """See `runtime.Runtime.memory`."""
        return self._portal.runtime.memory


class Runtime(RuntimeState):
    """A target and a draft model at work, for one asyncio loop; made by `runtime.aio.open`.

    Its methods take, return and raise what those of `runtime.Runtime` do, and a cancellation does what it does there.
    Prompts are checked off the loop, since tokenising a long prompt takes time: `async with`, `TokenStream.opened` or
    the first `__anext__` raises the `PromptError` of a stream.

    Raises: WrongEventLoopError: a method is called in a loop other than the one in which the runtime was opened.
    """

    async def aclose(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing again does nothing; a second call waits for the first.

        Cancellation: raised once the runtime is closed.
        """
        self._portal.thread.check_caller()
        await self._portal.thread.stop_and_join()

    # --- generations ------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> TokenStream:
        """Begin a generation, which a cancellation ends; see `runtime.Runtime.stream`."""
        arguments = self._checked(settings, overrides)
        return TokenStream(self._portal, partial(self._portal.runtime.stream, copied(prompt), **arguments))

    async def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> Completion:
        """Generate a whole text; see `runtime.Runtime.generate`."""
        return await self.stream(prompt, settings, **overrides).read_whole()

    generate_many = of_many(TrioRuntime.generate_many)
    score = in_trio(TrioRuntime.score)
    warm = in_trio(TrioRuntime.warm)

    # --- conversations and saved sessions ---------------------------------------------------------

    def conversation(
        self,
        system: str | None = None,
        settings: SettingsLike | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Begin a conversation; see `runtime.Runtime.conversation`.

        Raises: as there. In asyncio, the first turn raises what the chat template does not accept. And:
            SettingsError: a function is async, and without an event loop nothing would await it.
        """
        keywords = turn_settings(settings, overrides)
        self._portal.check_open()
        self._portal.runtime.check_settings(keywords)
        functions = Functions(tools, may_be_async=self._portal.thread.may_await)
        begin = self._portal.runtime.conversation
        make = partial(begin, system, thinking=thinking, tools=functions.listed, **keywords)
        return Conversation(self._portal, functions, system, make)

    async def load(
        self,
        path: SessionFile,
        *,
        any_draft: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Load a conversation from a file, and continue it; see `runtime.Runtime.load`."""
        functions = Functions(tools, may_be_async=self._portal.thread.may_await)
        load = self._portal.runtime.load
        loaded = await self._portal.call(partial(load, path, any_draft=any_draft, tools=functions.listed, **overrides))
        first = loaded.messages[:1]
        system = first[0]["content"] if first and first[0]["role"] == "system" else None
        conversation = Conversation(self._portal, functions, system, loaded.make_new, loaded)
        await conversation.made()
        return conversation

    # --- the drafter ------------------------------------------------------------------------------

    async def attach_draft(self, /, draft: ModelSource = MISSING, **unknown: Never) -> None:
        """Load a draft model into the open runtime; see `runtime.Runtime.attach_draft`."""
        evaluate_on_this_thread(draft)
        await self._portal.call(partial(self._portal.runtime.attach_draft, draft, **unknown))

    detach_draft = in_trio(TrioRuntime.detach_draft)

    def _checked(self, settings: SettingsLike | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a stream. This checks the tools and the settings."""
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._portal.check_open()
        self._portal.runtime.check_settings(keywords)
        return {**keywords, **tools}


def copied_prompts(prompts: ManyPrompts) -> ManyPrompts:
    """Copies of many prompts, iterated over now. What is no list of prompts stays as it is."""
    if not is_list(prompts):
        return prompts
    pairs = map(with_settings, cast(Iterable[ManyPrompt], prompts))
    return [(copied(alone), dict(settings)) if settings else copied(alone) for alone, settings in pairs]


def copied(argument: Any) -> Any:
    """A copy of an argument, such as a prompt, that the caller cannot change any more, and that any thread can read."""
    if hasattr(argument, "tolist"):
        return argument.tolist()
    if isinstance(argument, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in argument]
    return argument
