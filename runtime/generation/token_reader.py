"""The tokens of one generation: the commits as they arrive, and the tokens that are read from them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx
import trio

from actors.session import Session
from protocol.errors import OutriderError, RuntimeClosedError
from protocol.messages import Open
from protocol.prices import Estimates
from protocol.reprs import brief
from protocol.scores import TopLogprob
from protocol.session_state import Commit, Drafter, FinishReason
from protocol.statistics import Counts, Statistics
from runtime.generation.answers.message_reader import Reader
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText
from runtime.generation.tool_calls.events import Answer, AnswerEvent, CallEnded

STREAM_CLOSED = "this stream was closed; begin another with stream()"


@attrs.frozen
class Token:
    """One generated token.

    Attributes:
        id: in the target's vocabulary.
        text: the text that this token makes readable, possibly empty. The texts of a stream add up to the
            tokenizer's decoding of its ids, up to a stop string if one ended it, and without a part of a character
            at which `max_tokens` or the context has cut it off; an end-of-text token has no text.
            Text that may begin a stop string is withheld until it is known not to.
        index: 0 for the first generated token.
        drafted_by: "model" if a draft model or trained drafter had proposed it, "copy" if it was copied from earlier in
            the text, None if it is the target's own.
        finish_reason: None where the text goes on; "stop" at an end-of-text or stop token, or where a stop string is
            complete; "length" where `max_tokens` or the context is used up.
        stop_reason: the stop string, or the id among `stop_tokens`, that ended the text. None where the text goes on,
            where it ends by its length, and at an end-of-text token of the tokenizer that is not in `stop_tokens`.
        logprob: its log-probability, <= 0, under the target, after logits processors, before filters and temperature.
            None unless the setting `logprobs` asks for it.
        is_thinking: whether it belongs to the reasoning, tags included, by the tags that the tokenizer names.
        top_logprobs: the most probable tokens at its position, most probable first; as many as `logprobs` says.
        is_tool_call: whether it belongs to a tool call, markers included; for an opening marker, only its last token.
        events: the content, reasoning and tool calls that it adds, see `runtime.generation.tool_calls.events`; empty
            for a generation without tools.
    """

    id: int
    text: str
    index: int
    drafted_by: Drafter | None
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    stop_reason: str | int | None = None
    is_thinking: bool = False
    is_tool_call: bool = False
    events: tuple[AnswerEvent, ...] = ()

    @property
    def from_draft(self) -> bool:
        """Whether it had been proposed."""
        return self.drafted_by is not None

    @property
    def is_complete(self) -> bool:
        """Whether the model has ended the text with this token, an end-of-text or stop token."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    def __repr__(self) -> str:
        usual = {field.name: field.default for field in attrs.fields(Token) if field.name != "events"}
        told = {name: getattr(self, name) for name, default in usual.items() if getattr(self, name) != default}
        if self.top_logprobs:
            told["top_logprobs"] = told.pop("top_logprobs")  # the longest, which may be cut, at the end
        return brief("Token", told)


