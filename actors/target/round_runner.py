"""The round runner: a round's forward pass, from its proposal, or none, to its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import attrs

from actors.model import CachedSequence, CacheLostError
from actors.prefill import prefill_committed
from actors.sampling.logits_pipeline import TokenHistory
from actors.target.pass_queue import PassQueue, SharedPass
from actors.target.plain_decoder import PlainDecoder
from actors.target.target_session import TargetSession
from actors.target.verify import Verified, VerifyRequest
from actors.workers.shared_jobs import SharedJobError, Suspects
from actors.workers.worker import Job, JobError, Worker
from protocol.acceptance import Judgement
from protocol.backoff import Backoff
from protocol.cached_tokens import FeedPlan
from protocol.errors import OutriderError
from protocol.messages import Likelihood, Proposal, Verdict
from protocol.pass_plan import ReadyRound
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.target_queue import TargetQueue

T = TypeVar("T")


class RoundRunner:
    """Runs the rounds of all sessions on the target's model.

    A round with a proposal is verified, in a pass that rounds of other sessions may share. A round without one is
    decoded a pass ahead of the token that is read back, or shares a pass with other sessions' rounds.
    """

    def __init__(
        self,
        worker: Worker,
        prices: Prices,
        target_queue: TargetQueue,
        passes: PassQueue,
        chunk_size: PrefillChunkSize,
        sessions: Mapping[int, TargetSession],
        on_rewind: Callable[[TargetSession, int], None],
    ) -> None:
        """Of one target.

        Args:
            worker: of the target's model.
            prices: measured costs; the passes are added to them.
            target_queue: is told which rounds wait and run.
            passes: where rounds wait for a pass that they share.
            chunk_size: of prefill passes.
            sessions: the sessions that are under way, by id.
            on_rewind: called with a session and the number of tokens, >= 1, that its cache was rewound by.
        """
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._passes = passes
        self._chunk_size = chunk_size
        self._sessions = sessions
        self._on_rewind = on_rewind

    async def run(self, session: TargetSession, sequence: CachedSequence, proposal: Proposal | None) -> Verdict:
        """Run the pass of a session's round, and return its verdict.

        Args:
            session: whose round.
            sequence: its cache.
            proposal: the outstanding proposal, or None.

        Cancellation: a pass that runs is not abandoned; the call returns its verdict.

        Raises:
            JobError: a job has failed; the error is the cause.
            Whatever concerns this session alone, such as `NotANumberError`.
        """
        if proposal is None and not self._shares_passes(session):
            return await self._decode(session, sequence)
        return await self._verify(session, sequence, proposal or self._no_proposal(session))

    async def _verify(self, session: TargetSession, sequence: CachedSequence, proposal: Proposal) -> Verdict:
        if proposal.tokens and session.drafts.leaves_out():
            return await self._judge_one_by_one(session, sequence, proposal)
        plan = session.cached_tokens.plan(session.state.committed)
        settle = session.replay.should_settle(len(plan.feed) - 1, self._prices.verify, session.seconds_per_token)
        history = self._history(session, proposal)
        goes_on = not proposal.tokens and not session.shared.opened.settings.logprobs and self._stays_plain(session)
        request = VerifyRequest(sequence, plan, proposal, session.shared, history, settle, goes_on)
        # A cache that could not have undone the last pass most likely cannot undo this one.
        feeds_draft = not settle and not session.was_single_step
        num_needed = len(plan.feed) + (len(proposal.tokens) if feeds_draft and not proposal.reach else 0)
        ready = ReadyRound(num_needed, proposal.reach if feeds_draft else ())
        suspects = session.suspects if request.feeds_drafted else None
        try:
            verified, plan = await self._run_pass(session, request, ready, suspects)
        except JobError as error:
            # Errors of ours would be the same without drafted tokens. A pass that failed has emptied the cache; if it
            # has not, something failed that concerns this round alone.
            is_ours = isinstance(error.__cause__, OutriderError)
            if not request.feeds_drafted or is_ours or sequence.length > 0:
                raise
            if isinstance(error, SharedJobError):
                session.suspects = error.suspects
            else:  # Its drafted tokens were the cause, and go alone until they succeed.
                session.suspects = Suspects(0, _ignore)
                session.drafts.fail()
            return await self._judge_one_by_one(session, sequence, proposal)
        if suspects is not None:
            session.suspects, session.drafts = None, Backoff()
        session.was_single_step = verified.single_step and not settle
        judgement = verified.judgement
        num_drafted_fed = verified.width - len(plan.feed)
        session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + proposal.tokens[:num_drafted_fed]))
        wanted_length = proposal.start + (0 if verified.single_step else judgement.num_accepted)
        if len(session.cached_tokens) > verified.length:
            self._on_rewind(session, len(session.cached_tokens) - verified.length)
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

    async def _judge_one_by_one(self, session: TargetSession, sequence: CachedSequence, proposal: Proposal) -> Verdict:
        """Judge a proposal in the passes of plain decoding, none of which reads a token before it is accepted.

        A pass that fails here fails in plain decoding, too. Under the rejection rule, no token may be left out for what
        it is, or it would become rarer. Here all tokens are judged, as in one pass, until one is rejected, or a pass
        fails because of those before.
        """
        history, left, seconds = self._history(session, proposal), proposal, 0.0
        judgement, features = Judgement(0, None), None
        likelihoods: tuple[Likelihood, ...] = ()
        while left.tokens and judgement.token is None:
            accepted = proposal.tokens[: -len(left.tokens)]
            if sequence.length < len(session.cached_tokens):
                await self.catch_up(session, sequence, accepted)
            plan = session.cached_tokens.plan(session.state.committed, accepted)
            request = VerifyRequest(sequence, plan, left, session.shared, history, settle=False, one_by_one=True)
            try:
                verified, plan = await self._run_pass(session, request, ReadyRound(len(plan.feed)), accepted=accepted)
            except JobError:
                if not accepted or sequence.length > 0:
                    raise
                break  # the next round fails likewise, after the accepted tokens have been given
            session.cached_tokens.follow(plan)
            seconds += session.last_pass_s
            judgement = Judgement(len(accepted) + verified.judgement.num_accepted, verified.judgement.token)
            likelihoods += verified.likelihoods
            features = verified.features
            left = left.without_first()
        session.last_pass_s = seconds
        return Verdict(
            session.id,
            proposal.round,
            proposal.start,
            judgement.num_accepted,
            judgement.token,
            likelihoods=likelihoods,
            num_judged=len(proposal.tokens) - len(left.tokens),
            features=features,
        )

    async def _run_pass(
        self,
        session: TargetSession,
        request: VerifyRequest,
        ready: ReadyRound,
        suspects: Suspects | None = None,
        *,
        accepted: tuple[int, ...] = (),
    ) -> tuple[Verified, FeedPlan]:
        """Run a session's part in a pass, and repeat it as long as others may have made it fail.

        Args:
            session: whose part.
            request: the part.
            ready: what the pass queue sees of it.
            suspects: of a failure after which it is repeated alone; None if there was none.
            accepted: tokens after the committed text that are fed, too.

        Returns: the result, and the plan that was carried out.
        Raises: SharedJobError: the pass failed, others shared it, and the drafted tokens may be the cause.
        """
        has_failed, shared = False, None
        request = attrs.evolve(request, alone=suspects is not None)
        while shared is None:
            try:
                shared = await self._share_pass(session, request, ready)
            except (SharedJobError, CacheLostError) as error:
                if isinstance(error, SharedJobError):
                    if request.feeds_drafted:
                        raise
                    suspects = error.suspects
                    # If drafted tokens of others were the cause, those are left out now.
                    request = attrs.evolve(request, alone=has_failed or suspects is not None)
                    has_failed = True
                await self.catch_up(session, request.sequence, accepted)
                request = attrs.evolve(request, plan=session.cached_tokens.plan(session.state.committed, accepted))
        if suspects is not None:
            suspects.acquit()
        if shared.is_first and shared.is_typical:
            self._prices.observe_verify_pass(shared.num_rows, shared.began, shared.ended)
        session.verify_seconds += session.last_pass_s
        return shared.verified, request.plan

    async def _share_pass(self, session: TargetSession, request: VerifyRequest, ready: ReadyRound) -> SharedPass:
        """Run a session's part in the next pass."""
        deliver, ready_s = session.shared.deliver_nowait, self._worker.clock()
        shared = await self._passes.run(request, ready, meanwhile=deliver)
        session.shared.counts.wait(shared.began - ready_s)
        session.last_pass, session.last_pass_s = shared, shared.seconds / shared.num_rounds
        return shared

    def _history(self, session: TargetSession, proposal: Proposal) -> TokenHistory:
        """The tokens that processors see for the rows of a proposal."""
        return session.shared.logits_pipeline.history(
            session.state.committed, proposal.tokens, num_rows=1 + len(proposal.tokens)
        )

    async def _decode(self, session: TargetSession, sequence: CachedSequence) -> Verdict:
        """A round without a proposal: the drafter rests, or the session is not drafted."""
        state, shared = session.state, session.shared
        if session.decoder is None:
            session.decoder = PlainDecoder(sequence, shared.opened, shared.logits_pipeline)
        decoder = session.decoder
        plan = session.cached_tokens.plan(state.committed, num_logits=0 if decoder.is_ahead else 1)
        # Beside other sessions, the next round shares a pass with theirs.
        is_alone = len(self._sessions) == 1 or self._passes.num_shared == 1
        go_ahead = is_alone and self._stays_plain(session)
        history = shared.logits_pipeline.history(state.committed)
        call = partial(decoder.step, plan, history, state.next_position, go_ahead)
        job = Job("decode", call, session.id, 1, state.round)
        try:
            token, likelihoods, features = await self._run_alone(session, job)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                raise
            await self.catch_up(session, sequence)
            return await self._verify(session, sequence, self._no_proposal(session))
        session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + ((token,) if decoder.is_ahead else ())))
        return Verdict(
            session.id, state.round, state.next_position, 0, token, likelihoods=likelihoods, features=features
        )

    async def _run_alone(self, session: TargetSession, job: Job[T]) -> T:
        """Run a job that decodes a token of one session."""
        ready_s = self._worker.clock()
        self._target_queue.enter(session.id, 1)
        try:
            result = await self._worker.run(job, meanwhile=session.shared.deliver_nowait)
        finally:
            self._target_queue.leave(session.id, self._worker.clock())
        session.last_pass, session.last_pass_s = None, job.seconds
        session.shared.counts.wait(job.began - ready_s)
        return result

    def _stays_plain(self, session: TargetSession) -> bool:
        """Whether there is a round after this one, and it is the target's own as well, whatever this one's token is."""
        state = session.state
        rests_on = state.phase is not SessionPhase.RESTING or state.round + 1 < state.rests_until
        return rests_on and (state.remaining is None or state.remaining > 1)

    def _shares_passes(self, session: TargetSession) -> bool:
        """Whether a round without a proposal goes along with those of other sessions, instead of a pass ahead."""
        is_ahead = session.decoder is not None and session.decoder.is_ahead
        return not is_ahead and len(self._sessions) > 1 and self._passes.num_shared > 1

    def _no_proposal(self, session: TargetSession) -> Proposal:
        return Proposal(session.id, session.state.round, session.state.next_position, ())

    async def catch_up(self, session: TargetSession, sequence: CachedSequence, accepted: tuple[int, ...] = ()) -> None:
        """Feed what the cache has lost of the text, since a pass that it shared has failed.

        Args:
            accepted: drafted tokens that will be committed.
        """
        session.decoder = None  # it may be ahead in the cache that is lost
        session.cached_tokens.rewind(min(sequence.length, len(session.cached_tokens)))
        to_feed = (*session.state.committed, *accepted)[:-1]
        while len(session.cached_tokens) < len(to_feed):
            await prefill_committed(
                self._worker, sequence, session.cached_tokens, session.shared.opened, to_feed, self._chunk_size
            )


def _ignore() -> None:
    pass
