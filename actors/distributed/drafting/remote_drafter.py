"""A drafter on a rank of its own, as rank 0 sees it: a model and its texts, whose operations travel as messages.

Everything that waits for an answer is called on the drafter's thread at rank 0, which does nothing else. So the event
loop never waits for the other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, cast

import mlx.core as mx

from actors.distributed.draft_rank_link import DraftRankLink
from actors.distributed.drafting.draft_values import array_from, array_message, opened_fields, outcome_from
from actors.drafters.draft_steps import DraftedText, DraftSteps, RewoundToCheckpoint, StepOutcome, TakesSteps
from actors.model import CachedSequence, CacheLostError, FeedsEach, ReusableSequence, RewindMode
from actors.sampling.logits_pipeline import TokenHistory
from actors.trained.feature_input import FeatureInput
from protocol.cached_tokens import FeedPlan
from protocol.draft_rank_messages import (
    CloseDrafter,
    DraftAnswer,
    DrafterOpened,
    DraftFailure,
    DraftRequest,
    GivenFeatures,
    TextState,
)
from protocol.errors import NotANumberError, RankError, RewindError
from protocol.messages import Open

# Bytes of features in one message: a heartbeat waits no longer than for one.
MAX_FEATURE_BYTES = 4 * 1024**2

# Errors that mean something to whoever asks. Others are the drafting rank's own.
_ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (CacheLostError, RewindError, NotANumberError)
}


class RemoteDrafter(FeedsEach):
    """A drafter that another rank has loaded; see `Model`. To be used on one thread.

    Attributes:
        vocab_size: see `Model.vocab_size`.
        context_length: see `Model.context_length`.
        feature_layers: of the target, whose inputs the drafter reads; None if it reads none.
    """

    def __init__(self, link: DraftRankLink, opened: DrafterOpened) -> None:
        """Take over what a rank has loaded.

        Args:
            link: to the rank.
            opened: its answer.
        """
        self._link = link
        self.vocab_size = opened.vocab_size
        self.context_length = opened.context_length
        self.feature_layers = opened.feature_layers
        self._numbers = count()

    def open_sequence(self, *, beside_another: bool) -> CachedSequence:
        """The rank has its processor time for itself."""
        kind = RemoteSequence if self.feature_layers is None else RemoteFeatureSequence
        return kind(self, next(self._numbers))

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str:
        return "a drafter on a rank of its own reads one text at a time"

    @contextmanager
    def evaluating_layers(self) -> Iterator[None]:
        """No layer is here."""
        yield

    def give(self, features: GivenFeatures) -> None:
        """Send features ahead of the request that needs them. Raises: RankError: the drafting rank is lost."""
        self._link.send(features)

    def ask(self, name: str, sequence: int, *arguments: Any) -> DraftAnswer | DraftFailure:
        """Have an operation done, and wait for its end.

        Args:
            name, sequence, arguments: see `DraftRequest`.

        Raises: RankError: the drafting rank is lost.
        """
        request = DraftRequest(self._link.next_number(), name, sequence, arguments)
        self._link.send(request)
        # An earlier request may have been given up, because its answer was late.
        while (answer := self._link.receive()).number != request.number:
            continue
        return cast(DraftAnswer | DraftFailure, answer)

    def error(self, name: str, failure: DraftFailure) -> Exception:
        """The error of an operation that has failed, as in one process if it means something to whoever asked."""
        if (kind := _ERRORS.get(failure.kind)) is not None:
            return kind(failure.reason)
        return RankError(f"rank {self._link.rank} failed in {name}: {failure.kind}: {failure.reason}")

    def close(self) -> None:
        """Have the rank release the drafter; harmless if it is lost."""
        with suppress(RankError):
            self._link.send(CloseDrafter())


class RemoteSequence(ReusableSequence, TakesSteps):
    """A text of a `RemoteDrafter`; see `CachedSequence`."""

    needs_prefix_checkpoints = depends_on_passes = False

    def __init__(self, drafter: RemoteDrafter, number: int) -> None:
        """Open a text at the other rank.

        Args:
            drafter: whose text it is.
            number: which no other text has.
        """
        self._drafter = drafter
        self._number = number
        # The session that the rank knows of this text.
        self._opened: Open | None = None
        self._state = TextState(0)
        self.needs_prefix_checkpoints, self.depends_on_passes = cast(tuple[bool, bool], tuple(self._ask("open")))

    def _ask(self, name: str, *arguments: Any) -> Any:
        answer = self._drafter.ask(name, self._number, *arguments)
        # Also after a failure: features that came with the request may have made the text shorter.
        if answer.state is not None:
            self._state = answer.state
        if isinstance(answer, DraftFailure):
            raise self._drafter.error(name, answer)
        return answer.value

    @property
    def length(self) -> int:
        return self._state.length

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        logits = self._ask("feed", tokens, num_logits)
        return None if logits is None else array_from(logits)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Waits for the token."""
        logits = self.feed((cast(int, token.item()),), 1)
        assert logits is not None
        return logits

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode(self._ask("prepare", num_tokens, settled))

    def rewind(self, length: int) -> int:
        return cast(int, self._ask("rewind", length))

    def check(self, length: int) -> None:
        self._ask("check", length)

    def forget(self) -> None:
        self._ask("forget")

    def close(self) -> None:
        self._ask("close")

    @property
    def num_bytes(self) -> int:
        """The memory is the other rank's."""
        return cast(int, self._ask("num_bytes"))

    def add_prefix_checkpoint(self) -> None:
        self._ask("add_prefix_checkpoint")

    def reusable_length(self, num_common: int, num_read: int) -> int:
        return cast(int, self._ask("reusable_length", num_common, num_read))

    def reuse(self, length: int) -> None:
        self._ask("reuse", length)

    def take_step(self, draft_steps: DraftSteps, plan: FeedPlan, trail: int, history: TokenHistory) -> StepOutcome:
        arguments = draft_steps.settled, draft_steps.vocab_size, draft_steps.num_guesses
        told = self._news_of(draft_steps.shared)
        taken = self._ask("take_step", told, plan.keep, plan.feed, trail, history.begin, history.tokens, *arguments)
        return outcome_from(taken, plan)

    def catch_up(
        self, plan: FeedPlan, shared: DraftedText, vocab_size: int, num_rows: int, history: TokenHistory
    ) -> list[tuple[int, float]] | RewoundToCheckpoint:
        told = self._news_of(shared)
        length, guessed = self._ask(
            "catch_up", told, plan.keep, plan.feed, history.begin, history.tokens, vocab_size, num_rows
        )
        if length is not None:
            return RewoundToCheckpoint(length, plan.keep)
        return [(token, confidence) for token, confidence in guessed]

    def time_pass(self, tokens: tuple[int, ...]) -> None:
        self._ask("time_pass", tokens)

    def _news_of(self, shared: DraftedText) -> list[Any] | None:
        """What the rank does not know yet of a session; None if it knows the session."""
        if self._opened is shared.opened:
            return None
        self._opened = shared.opened
        return opened_fields(shared.opened)


