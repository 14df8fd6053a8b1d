"""Many prompts at a time, for asyncio: their completions, in the prompts' order or as they finish, or their tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from protocol.errors import RuntimeClosedError, StreamBusyError
from runtime.aio_thread import settled
from runtime.merged import Merged
from runtime.reading import Token
from runtime.relay import Relay
from runtime.streaming import Completion

_CLOSED = "these generations were closed, or their runtime was; begin others with generate_many() or stream_many()"

T = TypeVar("T")


class MergedSource(Generic[T]):
    """What comes of many prompts, as a source for a relay.

    Attributes:
        error: of the generation that failed, if one did.
    """

    def __init__(self, merged: Merged[T]) -> None:
        self.error: Exception | None = None
        self._merged = merged

    async def take(self) -> Sequence[tuple[int, T]]:
        """See `Source.take`."""
        # Whatever reading a text raises is for who wanted it; here, it would end trio.
        try:
            following = await self._merged._next()
        except Exception as error:
            self.error = error
            return ()
        return () if following is None else (following, *self._merged._there())

    def rest(self) -> Sequence[tuple[int, T]]:
        """See `Source.rest`."""
        return ()

    def close(self) -> None:
        """See `Source.close`."""
        self._merged._close()

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return self._merged._num_prompts

    def is_last(self, item: T) -> bool:
        """Whether nothing more comes of an item's prompt."""
        return self._merged._is_last(item)


class MergedStream(Generic[T]):
    """As `runtime.merged.Merged`, for asyncio: a cancelled task ends all generations, as a cancel scope does."""

    def __init__(self, relay: Relay[MergedSource[T], tuple[int, T]], check_loop: Callable[[], None]) -> None:
        """Nothing was given so far.

        Args:
            relay: of what comes; it must not know this object.
            check_loop: raises where this is used in another loop than its own.
        """
        self._relay = relay
        self._check_loop = check_loop
        self._arrived: deque[tuple[int, T]] = deque()
        self._num_given = 0  # prompts, with all that came of them
        self._is_waiting = False
        self._is_closed = False

    def __repr__(self) -> str:
        source = self._relay.source
        of = "" if source is None else f" of {source.num_prompts}"
        state = "over or closed" if self._is_closed else "under way"
        return f"<outrider aio.{type(self).__name__}, {state}: {self._num_given}{of} given>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T]:
        """The next item, with the index of its prompt.

        Raises: as `runtime.Completions.__anext__`, and:
            PromptError, SettingsError: of a prompt, and at which index.

        Cancellation: ends all generations.
        """
        if (following := await self._next()) is None:
            raise StopAsyncIteration
        return following

    async def aclose(self) -> None:
        """End all generations. Returns at once; closing twice is closing once.

        Cancellation: it is closed in any case.
        """
        self._check_loop()
        self._close()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._relay.hang_up()

    async def _next(self) -> tuple[int, T] | None:
        """The next item; None once all have been given."""
        self._check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for what comes next; each item is given once, to one task")
        self._is_waiting = True
        try:
            await settled(self._relay.begun)
            if self._relay.failure is not None:
                self._close()
                raise self._relay.failure
            source = self._relay.source
            assert source is not None
            is_done = self._num_given == source.num_prompts
            if is_done or self._is_closed or self._arrived:
                await asyncio.sleep(0)
            else:
                arrived = await settled(self._relay.ask())
                self._arrived.extend(arrived)
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        if is_done:
            return None
        if self._is_closed or not self._arrived:
            self._close()
            raise source.error or RuntimeClosedError(_CLOSED)
        following = self._arrived.popleft()
        self._num_given += source.is_last(following[1])
        if self._num_given == source.num_prompts:
            self._close()
        return following

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._relay.hang_up()


class Completions(MergedStream[Completion]):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    As `runtime.Completions`, for asyncio.
    """

    def __init__(
        self, relay: Relay[MergedSource[Completion], tuple[int, Completion]], check_loop: Callable[[], None]
    ) -> None:
        """Made by `Runtime.generate_many`.

        Args: as `MergedStream`.
        """
        super().__init__(relay, check_loop)
        self._gathered: list[Completion] | None = None
        self._is_gathering = False

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; awaited again, the same ones.

        Raises: as `runtime.Completions`, and:
            PromptError, SettingsError: of a prompt, and at which index.
        """
        return self._gather().__await__()

    async def __anext__(self) -> tuple[int, Completion]:
        """The next that is finished: the index of its prompt, and what came of it.

        Raises: as when awaited.

        Cancellation: ends all generations.
        """
        if self._is_gathering:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")
        return await super().__anext__()

    async def _gather(self) -> list[Completion]:
        if self._gathered is not None:
            await asyncio.sleep(0)
            return self._gathered
        if self._is_gathering or self._is_waiting or self._num_given > 0:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        gathered: dict[int, Completion] = {}
        while (following := await self._next()) is not None:
            index, completion = following
            gathered[index] = completion
        self._gathered = [gathered[index] for index in sorted(gathered)]
        return self._gathered


class TokenStreams(MergedStream[Token]):
    """The tokens of many prompts as they come: as `runtime.TokenStreams`, for asyncio; see `Runtime.stream_many`."""
