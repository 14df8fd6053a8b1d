"""What a consumer holds: a stream of tokens, and what is left of it in the end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import attrs
import trio

from actors.mlx_memory import peak_memory
from actors.session import Session
from protocol.books import Commit, FinishReason
from protocol.errors import RuntimeClosedError, StreamBusyError
from protocol.prices import Estimates
from protocol.statistics import Statistics
from runtime.text import GrowingText
from runtime.thinking import Answer

STREAM_CLOSED = "this stream was closed; begin another with stream()"


@attrs.frozen
class TopLogprob:
    """One of the likeliest tokens at a position: its id, its text by itself, and its log-probability."""

    id: int
    text: str
    logprob: float


@attrs.frozen
class Token:
    """One generated token.

    Attributes:
        id: in the target's vocabulary.
        text: what this token makes readable, maybe empty. The texts of a stream add up to the
            tokenizer's decoding of its ids, up to a stop string if one ended it; an end-of-text token contributes no
            text. What may become a stop string is withheld until it is known not to.
        index: 0 for the first generated token.
        from_draft: whether the drafter had proposed it.
        finish_reason: None where the text goes on; "stop" at an end-of-text or stop token, or where a stop string is
            complete; "length" where `max_tokens` or the context is used up.
        stop_reason: what of `stop` and `stop_tokens` ended the text: the string, or the id. None where nothing did:
            where the text goes on or ends by its length, and at an end-of-text token of the tokenizer's own that
            is not among `stop_tokens` too.
        logprob: its log-probability, <= 0: the target's, after logits processors, before filters and temperature. None
            unless `logprobs` asks for it.
        is_thinking: whether it belongs to what the model thinks, tags included, by the tags that its tokenizer names.
        top_logprobs: the likeliest tokens at its position, likeliest first, as many as `logprobs` says; empty unless
            it asks for some.
    """

    id: int
    text: str
    index: int
    from_draft: bool
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    stop_reason: str | int | None = None
    is_thinking: bool = False


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


class TokenStream:
    """The tokens of one generation: an async iterator, and an async context manager.

    The generation is under way from the moment the stream exists, as far ahead as its buffer goes.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `__anext__`, and
    dropping the last reference (which is what `break` does to a stream that has no other) all end the
    generation. Each returns at once; the models are free after the forward pass that is running.

    Attributes:
        answer: what was given so far, told apart into what the model thinks and what it says.
    """

    def __init__(
        self,
        session: Session,
        commits: trio.MemoryReceiveChannel[Commit],
        text: GrowingText,
        answer: Answer,
        *,
        hang_up: Callable[[], None],
        clock: Callable[[], float],
        on_token: Callable[[Commit, int], None],
        estimates: Callable[[], Estimates],
    ) -> None:
        """Made by `Runtime.stream`.

        Args:
            session: what the actors share with this stream.
            commits: where committed tokens arrive.
            text: fresh, for this generation.
            answer: likewise.
            hang_up: ends the session soon; may be called from any thread, at any moment, more than once.
            clock: seconds.
            on_token: called for each token given: its commit, and its index there.
            estimates: what the runtime has measured by now.
        """
        self._session = session
        self._commits = commits
        self._text = text
        self.answer = answer
        self._hang_up = hang_up
        self._clock = clock
        self._on_token = on_token
        self._estimates = estimates
        self._commit: Commit | None = None
        self._next_in_commit = 0
        self._is_waiting = False
        self._is_closed = False
        self._is_handed_over = False
        self._num_given = 0
        self._began = clock()
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    def __repr__(self) -> str:
        state = self._finish_reason or ("closed" if self._is_closed else "under way")
        return f"<outrider TokenStream, {state}: {self._num_given} tokens given>"

    @property
    def session(self) -> int:
        """The number by which a trace names this generation."""
        return self._session.opened.session

    @property
    def began(self) -> float:
        """When it was begun, in seconds on the clock of a trace's events; it may have waited for its turn since."""
        return self._began

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        return self._finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, as in `Token`, once its last token was given, or None."""
        return self._stop_reason

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
            commit = await self._current_commit()
        except trio.Cancelled:
            self._close()
            raise
        finally:
            self._is_waiting = False
        return self._give(commit)

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
            self._hang_up()

    def statistics(self) -> Statistics:
        """Counts and rates so far; a frozen snapshot."""
        now = self._clock()
        over = self._is_closed or self._finish_reason is not None
        end = self._last_at if over and self._last_at is not None else now
        return self._session.counts.snapshot(
            elapsed=end - self._began,
            generation_seconds=end - self._first_at if self._first_at is not None else 0.0,
            time_to_first_token=None if self._first_at is None else self._first_at - self._began,
            peak_memory=peak_memory(),
            estimates=self._estimates(),
        )

    async def _current_commit(self) -> Commit:
        """The commit that has the next token."""
        if self._finish_reason is not None:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        if self._is_closed:
            raise self._session.error or RuntimeClosedError(STREAM_CLOSED)
        if self._commit is not None:
            # A checkpoint a token, also where several came at once.
            await trio.lowlevel.checkpoint()
            return self._commit
        commit = await self._receive()
        if commit is None:
            raise self._session.error or RuntimeClosedError(STREAM_CLOSED)
        self._begin_commit(commit)
        return commit

    # Waiting for a commit is trio's. What follows from one, down to the text and to what is counted, may happen in
    # another thread, if it happens in one only: `runtime.aio` takes the two apart here.

    def _hand_over(self) -> None:
        """From here on `_begin_commit`, `_give`, `_close` and `statistics` are another thread's to call."""
        self._is_handed_over = True

    def _begin_commit(self, commit: Commit) -> None:
        self._commit, self._next_in_commit = commit, 0

    async def _receive(self) -> Commit | None:
        """The next commit to arrive; None where nothing more comes."""
        try:
            return await self._commits.receive()
        except trio.EndOfChannel:
            # Nothing more comes, but what was committed already is the consumer's.
            commit, self._session.unsent = self._session.unsent, None
            if self._session.error is None:
                self._session.error = RuntimeClosedError("the runtime was closed before the text was over")
            if commit is None:
                self._close()
            return commit
        except trio.ClosedResourceError:
            return None  # closed by another task, while this one was waiting

    def _give(self, commit: Commit) -> Token:
        index = self._next_in_commit
        self._next_in_commit += 1
        is_last_in_commit = self._next_in_commit == len(commit.tokens)
        finish_reason = commit.finish_reason if is_last_in_commit else None
        if is_last_in_commit:
            self._commit = None
        self._last_at = self._clock()
        if self._first_at is None:
            self._first_at = self._last_at
        self._on_token(commit, index)
        likelihood = commit.likelihoods[index] if commit.likelihoods else None
        text = self._text.add(commit.tokens[index], is_last=finish_reason is not None)
        token = Token(
            id=commit.tokens[index],
            text=text,
            index=self._num_given,
            from_draft=index < commit.num_from_draft,
            finish_reason=finish_reason,
            logprob=None if likelihood is None else likelihood.logprob,
            top_logprobs=self._named(likelihood.top) if likelihood is not None else (),
            stop_reason=commit.stop_reason if is_last_in_commit else None,
            is_thinking=self.answer.add(commit.tokens[index], self._text.readable, text),
        )
        self._num_given += 1
        if finish_reason is not None:
            self._finish_reason, self._stop_reason = finish_reason, commit.stop_reason
            self._close()
        return token

    def _named(self, top: tuple[tuple[int, float], ...]) -> tuple[TopLogprob, ...]:
        return tuple(TopLogprob(id, self._text.alone(id), logprob) for id, logprob in top)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._is_handed_over:
                self._commits.close()
            self._hang_up()


async def complete(stream: TokenStream) -> Completion:
    """Read a stream to its end.

    Raises: as `TokenStream.__anext__`.

    Cancellation: ends the generation; what was generated until then is lost.
    """
    async with stream:
        tokens = tuple([token async for token in stream])
        assert stream.finish_reason is not None
        return Completion(
            text="".join(token.text for token in tokens),
            tokens=tokens,
            finish_reason=stream.finish_reason,
            statistics=stream.statistics(),
            stop_reason=stream.stop_reason,
            thinking=stream.answer.thinking,
        )
