"""What a consumer in asyncio holds: a stream of tokens, whose text is generated in trio's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from protocol.errors import StreamBusyError
from protocol.session_state import Commit
from protocol.statistics import Statistics
from runtime.aio.thread import settled
from runtime.bridge.handles import Commits, StreamHandle
from runtime.bridge.stream import BridgeStream
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import SessionFile


class TokenStream(StreamHandle):
    """The tokens of one generation: an async iterator, and an async context manager.

    As `runtime.TokenStream`, for asyncio. The generation is under way from the moment the stream exists, as far ahead
    as its buffer goes.

    Cancellation: leaving `async with`, `aclose`, cancelling the task that waits in `__anext__`, and dropping the last
    reference (which is what `break` does to a stream that has no other) all end the generation. Each returns at once;
    the models are free after the forward pass that is running.
    """

    _how_to_close = "aclose()"

    def __init__(
        self,
        relay: BridgeStream[Commits, Commit],
        unopened: Callable[[], Statistics],
        check_loop: Callable[[], None],
        done_in_trio: Callable[[Callable[[], Awaitable[int]]], Awaitable[int]],
    ) -> None:
        """Made by `Runtime.stream`; as `StreamHandle`, and:

        Args:
            check_loop: raises where this is used in another loop than its own.
            done_in_trio: calls an async function in trio's thread, and waits for what it returns.
        """
        super().__init__(relay, unopened)
        self._check_loop = check_loop
        self._done_in_trio = done_in_trio
        self._is_waiting = False

    def __repr__(self) -> str:
        return f"<outrider aio.TokenStream, {self._state}>"

    async def opened(self) -> None:
        """Wait until the prompt was looked at; `async with` does so too.

        Raises: PromptError: it is empty, longer than the context, or not encodable; what else opening a stream raises.

        Cancellation: ends the generation.
        """
        self._check_loop()
        try:
            await self._opened()
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises: as `opened`, as `runtime.TokenStream.__anext__`, and:
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: ends the generation.
        """
        self._check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for this stream's next token; a stream has one consumer")
        self._is_waiting, self._is_unread = True, False
        try:
            source = await self._opened()
            await self._wait_for_token(source)
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        token = source.reading.next_token()
        if token.finish_reason is not None:
            self._close()
        return token

    async def save(self, path: SessionFile) -> int:
        """Save the stream to a file, for `Runtime.load_stream`, here or in trio; see `runtime.TokenStream.save`.

        Args, Returns: as there. A file object is used in another thread.

        Raises: as there and as `opened`, and:
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: leaves what was there, or, at the very last, the whole new file. The stream goes on.
        """
        self._check_loop()
        await self._opened()
        return await self._done_in_trio(self._writing(path))

    async def aclose(self) -> None:
        """End the generation. Returns at once; closing twice is closing once.

        Cancellation: the stream is closed in any case.
        """
        self._check_loop()
        self._close()
        await asyncio.sleep(0)

    async def __aenter__(self) -> TokenStream:
        await self.opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _opened(self) -> Commits:
        if self._source is None:
            await settled(self._relay.begun)
        return self._begun()

    async def _wait_for_token(self, source: Commits) -> None:
        if self._must_ask(source):
            arrived = await settled(self._relay.ask())
            self._commits.extend(arrived)
        else:
            # A turn of the loop for each token, also where several came at once.
            await asyncio.sleep(0)
        if not self._has_next(source):
            raise StopAsyncIteration
