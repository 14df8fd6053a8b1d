"""A stream of tokens for asyncio, whose text is generated in the trio thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from protocol.session_state import Commit
from runtime.aio.bridge import AioBridge
from runtime.aio.iteration import AsyncIteration
from runtime.bridge.handles import CommitSource, StreamHandle
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import SessionFile
from runtime.generation.token_stream import TokenStream as TrioTokenStream


class TokenStream(AsyncIteration[CommitSource, Commit, Token], StreamHandle):
    """The tokens of one generation: an async iterator, and an async context manager.

    `runtime.TokenStream` for asyncio. The generation starts when the stream is made, and runs ahead of its consumer as
    far as its buffer allows.

    Cancellation: leaving `async with`, `aclose`, cancelling the task that waits in `__anext__`, and dropping the last
    reference (which is what `break` does to a stream that has no other) all end the generation. Each returns at once;
    the models are free after the forward pass that is running.
    """

    _how_to_close = "aclose()"

    def __init__(self, bridge: AioBridge, open_stream: Callable[[], TrioTokenStream]) -> None:
        """Made by `Runtime.stream`.

        Args:
            bridge: to the runtime.
            open_stream: opens the stream in the trio thread.
        """
        super().__init__(bridge, lambda: CommitSource(open_stream()))

    def __repr__(self) -> str:
        return f"<outrider aio.TokenStream, {self._state}>"

    async def opened(self) -> None:
        """Wait until the prompt was checked; `async with` does so too.

        Raises: PromptError: the prompt is empty, longer than the context, or not encodable; and what else opening a
            stream raises.

        Cancellation: ends the generation.
        """
        self._bridge.check_loop()
        try:
            await self._wait_opened()
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise

    async def save(self, path: SessionFile) -> int:
        """Save the stream to a file, for `Runtime.load_stream`, here or in trio; see `runtime.TokenStream.save`.

        Args, Returns: as there. A file object is used in another thread.

        Raises: as there and as `opened`, and:
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: leaves the old file, or, at the very last, the whole new one. The stream goes on.
        """
        self._bridge.check_loop()
        await self._wait_opened()
        return await self._bridge.call(self._make_save(path))

    async def __aenter__(self) -> Self:
        await self.opened()
        return self
