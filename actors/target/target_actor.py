"""The target: judges proposals, commits tokens, and decodes by itself when nobody drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from actors.actor import PREFIX_CACHE_BYTES, ModelActor
from actors.model import CachedSequence, Model
from actors.prefill import prefill
from actors.probe import PROBED, probe
from actors.session import Session
from actors.target.drafter_link import DrafterLink
from actors.target.pass_queue import PassQueue
from actors.target.round_runner import RoundRunner
from actors.target.scoring import score_prompt
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import OutriderError, ProtocolError, StreamFailedError
from protocol.messages import Close, PromptFeatures
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_BATCH
from protocol.target_queue import TargetQueue
from protocol.trace import Event


class TargetActor(ModelActor[TargetSession]):
    """Verifies proposals. The rounds that wait when the model becomes free share a forward pass.

    Each session has at most one job in the worker's queue, a chunk of its prompt or a round, and jobs run in the order
    in which they were queued.

    Attributes:
        drafter: the link to the drafter; without one until `DrafterLink.attach`.
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
        target_queue: TargetQueue,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """As `ModelActor`, and:

        Args:
            on_failure: called once the model has failed; no session can go on then.
            target_queue: shows the drafter which passes wait and run here.
            max_batch: most sessions that share one pass, >= 1.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._on_failure = on_failure
        self.drafter = DrafterLink(self._sessions, prices, partial(self._note, kind="overdue"))
        self._passes = PassQueue(
            model, worker, prices, target_queue, max_batch, can_hurry=self.drafter.can_hurry, hurry=self.drafter.hurry
        )
        self._rounds = RoundRunner(
            worker, prices, target_queue, self._passes, self.chunk_size, self._sessions, self._note_rewind
        )
        self._num_in_rounds = 0

    def _new_session(self, shared: Session) -> TargetSession:
        return TargetSession(shared)

    async def _run_session(self, session: TargetSession) -> None:
        opened, shared = session.shared.opened, session.shared
        try:
            # A text to score is read as drafted ones are, so that each can reuse what was read for the other.
            beside_another = self.drafter.has_model and (opened.drafted or opened.num_scored > 0)
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
            if session.state.phase is not SessionPhase.CLOSED:
                self.drafter.send(Close(session.id))

    async def _give_prompt_features(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Give a drafter that reads features those of the prompt."""
        if self.drafter.mailbox is None or not session.shared.opened.drafted:
            return
        if sequence.feature_arrays():
            call = partial(sequence.take_features, len(session.cached_tokens))
            session.prompt_features = await self.worker.run(Job("prefill", call, session.id))
        if session.prompt_features is not None:
            self.drafter.send(PromptFeatures(session.id, session.prompt_features))

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
            await self.drafter.wait_for_proposal(session)
            sequence.record_features(session.state.phase is not SessionPhase.UNDRAFTED)
            self.prices.num_texts = max(1, min(self._num_in_rounds, self._passes.num_shared))
            if sequence.length < len(session.cached_tokens):
                await self._rounds.catch_up(session, sequence)
            proposal = session.state.outstanding
            is_drafted = session.state.phase is not SessionPhase.UNDRAFTED
            verdict = await self._rounds.run(session, sequence, proposal)
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
        if is_drafted:
            self.drafter.send(verdict)
            # Not while a late drafter has something to propose: it may be late because of what it drew.
            if session.decodes_alone and (proposal is None or not proposal.tokens):
                self.drafter.leave_behind(session)
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

    def _note_rewind(self, session: TargetSession, num_tokens: int) -> None:
        self._note(session, "rewind", num_tokens=num_tokens)