@attrs.define(eq=False)
class TokenReader:
    """Turns the commits of one generation into tokens: decodes them, marks the reasoning, and counts.

    It never waits, so it serves consumers in trio, in asyncio and in plain threads. Only one thread may use it.

    Attributes:
        opened: what opened the session.
        began: see `TokenStream`.
        answer: the tokens given so far, split into reasoning and answer.
        parts: the same as content, reasoning and tool calls; None for a generation without tools.
        finish_reason, stop_reason: as in `Token`, once the last token was given; None before.
    """

    opened: Open
    _counts: Counts
    _text: GrowingText
    answer: ReasoningTracker
    _clock: Callable[[], float] = attrs.field(kw_only=True)
    _estimates: Callable[[], Estimates] = attrs.field(kw_only=True)
    _calls: Reader | None = attrs.field(kw_only=True, default=None)  # None for a generation without tools
    began: float = attrs.field(init=False)
    parts: Answer | None = attrs.field(init=False)
    finish_reason: FinishReason | None = attrs.field(init=False, default=None)
    stop_reason: str | int | None = attrs.field(init=False, default=None)
    _given: list[int] = attrs.field(init=False, factory=list)
    _commit: Commit | None = attrs.field(init=False, default=None)
    _next_in_commit: int = attrs.field(init=False, default=0)
    _num_in_first_round: int = attrs.field(init=False, default=0)  # tokens of the first commit that were given
    _first_at: float | None = attrs.field(init=False, default=None)
    _last_at: float | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.began = self._clock()
        self.parts = None if self._calls is None else Answer()

    @property
    def has_more(self) -> bool:
        """Whether the current commit has tokens that were not given."""
        return self._commit is not None

    def begin_commit(self, commit: Commit) -> None:
        """Make a commit the current one; not while `has_more`."""
        self._commit, self._next_in_commit = commit, 0

    def next_token(self) -> Token:
        """Give the next token of the current commit; only while `has_more`."""
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
        self._num_in_first_round += len(self._given) == index
        self._counts.give(commit, index)
        likelihood = commit.likelihoods[index] if commit.likelihoods else None
        is_last, is_cut = finish_reason is not None, finish_reason == "length"
        text = self._text.add(commit.tokens[index], is_last=is_last, is_cut=is_cut)
        token = Token(
            id=commit.tokens[index],
            text=text,
            index=len(self._given),
            drafted_by=commit.drafted_by(index),
            finish_reason=finish_reason,
            logprob=None if likelihood is None else likelihood.logprob,
            top_logprobs=self._named(likelihood.top) if likelihood is not None else (),
            stop_reason=commit.stop_reason if is_last_in_commit else None,
            is_thinking=self.answer.add(commit.tokens[index], self._text.readable, text, self._text.tail),
        )
        if self._calls is not None and self.parts is not None:
            token = self._with_events(token, self._calls, self.parts)
        self._given.append(token.id)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, commit.stop_reason
        return token

    @property
    def tail(self) -> str:
        """The withheld text of the given tokens; see `TokenStream.tail`."""
        return self._text.tail

    def end(self) -> None:
        """Note that no more tokens are given."""
        is_cut_off = not self.answer.is_over and self.finish_reason is None
        if is_cut_off and self._calls is not None and self.parts is not None:
            self.parts.add(self._calls.finish(is_complete=False))
        self.answer.is_over = True

    def statistics(self, *, is_over: bool) -> Statistics:
        """Counts and rates so far. The time ends now, or with the last token if the text is over."""
        end = self._last_at if is_over and self._last_at is not None else self._clock()
        return self._counts.snapshot(
            elapsed=end - self.began,
            generation_seconds=end - self._first_at if self._first_at is not None else 0.0,
            num_untimed=self._num_in_first_round,
            time_to_first_token=None if self._first_at is None else self._first_at - self.began,
            peak_memory=mx.get_peak_memory(),
            estimates=self._estimates(),
            lookahead=self.opened.settings.lookahead if self.opened.drafted else 0,
        )

    def _with_events(self, token: Token, calls: Reader, parts: Answer) -> Token:
        was_in_block = calls.is_in_block
        events = calls.add(token.text)
        is_tool_call = was_in_block or calls.is_in_block or any(isinstance(event, CallEnded) for event in events)
        if token.finish_reason is not None:
            events += calls.finish(is_complete=token.is_complete)
        parts.add(events)
        return attrs.evolve(token, is_tool_call=is_tool_call, events=tuple(events))

    def _named(self, top: tuple[tuple[int, float], ...]) -> tuple[TopLogprob, ...]:
        return tuple(TopLogprob(id, self._text.alone(id), logprob) for id, logprob in top)


@attrs.define(eq=False)
class Arrivals:
    """The commits of a generation as they arrive. Only for trio's thread, except for `error` and `hang_up`.

    `hang_up` ends the session soon, and may be called more than once.
    """

    _session: Session
    _commits: trio.MemoryReceiveChannel[Commit]
    hang_up: Callable[[], None]

    @property
    def error(self) -> OutriderError:
        """Why no more commits come although the text is not over."""
        return self._session.error or RuntimeClosedError(STREAM_CLOSED)

    @property
    def is_open(self) -> bool:
        """Whether neither the session nor its runtime has ended with an error. May be read in any thread."""
        return self._session.error is None

    async def receive(self) -> Commit | None:
        """Wait for the next commit; None if no more come."""
        try:
            commit = await self._commits.receive()
        except trio.EndOfChannel:
            # The consumer still gets a commit that was not sent. It may be the end of the text, which must not count as
            # a failure: an actor that is still at work would drop its cached tokens.
            if (unsent := self._take_unsent()) is not None:
                return unsent
            if self._session.error is None:
                self._session.error = RuntimeClosedError("the runtime was closed before the text was over")
            return None
        except trio.ClosedResourceError:
            return None  # closed by another task, while this one was waiting
        self._session.make_room()
        return commit

    def receive_ready(self) -> list[Commit]:
        """Receive all commits that have arrived, without waiting."""
        ready: list[Commit] = []
        while True:
            try:
                ready.append(self._commits.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return ready
            self._session.make_room()

    def receive_rest(self) -> list[Commit]:
        """As `receive_ready`, once the session has ended; includes a commit that was not sent."""
        rest = self.receive_ready()
        if (unsent := self._take_unsent()) is not None:
            rest.append(unsent)
        return rest

    def close(self) -> None:
        """Receive no more commits and end the session; closing again does nothing."""
        self._commits.close()
        self.hang_up()

    def _take_unsent(self) -> Commit | None:
        unsent, self._session.unsent = self._session.unsent, None
        return unsent
