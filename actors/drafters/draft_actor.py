"""The drafter with a draft model: grows the lookahead tree, also while the target verifies, and proposes from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from actors.actor import ModelActor
from actors.drafters.draft_queue import DraftQueue, DraftRequest, lost_cache_read_again, num_rows
from actors.drafters.draft_session import DraftSession, RunningSteps
from actors.drafters.draft_steps import (
    CannotLookAhead,
    Drafted,
    DraftSteps,
    FollowingStep,
    RewoundToCheckpoint,
    StepOutcome,
    catch_up,
)
from actors.drafters.drafter import Drafter, MakePolicy, policy_by_settings
from actors.model import CachedSequence, CacheLostError, Model
from actors.prefill import prefill, prefill_committed
from actors.session import Session
from actors.workers.shared_jobs import SharedJobError
from actors.workers.worker import Job, Steps, Worker
from protocol.lookahead_tree import Node
from protocol.messages import Due, Message, Overdue, Ready, Verdict
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Event

# Most rows of logits that are computed when catching up. Each row is as wide as the vocabulary.
MAX_ROWS = 32
# A drafter is ready with at most this many unread committed tokens, which its next draft step reads.
MAX_BEHIND_WHEN_READY = 8
# A rest is prolonged this many rounds before its end, so that the target can decode a pass ahead all the time.
PROLONG_BEFORE_END = 2


class DraftActor(ModelActor[DraftSession], Drafter[DraftSession]):
    """Drafts one token a step, for all sessions that can share it.

    Attributes:
        chains: whether a step is launched before the token that it starts from is read back. None if the device
            decides: yes on a GPU, which computes while the next step is prepared.
    """

    name = "draft"
    rest_rounds = 8

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        target: trio.MemorySendChannel[Message],
        target_vocab_size: int,
        make_policy: MakePolicy = policy_by_settings,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        target_queue: TargetQueue | None = None,
        chains: bool | None = None,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """As `ModelActor`, and:

        Args:
            target: the target's mailbox.
            target_vocab_size: the width of its logits.
            make_policy: makes the policy that decides how far a session is drafted ahead.
            target_queue: the passes that wait and run at the target; None if it has only one session.
            chains: see the class.
            max_batch: most sessions that share one pass, >= 1.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._make_policy = make_policy
        self._target_queue = target_queue or TargetQueue(prices.verify)
        self.chains = chains
        self._draft_queue = DraftQueue(model, worker, max_batch)

    @property
    def is_alive(self) -> bool:
        """See `Actor.is_alive`. Also False while a job hangs, or the target has stopped waiting for a proposal."""
        return super().is_alive and not self._is_late_or_hanging()

    def _is_late_or_hanging(self) -> bool:
        return self.worker.is_hanging or any(session.is_late for session in list(self._sessions.values()))

    def _new_session(self, shared: Session) -> DraftSession:
        policy = self._make_policy(shared.opened.settings, self.prices)
        return DraftSession(shared, self.model.context_length, policy, self._receive)

    async def _run_session(self, session: DraftSession) -> None:
        if session.is_past_context:
            self._leave(session)
            return
        try:
            async with self._open_sequence(session, beside_another=True) as sequence:
                await self._draft_with(session, sequence)
        except Exception as error:  # of any kind: it costs speed, never text
            self._fail(session, error)

    async def _draft_with(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Read the prompt and draft, until the session is over or left."""
        try:
            await session.wait_for_features()
            await prefill(self.worker, sequence, session.cached_tokens, session.shared.opened, self.chunk_size)
            await self._hand_on(session, sequence)
            await session.index_committed()
            await self._draft_on(session, sequence)
        except Exception as error:  # of any kind: it costs speed, never text
            self._fail(session, error)
            session.is_broken = True
        # With the sequence, which the target may still give features: they decide what is dropped as stale.
        await session.until_left()

    async def _draft_on(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Draft, and send proposals, until the session is over."""
        while session.state.phase is not SessionPhase.CLOSED:
            if session.is_past_context:
                self._leave(session)
                return
            if not session.is_ready:
                await self._become_ready(session, sequence)
                continue
            if sequence.length < len(session.cached_tokens):
                await self._read_again(session, sequence)
                continue
            if session.state.phase is SessionPhase.RESTING and session.policy.should_catch_up(session.num_behind):
                with lost_cache_read_again():
                    await self._catch_up(session, sequence)
                continue
            node = self._next_expansion(session)
            if node is None:
                await session.change()
            else:
                await self._draft(session, sequence, node)

    async def _become_ready(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Read one pass of the committed text; if little of it is unread, tell the target to wait for proposals."""
        if session.num_behind > MAX_BEHIND_WHEN_READY:
            await self._read_committed(session, sequence)
            return
        self._say_ready(session)
        self._begin_turn(session)

    def _say_ready(self, session: DraftSession) -> None:
        session.is_ready = True
        if session.is_late:
            session.is_late = False
            self._note(session, "rejoin")
        self._target.send_nowait(Ready(session.id))

    def _leave(self, session: DraftSession) -> None:
        """See `Drafter._leave`. Goes on proposing what was drawn."""
        super()._leave(session)
        if not session.has_left and not session.is_ready:
            # As if the step that failed had succeeded. Otherwise the target would go on alone without what was drawn.
            self._say_ready(session)
        self._propose(session)

    async def _read_again(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Read what the cache has lost of the text, since a pass that it shared has failed."""
        session.cached_tokens.rewind(sequence.length)
        while session.num_behind > MAX_BEHIND_WHEN_READY:
            await self._read_committed(session, sequence)

    async def _read_committed(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Read one pass of the committed text. The last token is left to the draft step, which needs the logits."""
        committed = session.state.committed[:-1]
        await prefill_committed(
            self.worker, sequence, session.cached_tokens, session.shared.opened, committed, self.chunk_size
        )

    def _next_expansion(self, session: DraftSession) -> Node | None:
        now_s = self.worker.clock()
        return session.next_expansion(now_s, self._queue_slack_s(session, now_s))

    def _queue_slack_s(self, session: DraftSession, now_s: float) -> float:
        if session.state.phase is not SessionPhase.VERIFYING:
            return self._target_queue.remaining_s(now_s)
        if self._other_sessions_wait(session):
            # Their proposals come first: they are sure to be of use, and keep the target busy.
            return math.inf
        return self._target_queue.others_s(session.id)

    def _other_sessions_wait(self, session: DraftSession) -> bool:
        """Whether the target waits for the proposal of another session."""
        return any(
            other.state.phase is SessionPhase.PROPOSING and other.is_ready
            for other in self._sessions.values()
            if other is not session
        )

    async def _draft(self, session: DraftSession, sequence: CachedSequence, node: Node) -> None:
        """Draft after a node, and on down the drafter's own choices, as long as the policy wants nothing else."""
        self.prices.drafts_together = self._draft_queue.num_shared > 1
        plan = session.cached_tokens.plan(session.state.committed, session.tree.path(node))
        if plan.keep < len(session.cached_tokens):
            self._note(session, "rewind", num_tokens=len(session.cached_tokens) - plan.keep)
        draft_steps = DraftSteps(
            sequence,
            len(session.state.committed),
            session.shared,
            self._target_vocab_size,
            session.policy.num_guesses,
            self.worker.clock,
            self.chains,
        )
        now_s = self.worker.clock()
        draft_budget = session.policy.draft_budget(session.view(now_s, self._queue_slack_s(session, now_s)), node)
        history = session.shared.logits_pipeline.history(session.state.committed, session.tree.path(node))
        step = FollowingStep(plan, node.trail, history, draft_budget)
        try:
            if len(self._sessions) > 1 and self._draft_queue.num_shared > 1:
                await self._draft_together(session, draft_steps, step, node)
            else:
                await self._draft_by_itself(session, draft_steps, step, node)
        finally:
            session.running_steps = None

    async def _draft_by_itself(
        self, session: DraftSession, draft_steps: DraftSteps, step: FollowingStep, node: Node
    ) -> None:
        num_tokens = len(step.plan.feed)
        on_step = partial(self._on_step, session)
        steps = Steps("draft", step.of(draft_steps), on_step, session.id, num_tokens, session.state.round)
        session.running_steps = RunningSteps(steps)
        self._begin_step(session, session.running_steps, node, num_tokens)
        with lost_cache_read_again():
            await self.worker.run_steps(steps)

    async def _draft_together(
        self, session: DraftSession, draft_steps: DraftSteps, step: FollowingStep, node: Node
    ) -> None:
        """Draft in passes that other sessions share."""
        suspects = session.suspects
        request = DraftRequest(
            draft_steps, step, partial(self._on_step, session), session.id, session.state.round, suspects is not None
        )
        session.running_steps = RunningSteps(request)
        self._begin_step(session, session.running_steps, node, len(step.plan.feed))
        try:
            await self._draft_queue.run(request)
        except SharedJobError as error:
            # A session that makes a shared step fail makes its own fail, too, and is left to the target then.
            session.suspects = error.suspects
        except CacheLostError:
            pass  # see `lost_cache_read_again`
        else:
            if suspects is not None:
                suspects.acquit()
                session.suspects = None

    def _begin_step(self, session: DraftSession, running: RunningSteps, node: Node | None, num_tokens: int) -> None:
        running.node = node
        running.overlaps_target = session.state.phase is SessionPhase.VERIFYING
        running.expected_end_s = self.worker.clock() + self.prices.draft_s(
            num_tokens, beside_target=running.overlaps_target or self._target_queue.is_busy
        )
        running.steps.round = session.state.round

    def _on_step(
        self, session: DraftSession, job: Job[Any], outcome: StepOutcome, goes_on: bool, is_first: bool = True
    ) -> None:
        """Add the guesses of a finished draft step to the tree. A step that follows drafts after the first guess.

        Args:
            is_first: whether no other session that shared the step has been told of it.
        """
        running, next_node = session.running_steps, None
        assert running is not None
        node, running.node = running.node, None
        match outcome:
            case Drafted():
                # Asked at the end of the step, since a pass may have begun while the step waited or ran.
                beside_target = running.overlaps_target or self._target_queue.was_busy_since(job.began)
                if is_first:
                    self.prices.observe_draft_step(num_rows(job), job.began, job.ended, beside_target=beside_target)
                session.can_look_ahead = outcome.can_look_ahead
                session.cached_tokens.follow(outcome.fed)
                # A verdict may have dropped the node from the tree meanwhile.
                if node is not None and node.alive:
                    next_node = session.tree.expand(node, *session.calibrated(outcome.guesses))
            case RewoundToCheckpoint():
                # Nothing was fed. The next step may draft after the same node, with more tokens to feed.
                session.shared.counts.draft_replayed_tokens += outcome.wanted - outcome.length
                session.cached_tokens.rewind(outcome.length)
            case CannotLookAhead():
                session.can_look_ahead = False
                session.cached_tokens.rewind(outcome.length)
        self._propose(session)
        if goes_on:
            self._begin_step(session, running, next_node, 1)
            self._reconsider(session)

    def _reconsider(self, session: DraftSession) -> None:
        """End the draft steps that are under way if the policy now wants to draft after another node.

        The running step is not abandoned. The session's task asks the policy again once that step has ended.
        """
        if (running := session.running_steps) is None:
            return
        if running.node is None or running.node is not self._next_expansion(session):
            running.steps.interrupt()

    async def _catch_up(self, session: DraftSession, sequence: CachedSequence) -> None:
        """Read what the target committed in a rest, and calibrate with what the drafter would have guessed."""
        plan = session.cached_tokens.plan(session.state.committed, num_logits=0)
        num_rows = min(len(plan.feed), MAX_ROWS)
        history = session.shared.logits_pipeline.history(session.state.committed, num_rows=num_rows)
        call = partial(catch_up, sequence, plan, session.shared, self._target_vocab_size, num_rows, history)
        job = Job("draft", call, session.id, len(plan.feed), session.state.round)
        outcome = await self.worker.run(job)
        if isinstance(outcome, RewoundToCheckpoint):
            session.shared.counts.draft_replayed_tokens += outcome.wanted - outcome.length
            session.cached_tokens.rewind(outcome.length)
            return
        self.prices.observe_draft_step(len(plan.feed), job.began, job.ended, beside_target=True)
        session.cached_tokens.follow(plan)
        session.learn_caught_up(plan.keep + len(plan.feed) - len(outcome) + 1, outcome)

    def _begin_turn(self, session: DraftSession) -> None:
        """Begin the drafter's turn: propose, draft on, or leave some rounds to the target; or all, if it may go now."""
        if session.is_leaving:
            self._withdraw(session)
        if session.state.phase is SessionPhase.PROPOSING and session.policy.should_rest():
            self._rest(session)
        else:
            self._propose(session)

    def _propose(self, session: DraftSession, *, is_due: bool = False) -> None:
        now_s = self.worker.clock()
        if (proposal := session.next_proposal(now_s, self._queue_slack_s(session, now_s), is_due=is_due)) is None:
            return
        session.verdict_due_s = now_s + self._target_queue.remaining_s(now_s, 1 + len(proposal.tokens))
        self._send_proposal(session, proposal)

    def _receive(self, session: DraftSession, message: Verdict | Due | Overdue) -> None:
        match message:
            case Verdict():
                self._receive_verdict(session, message)
            case Due():
                self._receive_due(session, message)
            case Overdue():
                session.state.rest(message)
                self._reconsider(session)

    def _receive_due(self, session: DraftSession, due: Due) -> None:
        """Answer a target whose wait is over: propose what is drafted, and if late, catch up after the running step."""
        if due.is_late:
            # Also if this message has crossed a proposal.
            session.is_late = session.is_late or session.is_ready
            session.is_ready = False
        if session.state.round == due.round:
            self._propose(session, is_due=True)
        if session.is_leaving:
            self._leave(session)
        self._reconsider(session)

    def _receive_verdict(self, session: DraftSession, verdict: Verdict) -> None:
        """Advance over a verdict's commit, and begin the drafter's turn."""
        was_resting, proposal = session.state.phase is SessionPhase.RESTING, session.state.outstanding
        commit = session.state.apply(verdict)
        if commit is None:
            session.shared.counts.stale_proposals += 1
            return
        if commit.finish_reason is not None:
            self._reconsider(session)
            return
        num_proposed = len(proposal.tokens) if proposal is not None else 0
        session.learn(commit, num_proposed if verdict.num_judged is None else verdict.num_judged)
        was_hit = session.follow(commit)
        # A late drafter goes on proposing what it has drawn. It may be late because of that.
        if not session.is_ready and not (session.is_late and num_proposed > 0):
            return
        if was_resting:
            is_near_end = session.state.rests_until - session.state.round == PROLONG_BEFORE_END
            if is_near_end and session.policy.should_rest_on(session.num_behind):
                self._rest(session)
        else:
            now_s = self.worker.clock()
            was_dropped = session.drop_stale(now_s, self._queue_slack_s(session, now_s))
            if session.works_ahead:
                # Passes of other sessions hide a miss as well as a hit does.
                was_hidden = (was_hit and not was_dropped) or self._target_queue.is_busy
                self.prices.hit_rate.observe(float(was_hidden))
            self._count_hit(session, verdict, was_hit)
        self._begin_turn(session)
        self._reconsider(session)
