"""The drafter at a rank of its own: does what rank 0 asks for, one request after another."""

from __future__ import annotations

import time
from typing import Any

import attrs
import mlx.core as mx

from actors.distributed.drafting.draft_values import (
    MAX_DRAWN_FROM,
    array_from,
    array_message,
    opened_from,
    outcome_fields,
)
from actors.drafters.draft_steps import DraftSteps, RewoundToCheckpoint, catch_up
from actors.model import CachedSequence, Model, ReusableSequence
from actors.sampling.logits_pipeline import LogitsPipeline, TokenHistory
from actors.trained.feature_input import FeatureInput
from protocol.cached_tokens import FeedPlan
from protocol.draft_budget import EMPTY_BUDGET
from protocol.draft_rank_messages import DraftAnswer, DraftFailure, DraftRequest, GivenFeatures, TextState
from protocol.errors import ProtocolError
from protocol.messages import Open


@attrs.frozen
class _ToldSession:
    """A session as far as rank 0 has told of it; see `DraftedText`."""

    opened: Open
    logits_pipeline: LogitsPipeline

    @classmethod
    def of(cls, fields: list[Any]) -> _ToldSession:
        opened = opened_from(fields)
        return cls(opened, LogitsPipeline(opened))


@attrs.define(eq=False)
class _Text:
    """A text, and the session that it is drafted for."""

    sequence: ReusableSequence
    session: _ToldSession | None = None


class DraftingModel:
    """A drafter and its texts, by the numbers that rank 0 has given them. To be used on the model's thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._texts: dict[int, _Text] = {}

    def take(self, given: GivenFeatures) -> None:
        """Take features of a text. Those of one that is closed are dropped."""
        if (text := self._texts.get(given.sequence)) is not None:
            assert isinstance(text.sequence, FeatureInput)
            text.sequence.give(given.start, array_from(given.values))

    def answer(self, request: DraftRequest) -> DraftAnswer | DraftFailure:
        """Do what is asked for. Whatever fails, rank 0 decides what that means for its session."""
        try:
            value = self._run(request.sequence, request.name, request.arguments)
        # Of whatever kind: this may be a model's own code.
        except Exception as error:
            return DraftFailure(request.number, type(error).__name__, str(error), self._state(request.sequence))
        return DraftAnswer(request.number, value, self._state(request.sequence))

    def _state(self, number: int) -> TextState | None:
        return None if (text := self._texts.get(number)) is None else _state_of(text.sequence)

    def _run(self, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "open":
            # The other model computes at another rank.
            sequence = self._model.open_sequence(beside_another=False).reusable
            assert sequence is not None
            self._texts[number] = _Text(sequence)
            return [sequence.needs_prefix_checkpoints, sequence.depends_on_passes]
        text = self._texts[number]
        sequence = text.sequence
        match name, arguments:
            case "take_step", (told, *rest):
                return self._take_step(_session_of(text, told), sequence, *rest)
            case "catch_up", (told, *rest):
                return self._catch_up(_session_of(text, told), sequence, *rest)
            case "feed", (tokens, num_logits):
                logits = sequence.feed(tuple(tokens), num_logits)
                return None if logits is None else array_message(logits)
            case "time_pass", (tokens,):
                mx.eval(sequence.feed(tuple(tokens), len(tokens)))
                return None
            case "prepare", (num_tokens, settled):
                return sequence.prepare(num_tokens, settled).value
            case "give_nothing", (num_tokens,):
                assert isinstance(sequence, FeatureInput)
                sequence.give_nothing(num_tokens)
                return None
            case "num_bytes", ():
                return sequence.num_bytes
            case (("rewind" | "check" | "reusable_length" | "reuse" | "forget" | "add_prefix_checkpoint"), _):
                return getattr(sequence, name)(*arguments)
            case "close", ():
                del self._texts[number]
                sequence.close()
                return None
            case _:
                raise ProtocolError(f"a drafting rank does not know the operation {name}{arguments}")

    def _take_step(
        self,
        session: _ToldSession,
        sequence: CachedSequence,
        keep: int,
        feed: list[int],
        trail: int,
        history_begin: int,
        history: list[int],
        settled: int,
        vocab_size: int,
        num_guesses: int,
    ) -> list[Any]:
        steps = DraftSteps(
            sequence, settled, session, vocab_size, num_guesses, time.perf_counter, False, MAX_DRAWN_FROM
        )
        # Rank 0 decides whether a step follows: the budget is a policy's, and the policy is there.
        taken = steps.begin(
            FeedPlan(keep, tuple(feed)), trail, TokenHistory(history_begin, tuple(history)), EMPTY_BUDGET
        )
        return outcome_fields(taken.result)

    def _catch_up(
        self,
        session: _ToldSession,
        sequence: CachedSequence,
        keep: int,
        feed: list[int],
        history_begin: int,
        history: list[int],
        vocab_size: int,
        num_rows: int,
    ) -> list[Any]:
        plan = FeedPlan(keep, tuple(feed))
        caught_up = catch_up(sequence, plan, session, vocab_size, num_rows, TokenHistory(history_begin, tuple(history)))
        if isinstance(caught_up, RewoundToCheckpoint):
            return [caught_up.length, []]
        return [None, caught_up]


def _session_of(text: _Text, told: list[Any] | None) -> _ToldSession:
    """The session that a text is drafted for, with what rank 0 has just told of it, if that is another one."""
    if told is not None:
        text.session = _ToldSession.of(told)
    assert text.session is not None
    return text.session


def _state_of(sequence: CachedSequence) -> TextState:
    if not isinstance(sequence, FeatureInput):
        return TextState(sequence.length)
    given, foreseen = sequence.num_given, sequence.foreseen
    return TextState(
        sequence.length,
        given,
        sequence.awaits_features,
        sequence.staleness,
        sequence.refreshes_at,
        None if foreseen is None else foreseen - given,
    )