class RemoteFeatureSequence(RemoteSequence, FeatureInput):
    """A text of a `RemoteDrafter` that reads features.

    They are given in any thread, and travel with the next operation. What is asked in any thread is answered by the
    text's last known state and the features that have come since.
    """

    def __init__(self, drafter: RemoteDrafter, number: int) -> None:
        """As `RemoteSequence`."""
        # (position of the first, (n, width)) in the order in which they have come; dropped once the answer to an
        # operation takes account of them.
        self._given: list[tuple[int, mx.array]] = []
        super().__init__(drafter, number)

    def _ask(self, name: str, *arguments: Any) -> Any:
        num_sent = len(self._given)
        for start, features in self._given[:num_sent]:
            rows = max(1, MAX_FEATURE_BYTES // max(1, features.nbytes // features.shape[0]))
            for first in range(0, features.shape[0], rows):
                values = array_message(features[first : first + rows])
                self._drafter.give(GivenFeatures(self._number, start + first, values))
        try:
            return super()._ask(name, *arguments)
        finally:
            del self._given[:num_sent]

    def give(self, start: int, features: mx.array) -> None:
        self._given.append((start, features))

    def give_nothing(self, num_tokens: int) -> None:
        self._ask("give_nothing", num_tokens)

    @property
    def length(self) -> int:
        refreshed = self._state.refreshes_at
        return self._state.length if refreshed is None or refreshed > self.num_given else refreshed

    @property
    def awaits_features(self) -> bool:
        return self._state.awaits_features and not self._given

    @property
    def num_given(self) -> int:
        return max(self._state.num_given, *(start + given.shape[0] for start, given in list(self._given)), 0)

    @property
    def staleness(self) -> int:
        return self._state.staleness

    @property
    def refreshes_at(self) -> int | None:
        return self._state.refreshes_at

    @property
    def foreseen(self) -> int | None:
        return None if self._state.num_foreseen is None else self.num_given + self._state.num_foreseen
