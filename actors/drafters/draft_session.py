"""The state of one session at a draft model: its lookahead tree, and what to draft and to propose next."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.drafters.drafter import MAX_IDLE_ROUNDS, DrafterSession
from actors.drafters.shared_steps import DraftPart
from actors.session import Session
from actors.trained.feature_input import FeatureInput
from protocol.auto_policy import AutoPolicy
from protocol.draft_plan import MAX_BEHIND_WHEN_READY, Facts, Task, Waiting
from protocol.lookahead_policy import Policy, PolicyView
from protocol.lookahead_tree import Guess, Node
from protocol.messages import Features, Proposal
from protocol.session_state import SessionPhase
from protocol.settings import MAX_LOOKAHEAD


class DraftSession(DrafterSession):
    """The state of one session at a draft model."""

    def __init__(self, shared: Session, context_length: int | None, policy: Policy, target_vocab_size: int) -> None:
        super().__init__(shared, policy, target_vocab_size, has_model=True)
        self.num_idle_rounds = MAX_IDLE_ROUNDS + 1  # until something is copied
        self.context_length = context_length  # of the draft model; see `Model.context_length`
        # Whether the cache can drop uncommitted tokens. If not, only one token beyond the committed ones is guessed.
        self.can_look_ahead = True
        self.has_lost_tokens = False  # whether the cache has lost some of the text because a shared pass has failed
        self.catches_up = False  # whether the drafter is to read, during a rest, what the target has committed
        self.only_copies = False  # whether the model rests as drafting does not pay, and only copies are proposed
        self.works_ahead = False  # whether it drafts while its last proposal is verified
        self.was_prompt_cached = False  # whether the target had the whole prompt cached, and so has no features of it
        self.begins_with_rest: bool | None = None  # whether a rest, and no reading, comes first; None until decided
        self.task: Task | None = None  # the next job for it, as of the last look; None for none until something changes
        self.node: Node | None = None  # the node to draft after next, as of the last look
        self.part: DraftPart | None = None  # its part in the draft steps under way; None between them
        self.goes_alone = False  # whether its next draft step is its own, because one that it shared has failed
        self.since = self.num_read_before = 0  # jobs the drafter had done, and tokens it had read, when `task` arose
        self._reader: FeatureInput | None = None  # the sequence, if it reads features
        self._given: list[Features] = []  # until there is a sequence that reads them

    def waits(self, num_read: int) -> Waiting:
        """What it waits for, given the tokens that the drafter has read so far. `task` must not be None."""
        assert self.task is not None
        return Waiting(self.task, self.since, num_read - self.num_read_before, self.goes_alone)

    @property
    def goes_on_reading(self) -> bool:
        """Not while its prompt is left to the target."""
        leaves = self.has_left or self.is_leaving or self.is_past_context
        return super().goes_on_reading and not (leaves or self.begins_with_rest)

    def take_features(self, features: Features | None) -> None:
        """Take the target's features, if a message had some."""
        if features is not None:
            self._given.append(features)
            self.hand_over_features()

    def hand_over_features(self) -> None:
        """Hand the features that have come to the sequence, if it reads them."""
        if isinstance(self.sequence, FeatureInput):
            self._reader = self.sequence
            for features in self._given:
                self.sequence.give(features.start, features.values)
            self._given.clear()

    def notice_loss(self) -> bool:
        was_lost = super().notice_loss()
        self.has_lost_tokens = self.has_lost_tokens or was_lost
        return was_lost

    @property
    def awaits_features(self) -> bool:
        """Whether features of the prompt are missing: neither given by the target, nor cached with the prompt."""
        reader, num_read = self._reader, self.opened.num_read
        return reader is not None and reader.awaits_features and reader.num_given < max(1, num_read)

    @property
    def is_past_context(self) -> bool:
        """Whether the text has outgrown the drafter: the token at position n is drafted by feeding n tokens."""
        return self.context_length is not None and self.state.next_position > self.context_length

    @property
    def max_depth(self) -> int:
        if not self.can_look_ahead:
            return 1
        depth = MAX_LOOKAHEAD * 2 + 1
        if (remaining := self.state.remaining) is not None:
            depth = min(depth, remaining)
        if self.context_length is not None:
            depth = min(depth, self.context_length - self.state.next_position + 1)
        if self._reader is not None and (foreseen := self._reader.foreseen) is not None:
            depth = min(depth, foreseen - self.state.next_position)
        return max(0, depth)

    @property
    def num_behind(self) -> int:
        """Committed tokens that the draft model has not processed."""
        return len(self.state.committed) - len(self.cached_tokens)

    def facts(self) -> Facts:
        """What decides on the next step. To be called while no job of the session runs."""
        if self.sequence is not None:
            self.notice_loss()
            self.has_lost_tokens = self.has_lost_tokens and self.num_behind > MAX_BEHIND_WHEN_READY
            self.has_read_prompt = self.has_read_prompt or (
                len(self.cached_tokens) >= self.opened.num_read and not self.awaits_features
            )
        is_idle = self.only_copies or self.state.phase is SessionPhase.RESTING
        if not is_idle:
            self.catches_up = False
        elif self.is_ready and not self.catches_up:
            num_generated = min(self.num_behind, self.state.num_generated)
            self.catches_up = self.policy.should_catch_up(self.num_behind, num_generated)
        return Facts(
            turn=self.state.phase,
            standing=self.standing,
            is_leaving=self.is_leaving,
            is_past_context=self.is_past_context,
            is_open=self.sequence is not None,
            begins_with_rest=bool(self.begins_with_rest),
            awaits_features=self.awaits_features and not self.has_read_prompt,
            lacks_features=self.was_prompt_cached,
            has_read_prompt=self.has_read_prompt,
            has_lost_tokens=self.has_lost_tokens,
            is_idle=is_idle,
            catches_up=self.catches_up,
            num_behind=self.num_behind,
        )

    def next_expansion(self, now_s: float, queue_slack_s: float = 0.0) -> Node | None:
        """The node to draft after next, or None to do nothing until something changes."""
        may_draft = self.state.phase is SessionPhase.PROPOSING
        if self.state.phase is SessionPhase.VERIFYING:
            may_draft = self.works_ahead = self.policy.works_ahead
        if not (may_draft and self.is_ready) or self.only_copies:
            return None
        return self.policy.expansion(self.view(now_s, queue_slack_s))

    def next_proposal(self, now_s: float, queue_slack_s: float = 0.0, *, is_due: bool = False) -> Proposal | None:
        """The proposal to send now; None to draft on. If it `is_due`, what is drafted by now, even nothing."""
        if self.state.phase is not SessionPhase.PROPOSING or not (self.is_ready or self.is_late):
            return None
        may_draft = not (is_due or self.is_late or self.is_leaving or self.only_copies)
        nodes = self.policy.proposal(self.view(now_s, queue_slack_s, may_draft=may_draft))
        if nodes is None and not is_due:
            return None
        return self.proposal(nodes or [])

    def has_worthwhile_copy(self, now_s: float) -> bool:
        """Whether a copy could be proposed now without the model."""
        return isinstance(self.policy, AutoPolicy) and bool(self.policy.worth_proposing(self.view(now_s)))

    def learn_caught_up(self, start: int, guessed: Sequence[tuple[int, float]]) -> None:
        """Calibrate the drafter's confidence with what it would have guessed from a position on, and how surely."""
        assert isinstance(self.policy, AutoPolicy)
        by_match = self.settings.rule == "match"
        # The token after the last guess is not committed yet, so that guess is left out.
        for (token, raw), actual in zip(guessed, self.state.committed[start:], strict=False):
            if by_match:
                self.policy.calibration.observe(Guess(token, raw, raw=raw), token == actual)
            else:
                self.policy.calibration.observe_unjudged(raw)

    def view(self, now_s: float, queue_slack_s: float = 0.0, *, may_draft: bool = True) -> PolicyView:
        view = super().view(now_s, queue_slack_s, may_draft=may_draft)
        if (part := self.part) is None:
            return view
        return attrs.evolve(view, drafting_node=part.node, drafting_until_s=part.expected_end_s)

    def num_to_feed(self, node: Node) -> int:
        return len(self.cached_tokens.plan(self.state.committed, self.tree.path(node)).feed)
