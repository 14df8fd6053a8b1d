"""The drafter with a draft model: grows the lookahead tree, also while the target verifies, and proposes from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import outcome

from actors.actor import Mailbox, ModelActor
from actors.drafters.draft_session import DraftSession
from actors.drafters.draft_steps import Drafted, DraftInput, DraftSteps
from actors.drafters.drafter import Drafter, MakePolicy, policy_by_settings
from actors.drafters.shared_steps import DraftPart, PartResult, PartResults, SharedSteps, num_rows
from actors.model import CacheLostError, Model
from actors.prefill import prefill_chunk
from actors.session import Session
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.worker import Job, JobError, Steps, Worker
from protocol.auto_policy import AutoPolicy
from protocol.draft_plan import MAX_UNREAD, Notice, Standing, Task, next_job, next_step
from protocol.errors import ProtocolError
from protocol.lookahead_policy import EMPTY_BUDGET, ChainPolicy
from protocol.lookahead_tree import Node
from protocol.messages import Close, Due, Message, Overdue, PromptFeatures, Ready, Rested, Verdict
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Event

MAX_ROWS = 32  # most rows of logits that are computed when catching up. Each row is as wide as the vocabulary.
MANY_TEXTS = 4  # with at least this many sessions, each begins with a rest in which its prompt is not read
# A rest is prolonged this many rounds before its end, so that the target can decode a pass ahead all the time.
PROLONG_BEFORE_END = 2
ROUNDS_WITHOUT_FEATURES = 2  # rounds that are left to the target if a drafter has no features to read the prompt with


class DraftActor(ModelActor[DraftSession], Drafter[DraftSession]):
    """Drafts one token a step, for all sessions that can share the step."""

    name = "draft"
    rest_rounds, max_rest_rounds = 8, 64

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        target: Mailbox,
        target_vocab_size: int,
        make_policy: MakePolicy = policy_by_settings,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        target_queue: TargetQueue | None = None,
        chains: bool | None = None,
        max_batch: int = MAX_BATCH,
        max_drawn_from: int | None = None,
    ) -> None:
        """As `ModelActor`. `make_policy` makes the policy of each session; for `max_drawn_from`, see `DraftSteps`.

        `chains` says whether a step is launched before the token that it starts from is read back. None: on a GPU, and
        on a CPU while no other model computes.
        """
        super().__init__(
            model, worker, on_event, prices, pass_price=prices.draft_alone, prefix_cache_bytes=prefix_cache_bytes
        )
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._make_policy = make_policy
        self._target_queue = target_queue or TargetQueue(prices.verify)
        self.chains = chains
        self._max_drawn_from = max_drawn_from
        self._steps = SharedSteps(model, max_batch)
        self._most_together = max_batch  # fewer after a shared step has failed, as if it had been too large
        prices.drafts_together = self._steps.num_shared > 1
        self._under_way: Steps[PartResults] | None = None
        self._running: dict[DraftSession, None] = {}  # the sessions of the running job
        self._num_jobs = self._num_read = 0

    @property
    def is_alive(self) -> bool:
        """Also False while a job hangs, or the target has stopped waiting for a proposal."""
        any_is_late = any(session.is_late for session in list(self._sessions.values()))
        return super().is_alive and not (self.worker.is_hanging or any_is_late)

    def _new_session(self, shared: Session) -> DraftSession:
        policy = self._make_policy(shared.opened.settings, self.prices)
        return DraftSession(shared, self.model.context_length, policy, self._target_vocab_size)

    def close_session(self, message: Close) -> None:
        """Earlier messages are taken in first: a verdict may add to the text that is kept."""
        self.take_messages()
        super().close_session(message)

    # --- the loop ---------------------------------------------------------------------------------

    async def _turn(self) -> None:
        await self._give_up_prefixes()
        if job := self._next_job():
            await self._work(*job)
        else:
            await self._wait()

    def _look_at(self, session: DraftSession) -> None:
        super()._look_at(session)
        if self._running:
            # The running job may be about to go on for other sessions, or may hang.
            self._take_in()
            if session.task is not None or (session in self._running and session.has_left):
                if self._under_way is not None:
                    self._under_way.interrupt()
                self.worker.watch()

    def _take_in(self) -> None:
        """Find the next tasks of the sessions that have changed, except for those in the running job."""
        waiting = [session for session in self._changed if session not in self._running]
        for session in waiting:
            del self._changed[session]
        for session in waiting:
            if session.id not in self._sessions:
                continue
            try:
                task = Task.CLOSE if session.has_left else None if session.is_leaving else self._next_task(session)
            except Exception as error:  # of any kind: it costs speed, never text
                self._give_up(session, error)
                task = Task.CLOSE if session.has_left else None
            if session.task is None:
                session.since, session.num_read_before = self._num_jobs, self._num_read
            session.task = task

    def _next_job(self) -> tuple[Task, list[DraftSession]] | None:
        # Whether to draft depends on the time, which has passed since the last look.
        self._changed.update((session, None) for session in self._sessions.values() if session.task is Task.DRAFT)
        while self._changed:  # a session that is looked at may change others
            self._take_in()
        waiting = [session for session in self._sessions.values() if session.task is not None]
        if len(waiting) > 1:
            most = min(self._steps.num_shared, self._most_together)
            found = next_job([each.waits(self._num_read) for each in waiting], most, self.chunk_size())
            waiting = [waiting[index] for index in found]
        if not waiting or (task := waiting[0].task) is None:
            return None
        return task, waiting

    async def _work(self, task: Task, sessions: Sequence[DraftSession]) -> None:
        if not task.is_brief:
            self._num_jobs += 1
        num_cached = len(sessions[0].cached_tokens)
        self._running.update(dict.fromkeys(sessions))
        for session in sessions:
            session.task = None
        try:
            if task is Task.DRAFT:
                await self._draft(sessions)
            elif task is Task.CLOSE:
                await self._let_go(sessions[0])
            else:
                await self._prepare(sessions[0], task)
                if not task.is_brief:
                    self._num_read += max(0, len(sessions[0].cached_tokens) - num_cached)
        except Exception as error:  # of any kind: it costs speed, never text
            for session in list(self._running):
                self._give_up(session, error)
        finally:
            self._running.clear()
            self._changed.update(dict.fromkeys(sessions))

    # --- what there is to do ----------------------------------------------------------------------

    def _next_task(self, session: DraftSession) -> Task | None:
        """The next job for a session that goes on, after all that needs no job. Never waits."""
        while True:
            if session.begins_with_rest is None and session.sequence is None and not session.is_past_context:
                session.begins_with_rest = self._begins_with_rest(session)
            match step := next_step(session.facts()):
                case Notice.LEAVE:
                    self._leave(session)
                case Notice.REST:
                    assert isinstance(session.policy, AutoPolicy)
                    session.policy.only_copies = True
                    session.copy()
                    self._say_ready(session)
                    self._rest(session)
                case Notice.REST_WITHOUT_FEATURES:
                    self._say_ready(session)
                    self._rest(session, ROUNDS_WITHOUT_FEATURES)
                case Notice.ANNOUNCE:
                    session.copy()
                    self._say_ready(session)
                    self._begin_turn(session)
                case Task.OPEN:
                    return step if self._may_open(session) else None
                case Task.DRAFT:
                    session.node = self._next_expansion(session)
                    return None if session.node is None else step
                case _:
                    return step

    def _begins_with_rest(self, session: DraftSession) -> bool:
        """Whether a session begins with a rest, in which its prompt is not read: drafting does not pay, or reading the
        prompts of many sessions would delay all. Not if the drafter reads features, which come with the prompt.
        """
        if not isinstance(session.policy, AutoPolicy) or isinstance(self.model, TrainedDrafter):
            return False
        # The target has not counted sessions that begin together yet.
        num_texts = min(sum(not each.has_left for each in self._sessions.values()), self._steps.num_shared)
        self.prices.num_texts = max(self.prices.num_texts, num_texts)
        return self.prices.num_texts >= MANY_TEXTS or session.policy.should_rest()

    def _rests_on(self, session: DraftSession, num_rounds: int) -> bool:
        """Whether to prolong a rest: drafting does not pay, or it would, but much of the text must be read first."""
        if session.policy.should_rest_on(session.num_behind, num_rounds):
            return True
        session.catches_up = session.num_behind > MAX_UNREAD
        return session.catches_up

    # --- the jobs ---------------------------------------------------------------------------------

    async def _prepare(self, session: DraftSession, task: Task) -> None:
        read: Job[Any] | None = None
        match task:
            case Task.OPEN:
                await self._open_sequence(session)
                session.hand_over_features()
            case Task.CATCH_UP:
                session.catches_up = False
                await self._catch_up(session)
            case Task.READ_PROMPT:
                opened = session.opened  # a trained drafter reads it with the features that have come
                read = await prefill_chunk(self.worker, session, opened.prompt[: opened.num_read], self.chunk_size)
            case Task.READ:
                # The last token is left to the draft step, which needs the logits.
                read = await prefill_chunk(self.worker, session, session.state.committed[:-1], self.chunk_size)
        if read is not None:
            self.prices.observe_draft_reading(read.began, read.ended)
            self._wake_waiting()

    async def _let_go(self, session: DraftSession) -> None:
        try:
            await self._put_away(session)
        except JobError as error:
            self._fail(session, error)
        finally:
            await super()._let_go(session)

    async def _draft(self, sessions: Sequence[DraftSession]) -> None:
        """Draft after each session's node, and then after the drafter's own choices, as far as the budgets allow."""
        self.prices.drafts_together = self._steps.num_shared > 1
        if len(self._sessions) <= self._most_together:
            self._most_together = self._steps.num_shared
        for session in sessions:
            try:
                session.part = self._part(session)
            except Exception as error:  # of any kind: its decisions concern no other session
                self._give_up(session, error)
        parts = [session.part for session in sessions if session.part is not None]
        if not parts:
            return
        num_tokens = sum(part.share.num_tokens for part in parts)
        ends_s = self._step_ends_s(num_tokens)
        for session in sessions:
            if session.part is not None:
                self._begin_step(session, session.part, session.node, ends_s)
        together = len(self._sessions) > 1 and self._steps.num_shared > 1
        only = parts[0] if len(parts) == 1 else None
        shares = tuple(part.share for part in parts)
        steps = self._under_way = Steps(
            "draft",
            partial(self._steps.together, parts) if together or only is None else partial(self._steps.by_itself, only),
            self._on_step,
            None if only is None else only.session,
            num_tokens,
            None if only is None else only.round,
            () if only is not None else shares,
        )
        # The other rows of a batch are computed in any case.
        is_alone = only is not None and (not together or only.alone or not only.draft_steps.sequence.is_row)
        try:
            await self.worker.run_steps(steps)
        except JobError as error:
            left = [session for session in sessions if session.part is not None]
            self._step_failed(left, error, is_alone=is_alone)
        finally:
            self._under_way = None
            for session in sessions:
                session.part = None

    def _part(self, session: DraftSession) -> DraftPart:
        node = session.node
        assert node is not None
        plan = session.cached_tokens.plan(session.state.committed, session.tree.path(node))
        if plan.keep < len(session.cached_tokens):
            self._note(session, "rewind", num_tokens=len(session.cached_tokens) - plan.keep)
        now_s = self.worker.clock()
        # A single step if it goes alone, so that it can share again at once; or if more may be forced after its token.
        draft_budget = EMPTY_BUDGET
        if not session.goes_alone and session.forced is None:
            view = session.view(now_s, self._queue_slack_s(session, now_s))
            draft_budget = session.policy.draft_budget(view, node)
        history = session.shared.logits_pipeline.history(session.state.committed, session.tree.path(node))
        start = DraftInput(plan, node.trail, history, draft_budget)
        decided_in = session.state.round, session.state.phase
        return DraftPart(session.id, self._draft_steps(session), start, decided_in, alone=session.goes_alone)

    def _draft_steps(self, session: DraftSession) -> DraftSteps:
        assert session.sequence is not None
        return DraftSteps(
            session.sequence,
            len(session.state.committed),
            session.shared,
            self._target_vocab_size,
            self.worker.clock,
            self.chains,
            self._max_drawn_from,
        )

    def _begin_step(
        self, session: DraftSession, part: DraftPart, node: Node | None, ends_s: tuple[float, float]
    ) -> None:
        part.node, part.round = node, session.state.round
        part.overlaps_target = session.state.phase is SessionPhase.VERIFYING
        part.expected_end_s = ends_s[part.overlaps_target or self._target_queue.is_busy]

    def _step_ends_s(self, num_rows: int) -> tuple[float, float]:
        """When a step that begins now should end: if the target waits, and if it works beside it."""
        now_s = self.worker.clock()
        alone_s = self.prices.draft_s(num_rows, beside_target=False)
        return now_s + alone_s, now_s + self.prices.draft_s(num_rows, beside_target=True)

    def _on_step(self, job: Job[Any], results: PartResults, goes_on: bool) -> None:
        self._price(job, results)
        num_going_on = sum(result.continues for result in results) if goes_on else 0
        next_ends_s = self._step_ends_s(num_going_on) if num_going_on else None
        for result in results:
            session = self._sessions[result.part.session]
            try:
                self._drafted(session, result, next_ends_s if result.continues else None)
            except CacheLostError:
                session.part = None  # the tokens that the cache has lost are read again
            except Exception as error:  # of any kind: it costs this session its drafter, and no other
                session.part = None
                self._give_up(session, error)
        for result in results:
            session = self._sessions[result.part.session]
            if session.part is None and goes_on:
                # It may need another step already, which it could share with the others.
                self._running.pop(session, None)
                self._look_at(session)
        self._end_if_nobody_goes_on()

    def _price(self, job: Job[Any], results: PartResults) -> None:
        """Learn from a finished step what steps cost, unless it drafted for nobody."""
        for result in results:
            if isinstance(result.outcome, outcome.Value) and result.outcome.value.guess is not None:
                # Asked at the end of the step, since a pass may have begun while the step waited or ran.
                beside_target = result.part.overlaps_target or self._target_queue.was_busy_since(job.began)
                self.prices.observe_draft_step(num_rows(job), job.began, job.ended, beside_target=beside_target)
                return

    def _drafted(self, session: DraftSession, result: PartResult, next_ends_s: tuple[float, float] | None) -> None:
        """Add the guess of a finished step to the tree. The next step, if one follows, drafts after that guess."""
        part, drafted = result.part, result.outcome.unwrap()
        node, part.node = part.node, None
        next_node: Node | None = None
        if drafted.guess is None:
            self._not_fed(session, drafted)
        else:
            session.can_look_ahead = drafted.can_look_ahead
            session.cached_tokens.follow(drafted.fed)
            session.goes_alone = False
            # A verdict may have dropped the node from the tree meanwhile.
            if node is not None and node.alive:
                choice = session.tree.expand(node, session.policy.drafted(drafted.guess))
                session.force_after(choice)
                # The model may have been run on this token already, when it was in the tree as a copy.
                next_node = None if choice.is_expanded else choice
        if next_ends_s is None:
            session.part = None
            self._propose(session)
            return
        # Then the policy has decided with the budget.
        is_decided = next_node is not None and part.decided_in == (session.state.round, session.state.phase)
        if not is_decided:
            self._propose(session)
        self._begin_step(session, part, next_node, next_ends_s)
        if not is_decided:
            self._reconsider(session)

    def _not_fed(self, session: DraftSession, drafted: Drafted) -> None:
        """Note what the cache holds. The next step may draft after the same node, with more tokens to feed."""
        session.can_look_ahead = session.can_look_ahead and drafted.can_look_ahead
        session.shared.counts.draft_replayed_tokens += drafted.num_lost
        session.cached_tokens.follow(drafted.fed)

    def _step_failed(self, sessions: Sequence[DraftSession], error: JobError, *, is_alone: bool) -> None:
        """After a shared step failed, have each session draft once alone; leave a session whose own step failed."""
        if not is_alone:
            self._most_together = max(1, len(sessions) // 2)
            for session in sessions:
                session.goes_alone = True
        elif sessions and not isinstance(error.__cause__, CacheLostError):
            self._most_together = self._steps.num_shared  # the size was not the cause
            self._give_up(sessions[0], error)

    def _end_if_nobody_goes_on(self) -> None:
        going_on = [each for each in self._running if each.part is not None and not each.part.is_interrupted]
        if self._under_way is not None and not going_on:
            self._under_way.interrupt()

    # --- turns and messages -----------------------------------------------------------------------

    def _say_ready(self, session: DraftSession) -> None:
        if session.is_late:
            self._note(session, "rejoin")
        session.standing = Standing.READY
        self._target.send_nowait(Ready(session.id))

    def _leave(self, session: DraftSession) -> None:
        """See `Drafter._leave`. Tokens that were drawn are still proposed."""
        super()._leave(session)
        if not session.has_left and not session.is_ready:
            # As if the failed step had succeeded. Otherwise the target would decode alone, without the drawn tokens.
            self._say_ready(session)
        self._propose(session)

    def _next_expansion(self, session: DraftSession) -> Node | None:
        now_s = self.worker.clock()
        return session.next_expansion(now_s, self._queue_slack_s(session, now_s))

    def _queue_slack_s(self, session: DraftSession, now_s: float) -> float:
        # A fixed lookahead does not use it.
        if isinstance(session.policy, ChainPolicy):
            return 0.0
        if session.state.phase is not SessionPhase.VERIFYING:
            return self._target_queue.remaining_s(now_s)
        others = (other for other in self._sessions.values() if other is not session)
        if any(other.state.phase is SessionPhase.PROPOSING and other.is_ready for other in others):
            # Their proposals come first: they are sure to be of use, and keep the target busy.
            return math.inf
        return self._target_queue.others_s(session.id)

    def _reconsider(self, session: DraftSession) -> None:
        """End the draft steps after the running one if the policy now wants to draft after another node."""
        if (part := session.part) is None or part.is_interrupted:
            return
        if part.node is None or part.node is not self._next_expansion(session):
            part.is_interrupted = True
            self._end_if_nobody_goes_on()

    async def _catch_up(self, session: DraftSession) -> None:
        """Read what the target committed in a rest, and calibrate with what the drafter would have guessed."""
        plan = session.cached_tokens.plan(session.state.committed, num_logits=0)
        num_rows = min(len(plan.feed), MAX_ROWS)
        history = session.shared.logits_pipeline.history(session.state.committed, num_rows=num_rows)
        call = partial(self._draft_steps(session).catch_up, plan, num_rows, history)
        job = Job("draft", call, session.id, len(plan.feed), session.state.round)
        try:
            guessed = await self.worker.run(job)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                raise
            return  # the tokens that the cache has lost are read again
        if isinstance(guessed, Drafted):
            self._not_fed(session, guessed)
            return
        self.prices.observe_draft_step(len(plan.feed), job.began, job.ended, beside_target=True)
        session.cached_tokens.follow(plan)
        session.learn_caught_up(plan.keep + len(plan.feed) - len(guessed) + 1, guessed)

    def _begin_turn(self, session: DraftSession) -> None:
        """Begin the drafter's turn: propose, draft on, rest for some rounds, or withdraw if it is leaving and may."""
        if session.is_leaving:
            self._withdraw(session)
        if session.state.phase is not SessionPhase.PROPOSING:
            return
        rests = session.only_copies or session.policy.should_rest()
        if isinstance(session.policy, AutoPolicy):
            session.policy.only_copies = rests
        session.only_copies = rests and (
            session.num_idle_rounds <= self._max_idle_rounds or session.has_worthwhile_copy(self.worker.clock())
        )
        if rests and not session.only_copies:
            self._rest(session)
        else:
            self._propose(session)

    def _propose(self, session: DraftSession, *, is_due: bool = False) -> None:
        now_s = self.worker.clock()
        if (proposal := session.next_proposal(now_s, self._queue_slack_s(session, now_s), is_due=is_due)) is None:
            return
        session.verdict_due_s = now_s + self._target_queue.remaining_s(now_s, 1 + len(proposal.tokens))
        self._send_proposal(session, proposal)

    def _receive(self, session: DraftSession, message: Message) -> None:
        # At once, whatever the model is doing: if the tree continues the text, the next proposal is ready.
        match message:
            case PromptFeatures():
                session.was_prompt_cached = message.features is None
                session.take_features(message.features)
            case Verdict():
                session.take_features(message.features)
                self._receive_verdict(session, message)
            case Rested():
                self._receive_verdict(session, message)
            case Due():
                self._receive_due(session, message)
            case Overdue():
                session.state.rest(message)
                self._reconsider(session)
            case _:
                raise ProtocolError(f"the drafter cannot handle {message!r}")

    def _receive_due(self, session: DraftSession, due: Due) -> None:
        """Answer a target that waits no longer: propose what is drafted. If late, get ready again after this step."""
        if due.is_late and session.is_ready:
            session.standing = Standing.LATE  # even if this message has crossed a proposal
        if session.state.round == due.round:
            self._propose(session, is_due=True)
        if session.is_leaving:
            self._leave(session)
        self._reconsider(session)

    def _receive_verdict(self, session: DraftSession, verdict: Verdict | Rested) -> None:
        was_resting, proposal = session.state.phase is SessionPhase.RESTING, session.state.outstanding
        if (commit := self._follow(session, verdict)) is None:
            return
        if commit.finish_reason is not None:
            self._reconsider(session)
            return
        num_judged = num_proposed = len(proposal.tokens) if proposal is not None else 0
        if isinstance(verdict, Verdict) and verdict.num_judged is not None:
            num_judged = verdict.num_judged
        was_hit = session.follow(commit, num_judged)
        # A late drafter still proposes what it has drawn: it may be late because of which tokens it drew.
        if not session.is_ready and not (session.is_late and num_proposed > 0):
            return
        if was_resting:
            is_near_end = session.state.rests_until - session.state.round == PROLONG_BEFORE_END
            if is_near_end:
                if session.has_worthwhile_copy(self.worker.clock()):
                    session.only_copies, session.num_idle_rounds = True, 0
                elif self._rests_on(session, session.num_rested):
                    self._rest(session)
        elif session.only_copies:
            if session.state.round % self.rest_rounds == 0:
                session.only_copies = self._rests_on(session, self.rest_rounds)
        else:
            if session.works_ahead:
                # A miss costs the target no more than a hit if it has passes of other sessions to do.
                self.prices.hit_rate.observe(float(was_hit or self._target_queue.is_busy))
            self._count_hit(session, verdict.round, was_hit)
        self._begin_turn(session)
        self._reconsider(session)
