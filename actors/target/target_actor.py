"""The target: judges proposals, commits tokens, and decodes by itself when nobody drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs
import trio

from actors.actor import PREFIX_CACHE_BYTES, ModelActor
from actors.model import CachedSequence, CacheLostError, Model
from actors.prefill import prefill, prefill_committed
from actors.probe import PROBED, probe
from actors.sampling.logits_pipeline import TokenHistory
from actors.session import Session
from actors.target.pass_queue import PassQueue, SharedPass, SharedPassError
from actors.target.plain_decoder import PlainDecoder
from actors.target.scoring import score_prompt
from actors.target.target_session import TargetSession
from actors.target.verify import VerifyRequest
from actors.workers.worker import Job, JobError, Worker
from protocol.cached_tokens import FeedPlan
from protocol.deadlines import ROUNDS_ALONE, prompt_wait_s, proposal_wait_s
from protocol.errors import OutriderError, ProtocolError, StreamFailedError
from protocol.messages import Close, Due, Message, Overdue, PromptFeatures, Proposal, Verdict
from protocol.pass_plan import ReadyRound
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_BATCH, MAX_LOOKAHEAD
from protocol.target_queue import TargetQueue
from protocol.trace import Event

T = TypeVar("T")

# Checkpoints within which a proposal that exists already arrives: into the drafter's mailbox, and back.
CHECKPOINTS_PER_ANSWER = 4
# Rounds for which sessions share no pass after one that failed.
ROUNDS_APART = 16


class TargetActor(ModelActor[TargetSession]):
    """Verifies proposals. The rounds that wait when the model becomes free share a forward pass.

    Each session has at most one job in the worker's queue, a chunk of its prompt or a round, and jobs run in the order
    in which they were queued.
    """

    name = "target"

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        on_failure: Callable[[OutriderError], None],
        drafter: trio.MemorySendChannel[Message] | None = None,
        beside_another: bool = True,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        target_queue: TargetQueue | None = None,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """As `ModelActor`, and:

        Args:
            on_failure: called once the model has failed; no session can go on then.
            drafter: the drafter's mailbox.
            beside_another: whether the drafter, if there is one, has a model too.
            target_queue: shows the drafter which passes wait and run here.
            max_batch: most sessions that share one pass, >= 1.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._on_failure = on_failure
        self.drafter = drafter
        self.beside_another = beside_another
        self._target_queue = target_queue or TargetQueue(prices.verify, max_batch)
        self._num_in_rounds = 0
        self._passes = PassQueue(
            model, worker, prices, self._target_queue, max_batch, can_hurry=self._can_hurry, hurry=self._hurry
        )

    def _new_session(self, shared: Session) -> TargetSession:
        return TargetSession(shared)

    async def _run_session(self, session: TargetSession) -> None:
        opened, shared = session.shared.opened, session.shared
        try:
            # A text to score is read as drafted ones are, so that each can reuse what was read for the other.
            beside_another = self.beside_another and (opened.drafted or opened.num_scored > 0) and bool(self.drafter)
            async with self._open_sequence(session, beside_another=beside_another) as sequence:
                sequence.record_features(session.state.phase is not SessionPhase.UNDRAFTED)
                shared.counts.cached_tokens = len(session.cached_tokens)
                await prefill(self.worker, sequence, session.cached_tokens, opened, self.chunk_size)
                await self._give_prompt_features(session, sequence)
                await self._hand_on(session, sequence)
                await score_prompt(self.worker, sequence, session, self.chunk_size, self.model.vocab_size)
                while session.state.phase is not SessionPhase.CLOSED:
                    shared.unsent = await self._round(session, sequence)
                self._passes.forget(session.id)
                # The consumer takes an unsent commit from `shared`: waiting here would delay another session.
                shared.deliver_nowait()
                if session.state.finish_reason is not None:
                    self._note(session, "finish")
        except JobError as error:
            await self._end_or_break(session, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the consumer has gone, or the runtime has ended the session
        except Exception as error:  # of any kind: it ends this session, and the others go on
            self._fail(session, error)
        finally:
            self._passes.forget(session.id)
            shared.end()
            # A session that failed must not occupy the drafter, even before anybody has read that it failed.
            if session.state.phase is not SessionPhase.CLOSED and self.drafter is not None:
                self.drafter.send_nowait(Close(session.id))

    async def _give_prompt_features(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Give a drafter that reads features those of the prompt."""
        if self.drafter is None or not session.shared.opened.drafted:
            return
        if sequence.feature_arrays():
            call = partial(sequence.take_features, len(session.cached_tokens))
            session.prompt_features = await self.worker.run(Job("prefill", call, session.id))
        if session.prompt_features is not None:
            self.drafter.send_nowait(PromptFeatures(session.id, session.prompt_features))

    async def _end_or_break(self, session: TargetSession, error: JobError) -> None:
        """End a session one of whose jobs failed, and the runtime if the model does not work any more.

        A foreign exception may still be this session's doing: a prompt that does not fit into memory, a processor. So
        the model counts as failed only if it also fails at a text that has nothing to do with the session.
        """
        cause = error.__cause__
        if isinstance(cause, OutriderError):
            session.shared.end(cause)
            return
        try:
            # Also if nobody wants this session any more: the result matters to the others.
            with trio.CancelScope(shield=True):
                await self.worker.run(Job("probe", partial(probe, self.model), None, len(PROBED)))
        except JobError:
            self._on_failure(error)
        else:
            self._fail(session, cause if isinstance(cause, Exception) else error)

    def _fail(self, session: TargetSession, error: Exception) -> None:
        if isinstance(error, OutriderError):
            session.shared.end(error)
            return
        failure = StreamFailedError(
            f"this stream failed, and no other: {type(error).__name__}: {error}; the model itself works"
        )
        failure.__cause__ = error
        session.shared.end(failure)

    async def _round(self, session: TargetSession, sequence: CachedSequence) -> Commit:
        """Wait for a proposal, judge it, send the verdict to the drafter, and return the commit.

        The commit of the round before is delivered while the models work or are waited for: what a consumer does with
        a token takes time in the same thread.
        """
        await session.shared.wait_for_consumer()
        began, busy_before = self.worker.clock(), self.worker.busy_seconds
        self._num_in_rounds += 1
        try:
            await self._wait_for_proposal(session)
            sequence.record_features(session.state.phase is not SessionPhase.UNDRAFTED)
            self.prices.num_texts = max(1, min(self._num_in_rounds, self._passes.num_shared))
            if sequence.length < len(session.cached_tokens):
                await self._catch_up(session, sequence)
            proposal = session.state.outstanding
            is_drafted = session.state.phase is not SessionPhase.UNDRAFTED
            verdict = await (
                self._decode(session, sequence)
                if proposal is None and not self._shares_passes(session)
                else self._verify(session, sequence, proposal or session.no_proposal())
            )
            # A running job is not abandoned, so the session may have been closed meanwhile.
            await trio.lowlevel.checkpoint_if_cancelled()
            idle_s = max(0.0, self.worker.clock() - began - (self.worker.busy_seconds - busy_before))
            round_s = session.last_pass_s + idle_s / self._num_in_rounds
        finally:
            self._num_in_rounds -= 1
        verdict = session.with_stop(verdict)
        commit = session.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        self._note(session, "verdict", round=verdict.round, num_tokens=verdict.num_accepted, commit=commit)
        if is_drafted and self.drafter is not None:
            self.drafter.send_nowait(verdict)
            if session.decodes_alone and session.state.phase in (SessionPhase.PROPOSING, SessionPhase.RESTING):
                self._decode_alone(session)
        if commit.round > 0:  # the first round waits for the drafter's prefill
            if proposal is None:
                # The first plain round after a proposal cannot be a pass ahead, and its cost cannot be avoided.
                if session.was_plain:
                    self._price_plain_round(session, round_s)
            else:
                self.prices.observe_round(len(commit.tokens), round_s)
        session.was_plain = proposal is None
        return commit

    def _price_plain_round(self, session: TargetSession, round_s: float) -> None:
        shared = session.last_pass
        if shared is None:
            self.prices.observe_plain_round(round_s, session.last_pass_s)
            return
        # If another text of the pass had drafted tokens, the pass says nothing about plain decoding.
        if shared.num_rows == shared.num_rounds:
            # A pass that was started ahead has worked between the jobs, too.
            pass_s = shared.seconds if shared.is_typical else self.prices.verify(shared.num_rows)
            self.prices.observe_plain_round(round_s, pass_s / shared.num_rounds, num_texts=shared.num_rounds)

    async def _wait_for_proposal(self, session: TargetSession) -> None:
        """Wait until the drafter has proposed or left the round to the target, or the time is up."""
        for _ in range(CHECKPOINTS_PER_ANSWER):
            if session.state.phase is not SessionPhase.PROPOSING:
                return
            await trio.lowlevel.checkpoint()
        began, session.awaits_proposal = trio.current_time(), True
        while session.state.phase is SessionPhase.PROPOSING:
            # Computed anew each time, since the drafter may have become ready meanwhile.
            deadline = began + self._proposal_timeout_s(session)
            with trio.move_on_at(deadline):
                await session.shared.deliver()
                await session.change()
            is_late = trio.current_time() >= began + self._proposal_timeout_s(session)
            if session.state.phase is SessionPhase.PROPOSING and is_late:
                await self._time_out_proposal(session)
        session.awaits_proposal = False

    async def _time_out_proposal(self, session: TargetSession) -> None:
        """Ask the drafter for what it has by now, if it has read the prompt; decode alone afterwards."""
        session.shared.counts.draft_timeouts += 1
        self._note(session, "overdue")
        has_read_the_prompt = session.is_drafter_ready
        session.is_drafter_ready, session.decodes_alone = False, True
        if not has_read_the_prompt:
            self._decode_alone(session)
        elif self.drafter is not None:
            self.drafter.send_nowait(Due(session.id, session.state.round))
            while session.state.phase is SessionPhase.PROPOSING:  # for a few turns of the event loop
                await session.change()

    def _can_hurry(self, session_id: int) -> bool:
        """Whether a session's drafter can be asked for what it has drafted by now."""
        session = self._sessions.get(session_id)
        return (
            session is not None
            and session.state.phase is SessionPhase.PROPOSING
            and session.awaits_proposal
            and session.is_drafter_ready
            # A fixed lookahead is what the user wants, however long it takes.
            and session.shared.opened.settings.lookahead == "auto"
        )

    def _hurry(self, session_id: int) -> None:
        session = self._sessions[session_id]
        if self.drafter is not None:
            self.drafter.send_nowait(Due(session_id, session.state.round, is_late=False))

    def _proposal_timeout_s(self, session: TargetSession) -> float:
        """Seconds to wait for the drafter."""
        if not session.is_drafter_ready:
            return prompt_wait_s(self.prices)
        lookahead = session.shared.opened.settings.lookahead
        num_steps = MAX_LOOKAHEAD if lookahead == "auto" else max(1, lookahead)
        return proposal_wait_s(self.prices, num_steps, len(self._sessions))

    def _decode_alone(self, session: TargetSession) -> None:
        """Leave an overdue drafter behind for another round or two."""
        # Always for one round more than the one that begins, so that decoding can be a pass ahead.
        if session.state.rests_until - session.state.round < ROUNDS_ALONE:
            overdue = Overdue(session.id, session.state.round + ROUNDS_ALONE)
            if session.state.rest(overdue) and self.drafter is not None:
                self.drafter.send_nowait(overdue)

    async def _run_alone(self, session: TargetSession, job: Job[T]) -> T:
        """Run a job that decodes a token of one session."""
        ready_s = self.worker.clock()
        self._target_queue.enter(session.id, 1)
        try:
            result = await self.worker.run(job, meanwhile=session.shared.deliver_nowait)
        finally:
            self._target_queue.leave(session.id, self.worker.clock())
        session.last_pass, session.last_pass_s = None, job.seconds
        session.shared.counts.wait(job.began - ready_s)
        return result

    async def _catch_up(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Feed what the cache has lost of the text, since a pass that it shared has failed."""
        session.decoder = None  # it may be ahead in the cache that is lost
        session.cached_tokens.rewind(min(sequence.length, len(session.cached_tokens)))
        committed = session.state.committed
        while len(session.cached_tokens) < len(committed) - 1:
            await prefill_committed(
                self.worker, sequence, session.cached_tokens, session.shared.opened, committed[:-1], self.chunk_size
            )

    async def _share_pass(
        self, session: TargetSession, request: VerifyRequest, ready: ReadyRound, *, alone: bool = False
    ) -> SharedPass:
        """Run a session's part in the next pass."""
        deliver, ready_s = session.shared.deliver_nowait, self.worker.clock()
        shared = await self._passes.run(request, ready, meanwhile=deliver, alone=alone)
        session.shared.counts.wait(shared.began - ready_s)
        session.last_pass, session.last_pass_s = shared, shared.seconds / shared.num_rounds
        return shared

    async def _verify(self, session: TargetSession, sequence: CachedSequence, proposal: Proposal) -> Verdict:
        plan = session.cached_tokens.plan(session.state.committed)
        settle = session.replay.should_settle(len(plan.feed) - 1, self.prices.verify, session.seconds_per_token)
        history = self._history(session, proposal)
        goes_on = not proposal.tokens and not session.shared.opened.settings.logprobs and session.stays_plain
        request = VerifyRequest(sequence, plan, proposal, session.shared, history, settle, goes_on)
        # A cache that could not have undone the last pass most likely cannot undo this one.
        feeds_draft = not settle and not session.was_single_step
        num_needed = len(plan.feed) + (len(proposal.tokens) if feeds_draft and not proposal.reach else 0)
        ready = ReadyRound(num_needed, proposal.reach if feeds_draft else ())
        shared = None
        session.num_alone = max(0, session.num_alone - 1)
        while shared is None:
            try:
                shared = await self._share_pass(session, request, ready, alone=session.num_alone > 0)
            except (SharedPassError, CacheLostError) as error:
                # A part that makes a shared pass fail makes it fail alone, too, and ends its session then. If none
                # does, all of them together are too much, and would be again.
                session.num_alone = ROUNDS_APART if isinstance(error, SharedPassError) else session.num_alone
                await self._catch_up(session, sequence)
                request = attrs.evolve(request, plan=session.cached_tokens.plan(session.state.committed))
        verified, plan = shared.verified, request.plan
        session.was_single_step = verified.single_step and not settle
        if shared.is_first and shared.is_typical:
            self.prices.observe_verify_pass(shared.num_rows, shared.began, shared.ended)
        session.verify_seconds += session.last_pass_s
        judgement = verified.judgement
        num_drafted_fed = verified.width - len(plan.feed)
        session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + proposal.tokens[:num_drafted_fed]))
        wanted_length = proposal.start + (0 if verified.single_step else judgement.num_accepted)
        if len(session.cached_tokens) > verified.length:
            self._note(session, "rewind", num_tokens=len(session.cached_tokens) - verified.length)
            session.shared.counts.replayed_tokens += wanted_length - verified.length
            session.cached_tokens.rewind(verified.length)
        return Verdict(
            session.id,
            proposal.round,
            proposal.start,
            judgement.num_accepted,
            judgement.token,
            verified.single_step,
            settles=verified.single_step and settle,
            likelihoods=verified.likelihoods,
            num_judged=verified.num_judged,
            features=verified.features,
        )

    def _history(self, session: TargetSession, proposal: Proposal) -> TokenHistory:
        """The tokens that processors see for the rows of a proposal."""
        return session.shared.logits_pipeline.history(
            session.state.committed, proposal.tokens, num_rows=1 + len(proposal.tokens)
        )

    def _shares_passes(self, session: TargetSession) -> bool:
        """Whether a round without a proposal goes along with those of other sessions, instead of a pass ahead."""
        is_ahead = session.decoder is not None and session.decoder.is_ahead
        return not is_ahead and len(self._sessions) > 1 and self._passes.num_shared > 1

    async def _decode(self, session: TargetSession, sequence: CachedSequence) -> Verdict:
        """A round without a proposal: the drafter rests, or the session is not drafted."""
        state, shared = session.state, session.shared
        if session.decoder is None:
            session.decoder = PlainDecoder(sequence, shared.opened, shared.logits_pipeline)
        decoder = session.decoder
        plan = session.cached_tokens.plan(state.committed, num_logits=0 if decoder.is_ahead else 1)
        # Beside other sessions, the next round shares a pass with theirs.
        is_alone = len(self._sessions) == 1 or self._passes.num_shared == 1
        go_ahead = is_alone and session.stays_plain
        history = shared.logits_pipeline.history(state.committed)
        call = partial(decoder.step, plan, history, state.next_position, go_ahead)
        job = Job("decode", call, session.id, 1, state.round)
        try:
            token, likelihoods, features = await self._run_alone(session, job)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                raise
            await self._catch_up(session, sequence)
            return await self._verify(session, sequence, session.no_proposal())
        session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + ((token,) if decoder.is_ahead else ())))
        return Verdict(
            session.id, state.round, state.next_position, 0, token, likelihoods=likelihoods, features=features
        )
