"""Many prompts at a time, for asyncio: their completions, in the prompts' order or as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from protocol.errors import RuntimeClosedError, StreamBusyError
from runtime import many
from runtime.relay import Relay
from runtime.streaming import Completion

_CLOSED = "these generations were closed, or their runtime was; begin others with generate_many()"

Numbered = tuple[int, Completion]


class CompletionSource:
    """Completions, as a source for a relay.

    Attributes:
        error: of the generation that failed, if one did.
    """

    def __init__(self, completions: many.Completions) -> None:
        self.error: Exception | None = None
        self._completions = completions

    async def take(self) -> Sequence[Numbered]:
        """See `Source.take`."""
        # Whatever reading a text raises is for who wanted it; here, it would end trio.
        try:
            following = await self._completions._next()
        except Exception as error:
            self.error = error
            return ()
        return () if following is None else (following,)

    def rest(self) -> Sequence[Numbered]:
        """See `Source.rest`."""
        return ()

    def close(self) -> None:
        """See `Source.close`."""
        self._completions._close()

    @property
    def num_prompts(self) -> int:
        """How many completions there will be."""
        return self._completions._num_prompts


class Completions:
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    As `runtime.Completions`, for asyncio; a cancelled task ends all generations, as a cancel scope does in trio.
    """

    def __init__(self, relay: Relay[CompletionSource, Numbered], check_loop: Callable[[], None]) -> None:
        """Made by `Runtime.generate_many`.

        Args:
            relay: of what is finished; it must not know this object.
            check_loop: raises where this is used in another loop than its own.
        """
        self._relay = relay
        self._check_loop = check_loop
        self._num_given = 0
        self._gathered: list[Completion] | None = None
        self._is_gathering = False
        self._is_waiting = False
        self._is_closed = False

    def __repr__(self) -> str:
        source = self._relay.source
        of = "" if source is None else f" of {source.num_prompts}"
        state = "over or closed" if self._is_closed else "under way"
        return f"<outrider aio.Completions, {state}: {self._num_given}{of} given>"

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; awaited again, the same ones.

        Raises: as `runtime.Completions`, and:
            PromptError: a prompt will not do, and at which index.
        """
        return self._gather().__await__()

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> Numbered:
        """The next that is finished: the index of its prompt, and what came of it.

        Raises: as when awaited.

        Cancellation: ends all generations.
        """
        if self._is_gathering:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")
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

    async def __aenter__(self) -> Completions:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._relay.hang_up()

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

    async def _next(self) -> Numbered | None:
        """The next that is finished; None once all have been given."""
        self._check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for the next completion; each is given once, to one task")
        self._is_waiting = True
        try:
            await self._relay.begun()
            if self._relay.failure is not None:
                self._close()
                raise self._relay.failure
            source = self._relay.source
            assert source is not None
            is_done = self._num_given == source.num_prompts
            if is_done or self._is_closed:
                await asyncio.sleep(0)
            arrived = () if is_done or self._is_closed else await self._relay.take()
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        if is_done:
            return None
        if self._is_closed or not arrived:
            self._close()
            raise source.error or RuntimeClosedError(_CLOSED)
        self._num_given += 1
        if self._num_given == source.num_prompts:
            self._close()
        return arrived[0]

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._relay.hang_up()
