"""What a consumer in asyncio holds: a stream of tokens, whose text is generated in trio's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from protocol.books import Commit, FinishReason
from protocol.errors import StreamBusyError
from protocol.statistics import Statistics
from runtime import streaming
from runtime.reading import Token
from runtime.relay import Relay
from runtime.session_file import SessionFile
from runtime.thinking import Answer

_NOTHING = Answer(None, ())


class Commits:
    """What is committed of a stream, as a source for a relay.

    Attributes:
        stream: trio's, which nobody iterates over; it says in trio's thread whether the generation is over.
        reading: the stream's, for asyncio's thread.
        arrivals: the stream's.
    """

    def __init__(self, stream: streaming.TokenStream) -> None:
        self.stream = stream
        self.reading = stream._reading
        self.arrivals = stream._arrivals

    async def take(self) -> Sequence[Commit]:
        """See `Source.take`."""
        commit = await self.arrivals.receive()
        return () if commit is None else (commit, *self.arrivals.there())

    def rest(self) -> Sequence[Commit]:
        """See `Source.rest`."""
        return self.arrivals.rest()

    def close(self) -> None:
        """See `Source.close`."""
        self.stream._hang_up()


class TokenStream:
    """The tokens of one generation: an async iterator, and an async context manager.

    As `runtime.TokenStream`, for asyncio. The generation is under way from the moment the stream exists, as far ahead
    as its buffer goes.

    Cancellation: leaving `async with`, `aclose`, cancelling the task that waits in `__anext__`, and dropping the last
    reference (which is what `break` does to a stream that has no other) all end the generation. Each returns at once;
    the models are free after the forward pass that is running.
    """

    def __init__(
        self,
        relay: Relay[Commits, Commit],
        check_loop: Callable[[], None],
        unopened: Callable[[], Statistics],
        done_in_trio: Callable[[Callable[[], Awaitable[int]]], Awaitable[int]],
    ) -> None:
        """Made by `Runtime.stream`.

        Args:
            relay: of what is committed; it must not know this object.
            check_loop: raises where this is used in another loop than its own.
            unopened: the statistics of a stream whose prompt was not looked at yet.
            done_in_trio: calls an async function in trio's thread, and waits for what it returns.
        """
        self._relay = relay
        self._check_loop = check_loop
        self._unopened = unopened
        self._done_in_trio = done_in_trio
        self._source: Commits | None = None  # once the prompt was looked at
        self._commits: deque[Commit] = deque()
        self._is_waiting = False
        self._is_closed = False

    def __repr__(self) -> str:
        state = self.finish_reason or ("closed" if self._is_closed else "under way")
        num_given = 0 if self._source is None else self._source.reading.num_given
        return f"<outrider aio.TokenStream, {state}: {num_given} tokens given>"

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        return None if self._source is None else self._source.reading.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, once its last token was given, or None."""
        return None if self._source is None else self._source.reading.stop_reason

    @property
    def answer(self) -> Answer:
        """What was given so far, told apart into what the model thinks and what it says."""
        return _NOTHING if self._source is None else self._source.reading.answer

    @property
    def tail(self) -> str:
        """The text of the tokens given that was not given with them; see `runtime.TokenStream.tail`."""
        return "" if self._source is None else self._source.reading.tail

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes: the last token was given, or the stream was closed, or failed."""
        return self._is_closed

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
        self._is_waiting = True
        try:
            source = await self._opened()
            await self._wait_for_token(source)
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        token = source.reading.give()
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
        source = await self._opened()
        # What has come into this thread by now; the rest is in trio's.
        here = source.reading.progress.then(self._commits)
        return await self._done_in_trio(lambda: source.stream._write(path, lambda: here))

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

    def __del__(self) -> None:
        if not self._is_closed:
            if self._source is not None:
                self._source.reading.end()
            self._relay.hang_up()

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot. See `Runtime.statistics`."""
        if self._source is None:
            return self._unopened()
        return self._source.reading.statistics(is_over=self._is_closed)

    async def _opened(self) -> Commits:
        if self._source is None:
            await self._relay.begun()
            if self._relay.failure is not None:
                self._close()
                raise self._relay.failure
            self._source = self._relay.source
            assert self._source is not None
            if self.finish_reason is not None:  # it was saved at its end
                self._close()
        return self._source

    async def _wait_for_token(self, source: Commits) -> None:
        reading = source.reading
        if reading.finish_reason is None and not self._is_closed and not reading.has_more and not self._commits:
            self._commits.extend(await self._relay.take())
        else:
            # A turn of the loop for each token, also where several came at once.
            await asyncio.sleep(0)
        if reading.finish_reason is not None:
            raise StopAsyncIteration
        if self._is_closed:
            raise source.arrivals.error
        if not reading.has_more:
            if not self._commits:
                self._close()
                raise source.arrivals.error
            reading.begin(self._commits.popleft())

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._source is not None:
                self._source.reading.end()
                self._source.arrivals.hang_up()
            self._relay.hang_up()
