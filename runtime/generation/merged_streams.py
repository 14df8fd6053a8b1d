"""Many generations merged into one async iterator of (index of the prompt, item)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

import attrs
import trio

from protocol.errors import RuntimeBrokenError, RuntimeClosedError
from protocol.messages import Open
from runtime.generation.token_stream import SingleConsumer, TokenStream
from runtime.generation.tool_calls.tools import Tools

CLOSED = "these generations were closed; begin others with generate_many() or stream_many()"

T = TypeVar("T")

Generation = tuple[Open, Tools | None]
"""The beginning of a generation: the message that opens its session, and the tools that the model may call."""

Give = Callable[[T], Awaitable[None]]
"""Gives an item to the consumer; waits while the buffer is full."""


class Merged(SingleConsumer, Generic[T]):
    """An async iterator over (index of the prompt, item), and an async context manager.

    The generations start as soon as this object exists, `max_concurrent` at a time; up to `max_concurrent` items may
    wait for the consumer. A subclass says in `_produce` what the items of a generation are.
    """

    _busy = "another task is waiting for the next item; each item is given once, to one task"

    def __init__(
        self,
        generations: Sequence[Generation],
        begin: Callable[[Open, Tools | None], TokenStream],
        max_concurrent: int,
        *,
        start_soon: Callable[..., None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Runtime.generate_many` and `Runtime.stream_many`.

        Args:
            start_soon: starts a task that outlives the caller's.
            run_soon: calls a function soon, in trio's thread; may be used in any thread, at any time.
        """
        send, self._items = trio.open_memory_channel[tuple[int, T]](max_concurrent)
        # The tasks must not refer to this object: its last reference could then never be dropped.
        self._work = _Work(enumerate(generations), begin, self._produce, min(max_concurrent, len(generations)), send)
        self._run_soon = run_soon
        self.num_prompts = len(generations)
        self._num_finished = 0  # prompts whose last item was given
        start_soon(self._work.run)

    def __repr__(self) -> str:
        state = "under way" if not self._is_closed else "closed" if self._has_ended_early else "over"
        return f"<outrider {type(self).__name__}, {state}: {self._num_finished} of {self.num_prompts} given>"

    async def __anext__(self) -> tuple[int, T]:
        """The next item, with the index of its prompt.

        Raises:
            StopAsyncIteration: all have been given.
            StreamBusyError: another task is waiting for one.
            RuntimeClosedError: the runtime or this was closed before all were given.
            RuntimeBrokenError, RewindError: the error of a stream.

        Cancellation: ends all generations.
        """
        if (following := await self._next()) is None:
            raise StopAsyncIteration
        return following

    def __del__(self) -> None:
        if not self._is_closed:
            self._run_soon(self._work.scope.cancel)

    @staticmethod
    @abstractmethod
    async def _produce(stream: TokenStream, give: Give[T]) -> None:
        """Read one generation and give its items; for the last one, `is_last` is true."""

    def is_last(self, item: T) -> bool:
        """Whether an item is the last one of its prompt."""
        return True

    @property
    def _has_ended_early(self) -> bool:
        """Whether this was closed or has failed, so that the next call raises the reason."""
        return self._is_closed and self._num_finished < self.num_prompts

    async def _next(self) -> tuple[int, T] | None:
        """The next item; None once all have been given. Raises and cancellation: as `__anext__`."""
        return await self._receive(self._next_item)

    async def _next_item(self) -> tuple[int, T] | None:
        if self._num_finished == self.num_prompts:
            await trio.lowlevel.checkpoint()
            return None
        if self._is_closed:
            raise self._work.error or RuntimeClosedError(CLOSED)
        try:
            following = await self._items.receive()
        except trio.ClosedResourceError:
            raise RuntimeClosedError(CLOSED) from None  # by another task, while this one was waiting
        except trio.EndOfChannel:
            self.close()
            error = self._work.error or RuntimeClosedError(
                f"the runtime was closed before {self.num_prompts - self._num_finished} of {self.num_prompts} prompts "
                "were done"
            )
        else:
            self._count(following)
            return following
        # Outside of the handler, so that the channel's end is not shown as the context of the error.
        raise error

    def ready_items(self) -> list[tuple[int, T]]:
        """All items that have come, without waiting for further ones."""
        ready: list[tuple[int, T]] = []
        while self._num_finished < self.num_prompts:
            try:
                ready.append(self._items.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            self._count(ready[-1])
        return ready

    def _count(self, given: tuple[int, T]) -> None:
        self._num_finished += self.is_last(given[1])
        if self._num_finished == self.num_prompts:
            self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._items.close()
            self._work.scope.cancel()


@attrs.define(eq=False)
class _Work(Generic[T]):
    """The generations, in tasks of the runtime; `error` is that of the first one that failed."""

    _generations: Iterator[tuple[int, Generation]]
    _begin: Callable[[Open, Tools | None], TokenStream]
    _produce: Callable[[TokenStream, Give[T]], Awaitable[None]]
    _num_tasks: int
    _items: trio.MemorySendChannel[tuple[int, T]]
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    error: Exception | None = attrs.field(init=False, default=None)

    # A Ctrl-C must interrupt the user's task and not this one.
    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        with self._items, self.scope:
            async with trio.open_nursery() as nursery:
                for _ in range(self._num_tasks):
                    nursery.start_soon(self._run_in_turn)

    @trio.lowlevel.enable_ki_protection
    async def _run_in_turn(self) -> None:
        for index, generation in self._generations:

            async def give(item: T, index: int = index) -> None:
                await self._items.send((index, item))

            # Any error is for the consumer; raised here, it would end the runtime.
            try:
                await self._produce(self._begin(*generation), give)
            except trio.BrokenResourceError:
                return  # the consumer is gone
            except Exception as error:
                self._fail(index, error)
                return

    def _fail(self, index: int, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        if not isinstance(error, (RuntimeClosedError, RuntimeBrokenError)):
            error.add_note(f"prompts[{index}] failed, and the generations for the others were cancelled")
        self.scope.cancel()
