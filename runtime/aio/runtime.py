"""A runtime for asyncio, whose models work in the threads of a trio loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Generic, Self, TypeVar

import attrs

from protocol.errors import RuntimeClosedError, StreamBusyError, WrongEventLoopError
from protocol.scores import Score
from runtime.aio import asyncio_loop
from runtime.aio.thread import AioThread, items_of_loop
from runtime.bridge.handles import ConversationHandle, IteratorHandle, RuntimeHandle, StreamHandle
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.bridge.trio_thread import BridgeCall
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.many_prompts import CLOSED, AwaitableCompletions, C
from runtime.generation.many_prompts import Completions as TrioCompletions
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion
from runtime.generation.tool_calls.functions import Functions

T = TypeVar("T")
Item = TypeVar("Item")
Waiting = Coroutine[Any, Any, T]


class AioBridge(RuntimeBridge):
    """`RuntimeBridge` for one asyncio loop."""

    face = "aio"
    how_to_close = "aclose()"
    may_await = True
    thread: AioThread

    def check_loop(self) -> None:
        if asyncio_loop() is not self.thread.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )

    async def call_result(self, call: BridgeCall[T]) -> T:
        cancelled: asyncio.CancelledError | None = None
        while not call.done.done():
            try:
                await self.thread.wait(call.done)
            except asyncio.CancelledError as error:
                # Once for each cancellation: anyio cancels a task again in every pass of the loop.
                cancelled = error
                call.cancel()
            except GeneratorExit:
                call.cancel()
                raise
        if cancelled is not None:
            raise cancelled
        return call.result()

    async def pause(self) -> None:
        await asyncio.sleep(0)

    async def call_function(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return coroutine

    def iterated(self, items: Any) -> AsyncIterator[Any]:
        return items_of_loop(self.thread.loop, aiter(items), contextvars.copy_context())


class AsyncIteration(IteratorHandle[Any, Any, Item]):
    """An `IteratorHandle` as an async iterator and async context manager, for one asyncio task at a time."""

    _bridge: AioBridge
    _is_waiting = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        """The next item.

        Raises: as `__anext__` of the class of the same name in `runtime`, and:
            PromptError, SettingsError: a prompt or its settings are invalid; raised by the first call.
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: ends the generation, or all of them.
        """
        if (item := await self._next()) is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End the generation, or all of them. Returns at once; closing again does nothing."""
        self._bridge.check_loop()
        self._close()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def _next(self) -> Item | None:
        self._bridge.check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for the next item; a stream has one consumer")
        self._is_waiting, self._is_unread = True, False
        try:
            return await super()._next()
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False


class TokenStream(AsyncIteration[Token], StreamHandle):
    """The tokens of one generation: `runtime.TokenStream` for asyncio. See there for what ends the generation.

    Cancelling the task that waits in `__anext__` has the effect of a cancel scope there.
    """

    async def opened(self) -> None:
        """Wait until the prompt was checked; `async with` does so too.

        Raises: as `runtime.Runtime.stream`.

        Cancellation: ends the generation.
        """
        self._bridge.check_loop()
        try:
            await self._wait_opened()
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise

    async def __aenter__(self) -> Self:
        await self.opened()
        return self


@attrs.define(eq=False)
class CompletionsSource(Generic[C]):
    """The completions of many prompts, as a source for a bridge stream."""

    completions: TrioCompletions[C]
    is_over: bool = False  # all were given
    error: Exception | None = None  # that ended them early, if one did

    async def receive(self) -> Sequence[tuple[int, C]]:
        # An exception is for the consumer; raised from here, it would end the trio loop.
        try:
            item = await anext(self.completions, None)
        except Exception as error:
            self.error = error
            return ()
        self.is_over = item is None
        return () if item is None else (item, *self.completions.ready())

    def drain(self) -> Sequence[tuple[int, C]]:
        return ()

    def close(self) -> None:
        self.completions.close()


class Completions(AsyncIteration[tuple[int, C]], AwaitableCompletions[C]):
    """The completions of many prompts: `runtime.Completions` for asyncio."""

    _num_finished = 0
    _is_over = False  # all were given

    def __init__(self, bridge: AioBridge, begin: Callable[[], TrioCompletions[C]]) -> None:
        super().__init__(bridge, lambda: CompletionsSource(begin()))

    def __repr__(self) -> str:
        state = "over" if self._is_over else "closed" if self._is_closed else "under way"
        source = self._bridge_stream.source
        num_prompts = None if source is None else source.completions.num_prompts
        of = "" if num_prompts is None else f" of {num_prompts}"
        return f"<outrider aio.Completions, {state}: {self._num_finished}{of} given>"

    async def __anext__(self) -> tuple[int, C]:
        """The next finished completion, with the index of its prompt. Raises: as when awaited."""
        self._check_not_gathering()
        return await super().__anext__()

    @property
    def _has_ended_early(self) -> bool:
        return self._is_closed and not self._is_over

    def _must_request(self, source: CompletionsSource[C]) -> bool:
        return not self._is_closed and not self._arrived

    def _take_next(self, source: CompletionsSource[C]) -> tuple[int, C] | None:
        if not self._is_closed and self._arrived:
            self._num_finished += 1
            arrived: tuple[int, C] = self._arrived.popleft()
            return arrived
        if not self._is_closed:
            self._is_over = source.is_over
            self._close()
        if self._is_over:
            return None
        raise source.error or RuntimeClosedError(CLOSED)

    async def _checkpoint(self) -> None:
        await asyncio.sleep(0)


class Conversation(ConversationHandle[TokenStream, Waiting[Completion], Waiting[int], Waiting[bool]]):
    """`runtime.Conversation` for asyncio: chat templates are rendered, and prompts tokenised, in the trio thread."""

    _stream_handle = TokenStream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close_answer()


class Runtime(
    RuntimeHandle[
        TokenStream,
        Completions[Completion],
        Completions[Completion | Exception],
        Conversation,
        Waiting[Completion],
        Waiting[Score],
        Waiting[Conversation],
        Waiting[None],
    ]
):
    """A target and a draft model at work, for one asyncio loop; made by `runtime.aio.open`.

    Its methods are those of `runtime.Runtime`; `Waiting[T]` is a coroutine that returns a T. Prompts are checked off
    the loop, since tokenising a long prompt takes time: `async with`, `TokenStream.opened` or the first `__anext__`
    raises the `PromptError` of a stream.

    Raises: WrongEventLoopError: a method is called in a loop other than the one in which the runtime was opened.
    """

    _bridge: AioBridge
    _stream_handle = TokenStream
    _conversation_handle = Conversation

    async def aclose(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing again does nothing; a second call waits for the first.

        Cancellation: raised once the runtime is closed.
        """
        self._bridge.check_loop()
        await self._bridge.thread.stop_and_join()

    def _completions(self, begin: Callable[[], TrioCompletions[C]]) -> Completions[C]:
        return Completions(self._bridge, begin)

    def _new_conversation(
        self, functions: Functions, system: str | None, make: Callable[[], TrioConversation]
    ) -> Conversation:
        return Conversation(self._bridge, functions, system, make)
