"""What comes of many generations, merged into one: whatever each gives, with the index of its prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import trio

from protocol.errors import RuntimeBrokenError, RuntimeClosedError, StreamBusyError
from protocol.messages import Open

CLOSED = "these generations were closed; begin others with generate_many() or stream_many()"

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Give(Protocol[T_contra]):
    """Gives an item to the consumer, as soon as there is room."""

    async def __call__(self, item: T_contra, /) -> None:
        """See above."""


class Merged(Generic[T]):
    """An async iterator over (index of the prompt, item), and an async context manager.

    The generations are under way from the moment that this exists, so many at a time. At most so many items wait.
    """

    def __init__(
        self,
        opened: Sequence[Open],
        produce: Callable[[Open, Give[T]], Awaitable[None]],
        max_concurrent: int,
        *,
        start_soon: Callable[..., None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Nothing was given so far.

        Args:
            opened: what begins each generation, in the order of the prompts.
            produce: does one of them, and gives what comes of it; the last item is one for which `is_last` holds.
            max_concurrent: how many at a time, >= 1.
            start_soon: starts a task that outlives the caller's.
            run_soon: has a function called in trio's thread; may be called from any thread, at any moment.
        """
        send, self._items = trio.open_memory_channel[tuple[int, T]](max_concurrent)
        # It must not know this object, or the last reference to it could never be dropped.
        self._work = _Work(enumerate(opened), produce, min(max_concurrent, len(opened)), send)
        self._run_soon = run_soon
        self.num_prompts = len(opened)
        self._num_left = len(opened)  # prompts whose last item was not given
        self._is_waiting = False
        self._is_closed = False
        start_soon(self._work.run)

    def __repr__(self) -> str:
        state = "under way" if not self._is_closed else "closed" if self._num_left else "over"
        done = self.num_prompts - self._num_left
        return f"<outrider {type(self).__name__}, {state}: {done} of {self.num_prompts} given>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T]:
        """The next item, with the index of its prompt.

        Raises:
            StopAsyncIteration: all have been given.
            StreamBusyError: another task is waiting for one.
            RuntimeClosedError: the runtime or this was closed before all were given.
            RuntimeBrokenError, RewindError: what a stream raises.

        Cancellation: ends all generations.
        """
        if (following := await self.next_item()) is None:
            raise StopAsyncIteration
        return following

    async def aclose(self) -> None:
        """End all generations. Returns at once; closing twice is closing once.

        Cancellation: a checkpoint; it is closed in any case.
        """
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._run_soon(self._work.scope.cancel)

    def is_last(self, item: T) -> bool:
        """Whether nothing more comes of an item's prompt."""
        return True

    @property
    def _has_ended_early(self) -> bool:
        """Closed or failed, so that whoever asks gets the reason."""
        return self._is_closed and self._num_left > 0

    async def next_item(self) -> tuple[int, T] | None:
        """The next item; None once all have been given."""
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for what comes next; each item is given once, to one task")
        if self._num_left == 0:
            await trio.lowlevel.checkpoint()
            return None
        if self._is_closed:
            raise self._work.error or RuntimeClosedError(CLOSED)
        self._is_waiting = True
        try:
            following: tuple[int, T] | None = await self._items.receive()
        except trio.EndOfChannel:
            following = None  # not all are given, and nothing more comes
        except trio.ClosedResourceError:
            raise RuntimeClosedError(CLOSED) from None  # by another task, while this one was waiting
        except trio.Cancelled:
            self.close()
            raise
        finally:
            self._is_waiting = False
        if following is None:
            self.close()
            raise self._work.error or RuntimeClosedError(
                f"the runtime was closed before {self._num_left} of {self.num_prompts} prompts were done"
            )
        self._count(following)
        return following

    def ready_items(self) -> list[tuple[int, T]]:
        """All items that wait, without waiting for further ones."""
        there: list[tuple[int, T]] = []
        while self._num_left > 0:
            try:
                there.append(self._items.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            self._count(there[-1])
        return there

    def _count(self, given: tuple[int, T]) -> None:
        self._num_left -= self.is_last(given[1])
        if self._num_left == 0:
            self.close()

    def close(self) -> None:
        """End all generations, without a checkpoint. Closing twice is closing once."""
        if not self._is_closed:
            self._is_closed = True
            self._items.close()
            self._work.scope.cancel()


class _Work(Generic[T]):
    """The generations themselves, in tasks of the runtime's.

    Attributes:
        scope: cancels all of them.
        error: of the first that failed.
    """

    def __init__(
        self,
        todo: Iterator[tuple[int, Open]],
        produce: Callable[[Open, Give[T]], Awaitable[None]],
        num_tasks: int,
        items: trio.MemorySendChannel[tuple[int, T]],
    ) -> None:
        self.scope = trio.CancelScope()
        self.error: Exception | None = None
        self._todo = todo
        self._produce = produce
        self._num_tasks = num_tasks
        self._items = items

    # A Ctrl-C belongs to the user's task.
    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Do all of them; nothing that one of them raises comes out here."""
        with self._items, self.scope:
            async with trio.open_nursery() as nursery:
                for _ in range(self._num_tasks):
                    nursery.start_soon(self._do_in_turn)

    @trio.lowlevel.enable_ki_protection
    async def _do_in_turn(self) -> None:
        for index, opened in self._todo:

            async def give(item: T, index: int = index) -> None:
                await self._items.send((index, item))

            # Whatever reading a text raises is for who wanted it; here, it would end the runtime.
            try:
                await self._produce(opened, give)
            except trio.BrokenResourceError:
                return  # nobody wants it any more
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
