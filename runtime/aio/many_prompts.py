"""Many prompts at a time, for asyncio: their completions, in the prompts' order or as they finish, or their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from runtime.aio.bridge import AioBridge
from runtime.aio.iteration import AsyncIteration
from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.generation.many_prompts import AwaitableCompletions
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


class Completions(MergedStream[Completion], AwaitableCompletions):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `runtime.Completions` for asyncio.
    """

    async def __anext__(self) -> tuple[int, Completion]:
        """The next finished completion, with the index of its prompt.

        Raises: as when awaited.

        Cancellation: ends all generations.
        """
        self._check_not_gathering()
        return await super().__anext__()

    @property
    def _is_taken(self) -> bool:
        return self._is_waiting or self._num_finished > 0

    async def _next_completion(self) -> tuple[int, Completion] | None:
        return await self._next()

    async def _checkpoint(self) -> None:
        await asyncio.sleep(0)


class TokenStreams(MergedStream[Token]):
    """The tokens of many prompts as they come: `runtime.TokenStreams` for asyncio; see `Runtime.stream_many`."""
