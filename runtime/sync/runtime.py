"""A runtime for plain threads, whose models work in the threads of a trio loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar, cast

import trio

from protocol.errors import StreamBusyError, WrongEventLoopError
from protocol.scores import Score
from protocol.session_state import Commit
from runtime.bridge.call import BridgeCall
from runtime.bridge.handles import CommitSource, ConversationHandle, RuntimeHandle, StreamHandle
from runtime.bridge.iterator_handle import IteratorHandle
from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.bridge.stream import S
from runtime.bridge.trio_thread import BridgeFuture
from runtime.engine.runtime import Runtime as TrioRuntime
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.merged_streams import Merged
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion
from runtime.generation.tool_calls.functions import Functions
from runtime.sync.thread import SyncThread, call_result, wait_result

T = TypeVar("T")
Item = TypeVar("Item")


class SyncBridge(RuntimeBridge[SyncThread[TrioRuntime]]):
    """`RuntimeBridge` for plain threads.

    The trio thread stops once the bridge is dropped: the runtime's handle, its streams and its conversations refer to
    the bridge, and nothing in the trio thread does.
    """

    face = "sync"
    how_to_close = "close()"
    may_await = False

    def __del__(self) -> None:
        self.thread.stop()

    def check_caller(self) -> None:
        check_not_in_trio("this")

    async def call_result(self, call: BridgeCall[T]) -> T:
        return call_result(call)

    async def result(self, future: BridgeFuture[T]) -> T:
        return wait_result(future)

    async def pause(self) -> None:
        """Nothing: there are no other tasks."""

    async def call_function(self, function: Callable[[], Any]) -> Any:
        return function()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # It never waits: the methods above block.
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a coroutine has waited in a plain thread")


def check_not_in_trio(what: str) -> None:
    """Raises: WrongEventLoopError: trio is running in this thread, and `what` would block it."""
    # Including the trio loop of the runtime: a trace function that waited for it there would wait forever.
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoopError(
            f"{what} would block this trio program; use `async with runtime.open(…) as rt` and `await rt.generate(…)`"
        )


class BlockingIteration(IteratorHandle[S, T, Item]):
    """An `IteratorHandle` as an iterator and context manager, for one thread at a time."""

    _bridge: SyncBridge

    def __init__(self, bridge: SyncBridge, make_source: Callable[[], Any]) -> None:
        """As `IteratorHandle`; blocks until the source was made.

        Raises: what making the source raised.

        Interrupting: a Ctrl-C closes the stream.
        """
        super().__init__(bridge, make_source)
        self._in_use = threading.Lock()
        try:
            bridge.run(self._wait_opened())
        except BaseException:  # a Ctrl-C, too
            self._close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next item.

        Raises: as `__anext__` of the class of the same name in `runtime`, and:
            StreamBusyError: another thread is waiting for an item.

        Interrupting: a Ctrl-C ends the generation, or all of them.
        """
        is_ours = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                self._is_unread = False
                item = self._bridge.run(self._next())
                if item is None:
                    raise StopIteration
                return cast(Item, item)
        except BaseException:
            # Any exception, StopIteration and a Ctrl-C included, ends the iteration.
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError("another thread is waiting for the next item; a stream has one consumer")

    def close(self) -> None:
        """End the generation, or all of them. Returns at once; closing twice is closing once. For any thread."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class TokenStream(BlockingIteration[CommitSource, Commit, Token], StreamHandle[int]):
    """The tokens of one generation, for one thread at a time: an iterator, and a context manager.

    `runtime.TokenStream` for plain threads, which says what ends the generation; `close` may be called by another
    thread while one waits for a token, and a Ctrl-C is what a cancellation is there.
    """


class TokenStreams(BlockingIteration[MergedSource[Token], tuple[int, Token], tuple[int, Token]], MergedHandle[Token]):
    """The tokens of many prompts as they come: an iterator over (index of the prompt, token), and a context manager.

    `runtime.TokenStreams` for plain threads; `TokenStream` here says what ends the generations.
    """


class Conversation(ConversationHandle[TokenStream, Completion, int, bool]):
    """`runtime.Conversation` for plain threads; one thread at a time uses it."""

    _stream_handle = TokenStream


class Runtime(
    RuntimeHandle[
        SyncBridge,
        TokenStream,
        TokenStreams,
        list[Completion],
        Conversation,
        Completion,
        Score,
        Conversation,
        TokenStream,
        None,
    ]
):
    """A target and a draft model at work, for plain threads: a context manager, made by `open_sync`.

    Its methods are those of `runtime.Runtime`, and block. A Ctrl-C while they do is what a cancellation is there.

    Raises: WrongEventLoopError: a method is called where trio is running in this thread, and would be blocked.
    """

    _stream_handle = TokenStream
    _conversation_handle = Conversation

    def close(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing twice is closing once; a second call waits for the first.

        Interrupting: a Ctrl-C is raised once the runtime is closed.
        """
        check_not_in_trio("close()")
        self._bridge.thread.stop_and_join()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self._bridge.thread.stop_and_join()

    def _completions(self, begin: Callable[[], Merged[Completion]]) -> list[Completion]:
        async def complete_all() -> list[Completion]:
            return cast(list[Completion], await cast(Any, begin()))

        return cast(list[Completion], self._bridge.run(self._bridge.call(complete_all)))

    def _tokens(self, begin: Callable[[], Merged[Token]]) -> TokenStreams:
        return TokenStreams(self._bridge, begin)

    def _new_conversation(self, functions: Functions, make: Callable[[], TrioConversation]) -> Conversation:
        async def made() -> TrioConversation:
            return make()

        conversation: TrioConversation = self._bridge.run(self._bridge.call(made))
        return Conversation(self._bridge, functions, conversation.make_new, conversation)
