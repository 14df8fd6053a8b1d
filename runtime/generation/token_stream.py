"""What a consumer holds: a stream of tokens, and what is left of it in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import attrs
import trio

from protocol.errors import StreamBusyError
from protocol.reprs import excerpt
from protocol.session_state import FinishReason
from protocol.statistics import Statistics
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.token_reader import Arrivals, Progress, Token, TokenReader
from runtime.persistence.session_file import SessionFile

Write = Callable[[SessionFile, Callable[[], Progress]], Awaitable[int]]
"""Saves a stream to a file, as far as its reader says that it has come."""


@attrs.frozen
class Completion:
    """A whole generated text.

    Attributes:
        text: without any end-of-text token, and without a stop string and what follows it.
        tokens: in order, an end-of-text token included, and those of a stop string.
        finish_reason: "stop" or "length".
        statistics: of this generation.
        stop_reason: the stop string or the stop token that ended the text, as in `Token`, or None.
        thinking: what stands between the tags of thinking, which are part of `text`; empty where there are none.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    statistics: Statistics
    stop_reason: str | int | None = None
    thinking: str = ""

    def __repr__(self) -> str:
        stop = self.stop_reason
        at = "" if stop is None else f" at {excerpt(stop) if isinstance(stop, str) else stop}"
        return f"<outrider Completion, {self.finish_reason}{at}: {len(self.tokens)} tokens, {excerpt(self.text, 60)}>"


class TokenStream:
    """The tokens of one generation: an async iterator, and an async context manager.

    The generation is under way from the moment the stream exists, as far ahead as its buffer goes.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `__anext__`, and
    dropping the last reference (which is what `break` does to a stream that has no other) all end the
    generation. Each returns at once; the models are free after the forward pass that is running.
    """

    def __init__(self, reading: TokenReader, arrivals: Arrivals, write: Write) -> None:
        """Made by `Runtime.stream`.

        Args:
            reading: of this generation.
            arrivals: of the same.
            write: saves it to a file.
        """
        # Public for `runtime.bridge`, which has what arrives in trio's thread read in the consumer's.
        self.write = write
        self.reader = reading
        self.arrivals = arrivals
        self._is_waiting = False
        self._is_closed = False

    def __repr__(self) -> str:
        state = self.finish_reason or ("closed" if self._is_closed else "under way")
        return f"<outrider TokenStream, {state}: {self.reader.num_given} tokens given>"

    @property
    def session(self) -> int:
        """The number by which a trace names this generation."""
        return self.reader.session

    @property
    def began(self) -> float:
        """When it was begun, in seconds on the clock of a trace's events; it may have waited for its turn since."""
        return self.reader.began

    @property
    def answer(self) -> ReasoningTracker:
        """What was given so far, told apart into what the model thinks and what it says."""
        return self.reader.answer

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        return self.reader.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, as in `Token`, once its last token was given, or None."""
        return self.reader.stop_reason

    @property
    def tail(self) -> str:
        """The text of the tokens given that was not given with them, because it may begin a stop string or ends in an
        incomplete character.

        The texts of the tokens and the tail add up to the tokenizer's decoding of the tokens' ids. After a `break`, a
        cancellation or a failure it is what else there is of the text; while the stream goes on, what comes next is
        given with a later token, unless it turns out to be a stop string. Empty once the text is over.
        """
        return self.reader.tail

    @property
    def is_closed(self) -> bool:
        """Whether nothing more comes: the last token was given, or the stream was closed, or failed."""
        return self._is_closed

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            StopAsyncIteration: the text is over.
            StreamBusyError: another task is waiting for a token of this stream.
            RuntimeClosedError: the stream or its runtime was closed before the text was over.
            RuntimeBrokenError: the target failed; its error is the cause.
            RewindError: a cache did not hold what it should; the tokens before are right.

        Cancellation: ends the generation.
        """
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for this stream's next token; a stream has one consumer")
        self._is_waiting = True
        try:
            await self._wait_for_token()
        except trio.Cancelled:
            self._close()
            raise
        finally:
            self._is_waiting = False
        token = self.reader.give()
        if token.finish_reason is not None:
            self._close()
        return token

    async def save(self, path: SessionFile) -> int:
        """Save the stream to a file, for `Runtime.load_stream`: to go on behind the last token that was given.

        The stream goes on undisturbed; it may also be closed, cancelled, failed or over. In the file are the prompt,
        the text so far with what the target has decided beyond the last token given, the settings, the seed (also where
        none was asked for), and what the target and the draft model have cached of the text; of a stream that is
        closed, what was kept with `reuse_prefix`. See `Conversation.save` for what else holds for such files.

        Under the match rule the text that comes is the one that would have come. Under the rejection rule it is, too,
        where the rounds are the same: where nothing is drafted, or with a lookahead that is a number, caches that can
        be trimmed, and a drafter that is never late. Else it is another sample of the same distribution.

        Args:
            path: as for `Conversation.save`.

        Returns: the file's size in bytes.

        Raises: as `Conversation.save`, but for `ConversationBusyError`.

        Cancellation: leaves what was there, or, at the very last, the whole new file. The stream goes on.
        """
        return await self.write(path, lambda: self.reader.progress)

    async def aclose(self) -> None:
        """End the generation. Returns at once; closing twice is closing once.

        Cancellation: a checkpoint; the stream is closed in any case.
        """
        self._close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not self._is_closed:
            self.reader.end()
            self.arrivals.hang_up()

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot."""
        return self.reader.statistics(is_over=self._is_closed)

    async def _wait_for_token(self) -> None:
        if self.reader.finish_reason is not None:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        if self._is_closed:
            raise self.arrivals.error
        if self.reader.has_more:
            # A checkpoint a token, also where several came at once.
            await trio.lowlevel.checkpoint()
            return
        commit = await self.arrivals.receive()
        if commit is None:
            self._close()
            raise self.arrivals.error
        self.reader.begin(commit)

    def _close(self) -> None:
        self.reader.end()
        self.hang_up()

    def hang_up(self) -> None:
        """Receive nothing more. What has arrived already may still be read, by `runtime.bridge`."""
        if not self._is_closed:
            self._is_closed = True
            self.arrivals.close()


async def complete(stream: TokenStream) -> Completion:
    """Read a stream to its end.

    Raises: as `TokenStream.__anext__`.

    Cancellation: ends the generation; what was generated until then is lost.
    """
    async with stream:
        return completion_of(stream, [token async for token in stream])


def completion_of(stream: TokenStream, tokens: Sequence[Token]) -> Completion:
    """The whole text of a stream, once all its tokens were given."""
    assert stream.finish_reason is not None
    return Completion(
        text="".join(token.text for token in tokens),
        tokens=tuple(tokens),
        finish_reason=stream.finish_reason,
        statistics=stream.statistics(),
        stop_reason=stream.stop_reason,
        thinking=stream.answer.thinking,
    )
