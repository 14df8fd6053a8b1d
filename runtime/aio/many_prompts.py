"""Many prompts at a time, for asyncio: their completions, in the prompts' order or as they finish, or their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

from protocol.errors import StreamBusyError
from runtime.aio.thread import settled
from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.bridge.stream import BridgeStream
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion

T = TypeVar("T")


class MergedStream(MergedHandle[T]):
    """`runtime.generation.merged_streams.Merged` for asyncio: cancelling the task ends all generations."""

    def __init__(self, relay: BridgeStream[MergedSource[T], tuple[int, T]], check_loop: Callable[[], None]) -> None:
        """Nothing was given so far; as `MergedHandle`, and:

        Args:
            check_loop: raises where this is used in another loop than its own.
        """
        super().__init__(relay)
        self._check_loop = check_loop
        self._is_waiting = False

    def __repr__(self) -> str:
        return f"<outrider aio.{type(self).__name__}, {self._state}>"

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

    async def _next(self) -> tuple[int, T] | None:
        """The next item; None once all have been given."""
        self._check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for what comes next; each item is given once, to one task")
        self._is_waiting = True
        try:
            await settled(self._relay.begun)
            source = self._begun()
            if self._must_ask(source):
                arrived = await settled(self._relay.ask())
                self._arrived.extend(arrived)
            else:
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        return self._following(source)


class Completions(MergedStream[Completion]):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    As `runtime.Completions`, for asyncio.
    """

    def __init__(
        self, relay: BridgeStream[MergedSource[Completion], tuple[int, Completion]], check_loop: Callable[[], None]
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
