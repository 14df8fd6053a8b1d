"""Many prompts at a time, for asyncio: their completions, in the prompts' order or as they finish, or their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from protocol.errors import StreamBusyError
from runtime.aio.bridge import AioBridge
from runtime.aio.iteration import AsyncIteration
from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.generation.merged_streams import Merged
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion

T = TypeVar("T")


class MergedStream(AsyncIteration[MergedSource[T], tuple[int, T], tuple[int, T]], MergedHandle[T]):
    """Pairs (index of the prompt, item) of many generations: `Merged` of `runtime.generation` for asyncio."""

    def __init__(self, bridge: AioBridge, begin: Callable[[], Merged[T]]) -> None:
        """Made by `Runtime.generate_many` and `Runtime.stream_many`.

        Args:
            bridge: to the runtime.
            begin: begins the generations in the trio thread.
        """
        super().__init__(bridge, lambda: MergedSource(begin()))

    def __repr__(self) -> str:
        return f"<outrider aio.{type(self).__name__}, {self._state}>"


class Completions(MergedStream[Completion]):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `runtime.Completions` for asyncio.
    """

    _gathered: list[Completion] | None = None
    _is_gathering = False

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; the same list when awaited again.

        Raises: as `runtime.Completions`, and:
            PromptError, SettingsError: of a prompt; the message says at which index.
        """
        return self._gather().__await__()

    async def __anext__(self) -> tuple[int, Completion]:
        """The next finished completion, with the index of its prompt.

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
        if self._is_gathering or self._is_waiting or self._num_finished > 0:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        completions: dict[int, Completion] = {}
        while (item := await self._next()) is not None:
            index, completion = item
            completions[index] = completion
        self._gathered = [completions[index] for index in sorted(completions)]
        return self._gathered


class TokenStreams(MergedStream[Token]):
    """The tokens of many prompts as they come: `runtime.TokenStreams` for asyncio; see `Runtime.stream_many`."""
