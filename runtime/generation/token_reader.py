"""What comes of a generation: its tokens, as they arrive, and what is read of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import trio

from actors.mlx.memory import peak_memory
from actors.session import Session
from protocol.errors import OutriderError, RuntimeClosedError
from protocol.prices import Estimates
from protocol.reprs import brief, excerpt
from protocol.session_state import Commit, FinishReason
from protocol.statistics import Statistics
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText

STREAM_CLOSED = "this stream was closed; begin another with stream()"


@attrs.frozen
class TopLogprob:
    """One of the likeliest tokens at a position: its id, its text by itself, and its log-probability."""

    id: int
    text: str
    logprob: float

    def __repr__(self) -> str:
        return f"TopLogprob(id={self.id}, text={excerpt(self.text)}, logprob={self.logprob:.4g})"


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

    def __repr__(self) -> str:
        told: dict[str, Any] = {"id": self.id, "text": self.text, "index": self.index, "from_draft": self.from_draft}
        for name in ("finish_reason", "stop_reason", "logprob"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.is_thinking:
            told["is_thinking"] = True
        if self.top_logprobs:
            told["top_logprobs"] = self.top_logprobs
        return brief("Token", told)


@attrs.frozen
class Progress:
    """How far a text has come, for somebody who goes on with it.

    Attributes:
        num_prompt: tokens before it.
        given: tokens that were given.
        commits: what comes next and is decided already, in order.
        finish_reason, stop_reason: as in `Token`, where the last token was given.
    """

    num_prompt: int
    given: tuple[int, ...]
    commits: tuple[Commit, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def then(self, commits: Iterable[Commit]) -> Progress:
        """With further commits, as far as each begins where the text so far ends."""
        found = list(self.commits)
        end = self.num_prompt + len(self.given) + sum(len(commit.tokens) for commit in found)
        for commit in commits:
            if commit.start == end and self.finish_reason is None:
                found.append(commit)
                end += len(commit.tokens)
        return attrs.evolve(self, commits=tuple(found))


class TokenReader:
    """The tokens of one generation, as they come of what is committed: put into words, told apart, and counted.

    It waits for nothing, so that it serves readers in trio and in asyncio. All of it is used in one thread.

    Attributes:
        session: the number by which a trace names this generation.
        began: when it was begun, in seconds on the clock of a trace's events.
        answer: what was given so far, told apart into what the model thinks and what it says.
        num_given: tokens.
        finish_reason, stop_reason: as in `Token`, once the last token was given; None before.
    """

    def __init__(
        self,
        session: Session,
        text: GrowingText,
        answer: ReasoningTracker,
        *,
        clock: Callable[[], float],
        on_token: Callable[[Commit, int], None],
        estimates: Callable[[], Estimates],
    ) -> None:
        """Nothing was given so far.

        Args:
            session: what the actors share with its reader.
            text: fresh, for this generation.
            answer: likewise.
            clock: seconds.
            on_token: called for each token given: its commit, and its index there.
            estimates: what the runtime has measured by now.
        """
        self.session = session.opened.session
        self.began = clock()
        self.answer = answer
        self.num_given = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._num_prompt = session.opened.num_prompt
        self._counts = session.counts
        self._lookahead = session.opened.settings.lookahead if session.opened.drafted else 0
        self._text = text
        self._clock = clock
        self._on_token = on_token
        self._estimates = estimates
        self._given: list[int] = []
        self._commit: Commit | None = None
        self._next_in_commit = 0
        self._num_in_first_round = 0  # tokens given
        self._first_at: float | None = None
        self._last_at: float | None = None

    def resume(self, progress: Progress) -> None:
        """Go on behind tokens that were given before: with the text, the thinking and the number that come after."""
        for i, token in enumerate(progress.given, start=1):
            is_last = progress.finish_reason is not None and i == len(progress.given)
            given = self._text.add(token, is_last=is_last)
            self.answer.add(token, self._text.readable, given, self._text.tail)
        self._given = list(progress.given)
        self.num_given = len(progress.given)
        self.finish_reason, self.stop_reason = progress.finish_reason, progress.stop_reason

    @property
    def progress(self) -> Progress:
        """How far the text has come: what was given, and the rest of the commit that was begun."""
        rest = () if self._commit is None else (_rest_of(self._commit, self._next_in_commit),)
        return Progress(self._num_prompt, tuple(self._given), rest, self.finish_reason, self.stop_reason)

    @property
    def has_more(self) -> bool:
        """Whether the commit that was begun last has tokens that were not given."""
        return self._commit is not None

    def begin(self, commit: Commit) -> None:
        """Have `give` go on with the tokens of a commit, once those before were given."""
        self._commit, self._next_in_commit = commit, 0

    def give(self) -> Token:
        """The next token; only where `has_more`."""
        commit, index = self._commit, self._next_in_commit
        assert commit is not None
        self._next_in_commit += 1
        is_last_in_commit = self._next_in_commit == len(commit.tokens)
        finish_reason = commit.finish_reason if is_last_in_commit else None
        if is_last_in_commit:
            self._commit = None
        self._last_at = self._clock()
        if self._first_at is None:
            self._first_at = self._last_at
        self._num_in_first_round += self.num_given == index
        self._on_token(commit, index)
        likelihood = commit.likelihoods[index] if commit.likelihoods else None
        text = self._text.add(commit.tokens[index], is_last=finish_reason is not None)
        token = Token(
            id=commit.tokens[index],
            text=text,
            index=self.num_given,
            from_draft=index < commit.num_from_draft,
            finish_reason=finish_reason,
            logprob=None if likelihood is None else likelihood.logprob,
            top_logprobs=self._named(likelihood.top) if likelihood is not None else (),
            stop_reason=commit.stop_reason if is_last_in_commit else None,
            is_thinking=self.answer.add(commit.tokens[index], self._text.readable, text, self._text.tail),
        )
        self.num_given += 1
        self._given.append(token.id)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, commit.stop_reason
        return token

    @property
    def tail(self) -> str:
        """The decoded text of the tokens given that was not given; see `TokenStream.tail`."""
        return self._text.tail

    def end(self) -> None:
        """Note that nothing more is given."""
        self.answer.is_over = True

    def statistics(self, *, is_over: bool) -> Statistics:
        """Counts and rates so far; over the time up to now, or where it is over, up to the last token."""
        end = self._last_at if is_over and self._last_at is not None else self._clock()
        return self._counts.snapshot(
            elapsed=end - self.began,
            generation_seconds=end - self._first_at if self._first_at is not None else 0.0,
            num_untimed=self._num_in_first_round,
            time_to_first_token=None if self._first_at is None else self._first_at - self.began,
            peak_memory=peak_memory(),
            estimates=self._estimates(),
            lookahead=self._lookahead,
        )

    def _named(self, top: tuple[tuple[int, float], ...]) -> tuple[TopLogprob, ...]:
        return tuple(TopLogprob(id, self._text.alone(id), logprob) for id, logprob in top)


def _rest_of(commit: Commit, begin: int) -> Commit:
    """A commit without its first tokens."""
    return attrs.evolve(
        commit,
        start=commit.start + begin,
        tokens=commit.tokens[begin:],
        num_from_draft=max(0, commit.num_from_draft - begin),
        likelihoods=commit.likelihoods[begin:],
    )


class Arrivals:
    """What is committed of a generation, as it arrives in trio's thread; but for `error` and `hang_up`, used there."""

    def __init__(
        self, session: Session, commits: trio.MemoryReceiveChannel[Commit], hang_up: Callable[[], None]
    ) -> None:
        """Of a session.

        Args:
            session: what the actors share with its reader.
            commits: where they arrive.
            hang_up: ends the session soon; may be called from any thread, at any moment, more than once.
        """
        self._session = session
        self._commits = commits
        self._ahead: deque[Commit] = deque()  # have arrived, and were looked at
        self.hang_up = hang_up

    @property
    def error(self) -> OutriderError:
        """Why nothing more comes of a text that is not over."""
        return self._session.error or RuntimeClosedError(STREAM_CLOSED)

    @property
    def is_open(self) -> bool:
        """Whether neither the session nor its runtime has ended with an error. May be read in any thread."""
        return self._session.error is None

    def resume(self, commits: Iterable[Commit]) -> None:
        """Have commits of an earlier session on the same text arrive first."""
        self._ahead.extend(commits)

    async def receive(self) -> Commit | None:
        """The next to arrive; None where nothing more comes."""
        if self._ahead:
            await trio.lowlevel.checkpoint()
            if self._ahead:
                return self._ahead.popleft()
        try:
            return await self._commits.receive()
        except trio.EndOfChannel:
            # Nothing more comes, but what was committed already is the consumer's. It may be the end of the text, which
            # is no failure: an actor that is still at work would take it for one, and drop what it has cached.
            if (unsent := self._take_unsent()) is not None:
                return unsent
            if self._session.error is None:
                self._session.error = RuntimeClosedError("the runtime was closed before the text was over")
            return None
        except trio.ClosedResourceError:
            return None  # closed by another task, while this one was waiting

    def there(self) -> list[Commit]:
        """All that have arrived, without waiting."""
        there = list(self._ahead)
        self._ahead.clear()
        while True:
            try:
                there.append(self._commits.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return there

    def look_ahead(self) -> list[Commit]:
        """All that was committed and not received; it is still to be received.

        Makes room for what comes next, but not each time: who looks and does not read has no more than twice the
        buffer wait for him.
        """
        if len(self._ahead) <= self._commits.statistics().max_buffer_size:
            self._ahead.extend(self.there())
        unsent = self._session.unsent
        return [*self._ahead, *([] if unsent is None else [unsent])]

    def rest(self) -> list[Commit]:
        """The same at the end, with what was not sent any more."""
        there = self.there()
        if (unsent := self._take_unsent()) is not None:
            there.append(unsent)
        return there

    def close(self) -> None:
        """Receive nothing more, and hang up; closing twice is closing once."""
        self._commits.close()
        self.hang_up()

    def _take_unsent(self) -> Commit | None:
        unsent, self._session.unsent = self._session.unsent, None
        return unsent
