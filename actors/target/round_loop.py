"""The round loop: the one task that has the target's model work on the rounds of all texts.

It looks at the texts whose state has changed, decides on the next pass (`protocol.pass_plan`), and has it run while the
consumers are handed the tokens of the pass before (`actors.target.round_jobs`). All waiting is in one place: until
something changes, or until the earliest deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import trio

from actors.model import Model
from actors.target.drafter_link import DrafterLink
from actors.target.parts import Part, has_lost_tokens, is_plain, next_part
from actors.target.reading import Reading
from actors.target.round_jobs import RoundJobs
from actors.target.target_session import TargetSession
from actors.workers.worker import Worker
from protocol.pass_plan import ReadyRound, best_number, plan_pass
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue

# Longest wait for rounds that are about to be ready, and how much longer than expected each is waited for: in units of
# a pass of one row.
MAX_WAIT, PATIENCE = 1.0, 0.02
# The longest wait for all texts of a fixed lookahead, in units of the time in which all of them are drafted for.
PATIENCE_FOR_ALL = 3.0
# Where texts without drafts are divided among passes, one pass after at most so many has them all, since the price of
# that pass may be out of date.
MAX_DIVIDED = 16
# Turns of the event loop within which a drafter that has drafted ahead answers a verdict.
ANSWER_TURNS = 3


class RoundLoop:
    """The prompts and rounds of all texts of one target."""

    def __init__(
        self,
        model: Model,
        worker: Worker,
        prices: Prices,
        target_queue: TargetQueue,
        drafter: DrafterLink,
        chunk_size: PrefillChunkSize,
        max_batch: int,
        *,
        on_commit: Callable[[TargetSession, Commit], None],
        on_rewind: Callable[[TargetSession, int], None],
    ) -> None:
        """Make a loop without texts.

        Args:
            model, chunk_size, max_batch, on_commit, on_rewind: as for `RoundJobs`.
            worker: runs the passes.
            prices: of both models.
            target_queue: shows the drafter which passes wait and run.
            drafter: whose proposals are waited for.
        """
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._drafter = drafter
        self._jobs = RoundJobs(
            model,
            worker,
            prices,
            target_queue,
            drafter,
            chunk_size,
            max_batch,
            look_at=self.look_at,
            on_commit=on_commit,
            on_rewind=on_rewind,
        )
        self._reading = Reading(model, worker, chunk_size, lambda: self._jobs.num_shared, self._jobs.share)
        self._changed: dict[TargetSession, None] = {}
        # In the order in which they became ready: rounds, texts whose next round is `is_plain`, and all of them.
        self._ready: dict[TargetSession, Part] = {}
        self._plain: dict[TargetSession, None] = {}
        self._order: dict[TargetSession, None] = {}
        self._hurried: dict[TargetSession, None] = {}
        self._hurried_until_s = -math.inf
        # Passes in succession over some of the plain texts, and after how many of them all are tried in one.
        self._num_divided, self._max_divided = 0, 1
        self._waits_until_s = math.inf  # for further rounds, before the pass that could begin
        self._wakeup = trio.Event()

    # --- what others tell it ----------------------------------------------------------------------

    async def read(self, session: TargetSession, length: int) -> None:
        """Read a session's prompt up to a length, as far as it is not cached; the tokens to score with their scores.

        Cancellation: waits for the pass that reads some of it.

        Raises: JobError: the pass has failed because of this prompt, or of the model; the error is the cause.
        """
        if length <= len(session.cached_tokens):
            return
        session.reads_until, session.prompt_is_read = length, trio.Event()
        self._reading.prompts[session] = None
        self._wakeup.set()
        try:
            await session.prompt_is_read.wait()
        finally:
            self._reading.prompts.pop(session, None)
            with trio.CancelScope(shield=True):
                while session in self._reading.running:
                    await self._reading.pass_over.wait()
        if session.failure is not None:
            raise session.failure

    async def decode(self, session: TargetSession) -> None:
        """Run the rounds of a text whose prompt was read, until it is over.

        Cancellation: waits for the pass in which the text has a part.

        Raises:
            JobError: a job has failed because of this text, or of the model; the error is the cause.
            Whatever else concerns this text alone.
        """
        self._jobs.texts[session.id] = session
        session.shared.on_room = partial(self.look_at, session)
        self._jobs.begin_round(session)
        try:
            await session.text_over.wait()
        finally:
            self._forget(session)
            with trio.CancelScope(shield=True):
                await self._jobs.wait_for(session)
        if session.failure is not None:
            raise session.failure

    def look_at(self, session: TargetSession) -> None:
        """Look at a text whose state has changed. Never waits."""
        if session.id in self._jobs.texts:
            self._changed[session] = None
            self._wakeup.set()

    def _forget(self, session: TargetSession) -> None:
        del self._jobs.texts[session.id]
        self._changed.pop(session, None)
        self._plain.pop(session, None)
        self._order.pop(session, None)
        if self._ready.pop(session, None) is not None:
            self._target_queue.leave(session.id, self._worker.clock())
        self._hurried.pop(session, None)
        session.shared.on_room = None
        self._wakeup.set()

    # --- the loop ---------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def serve(self) -> None:
        """Run passes until cancelled.

        Cancellation: after the running pass.
        """
        while True:
            if self._reading.wanted:
                await self._reading.run_pass()
            wait_s = self._wait_s()
            if wait_s > 0.0 and self._reading.wanted:
                continue
            if wait_s > 0.0:
                self._jobs.deliver()
                with trio.move_on_after(wait_s):
                    await self._wakeup.wait()
                continue
            # Each of these has one turn before another chunk is read, also where each has a job for itself. Those that
            # become ready meanwhile may share their passes.
            due = {*self._ready, *self._plain}
            while not due.isdisjoint({*self._ready, *self._plain}) and self._wait_s() <= 0.0:
                due.difference_update(await self._work())

    def _wait_s(self) -> float:
        """Seconds until there may be something for the worker to do, unless something changes; 0 for now."""
        self._wakeup = trio.Event()
        self._take_in()
        now_s = self._worker.clock()
        deadline_s = self._time_out(now_s)
        if self._changed:
            self._take_in()
        if self._plain_group():
            return 0.0
        if self._jobs.num_shared > 1:
            for session in list(self._plain):
                self._make_round(session)
        if not self._ready:
            self._waits_until_s = math.inf
            return deadline_s - now_s
        first = next(iter(self._ready.values()))
        if first.alone or len(self._jobs.texts) == 1 or self._jobs.num_shared == 1 or _must_read_again(first):
            return 0.0
        return self._wait_for_more_s(now_s)

    def _take_in(self) -> None:
        """Look at the texts that have changed."""
        changed, self._changed = self._changed, {}
        for session in changed:
            if session in self._jobs.running or session in self._ready or session.text_over.is_set():
                continue
            self._plain.pop(session, None)
            was_blocked, session.is_blocked = session.is_blocked, session.shared.is_blocked
            if session.state.phase is SessionPhase.CLOSED:
                session.text_over.set()
            elif session.is_blocked:
                session.awaits_proposal_since_s = None
            else:
                if was_blocked:
                    self._jobs.begin_round(session)
                if session.state.phase is SessionPhase.PROPOSING:
                    self._await_proposal(session)
                else:
                    self._make_ready(session)

    def _await_proposal(self, session: TargetSession) -> None:
        if session.awaits_proposal_since_s is None:
            session.awaits_proposal_since_s = self._worker.clock()
            session.was_asked = False
        # Anew each time, since the drafter may have become ready.
        session.proposal_due_s = session.awaits_proposal_since_s + self._drafter.timeout_s(session)

    def _make_ready(self, session: TargetSession) -> None:
        session.awaits_proposal_since_s = None
        self._hurried.pop(session, None)
        assert session.sequence is not None
        if (features := session.sequence.features) is not None:
            features.want(session.state.phase is not SessionPhase.UNDRAFTED)
        self._order.pop(session, None)
        self._order[session] = None
        if is_plain(session):
            self._plain[session] = None
        else:
            self._make_round(session)

    def _plain_group(self) -> list[TargetSession]:
        """The texts that have the next pass without drafts; none if the next pass is another one."""
        texts = list(self._plain)
        if texts and self._jobs.num_shared == 1:
            first = next(text for text in self._order if text in self._plain or text in self._ready)
            return [first] if first in self._plain else []
        if self._all_are_plain:
            return texts[: self._best_number(min(len(texts), self._jobs.most_rounds))]
        # Those that are a pass ahead have its tokens before they take part in another.
        return [text for text in texts if text.plain_row is not None and text.plain_row.is_ahead]

    def _best_number(self, num_texts: int) -> int:
        """How many plain texts have the next pass, of those that could have one together."""
        must_try_all = self._num_divided >= self._max_divided
        return num_texts if must_try_all else best_number(num_texts, self._prices.verify)

    @property
    def _all_are_plain(self) -> bool:
        """Whether all texts that can go on do so without drafts."""
        if not self._plain or self._ready:
            return False
        return len(self._plain) == sum(not text.is_blocked for text in self._jobs.texts.values())

    def _make_round(self, session: TargetSession) -> None:
        now_s = self._worker.clock()
        self._plain.pop(session, None)
        self._prices.num_texts = max(1, min(len(self._jobs.texts), self._jobs.most_rounds))
        try:
            part = next_part(session, self._prices, now_s)
        except Exception as error:  # of any kind: it ends this text, and the others go on
            self._jobs.fail(session, error)
            return
        if session.ended_s is not None:
            session.turnaround_s.observe(now_s - session.ended_s)
            session.ended_s = None
        self._ready[session] = part
        self._target_queue.enter(session.id, part.ready.max_width)

    def _time_out(self, now_s: float) -> float:
        """Give up waiting for proposals that are due. Returns: when the next one is."""
        next_s = math.inf
        for session in self._jobs.texts.values():
            if session.awaits_proposal_since_s is None or session.was_asked:
                continue
            if session.proposal_due_s <= now_s:
                self._await_proposal(session)
            if session.proposal_due_s <= now_s:
                session.was_asked = True
                self._drafter.time_out(session)
                self._changed[session] = None
            else:
                next_s = min(next_s, session.proposal_due_s)
        return next_s

    # --- which rounds share the next pass ---------------------------------------------------------

    def _wait_for_more_s(self, now_s: float) -> float:
        """Seconds for which a pass waits for rounds that are about to be ready, as long as it gains by that."""
        if math.isinf(self._waits_until_s):
            self._waits_until_s = now_s + MAX_WAIT * self._prices.verify(1)
        if self._hurried and now_s < self._hurried_until_s:
            return self._hurried_until_s - now_s
        parts = self._sharing()
        if (wait_s := self._wait_for_all_s(parts, now_s)) > 0.0:
            return wait_s
        coming = self._coming(now_s)
        if not coming:
            return 0.0
        plan = plan_pass(
            [*(part.ready for part in parts), *coming.values()],
            self._prices.verify,
            self._jobs.most_rounds,
            max_wait_s=self._waits_until_s - now_s,
        )
        if plan.wait_s > 0.0:
            return plan.wait_s
        sessions = list(coming)
        planned = [sessions[i - len(parts)] for i in plan.num_drafted if i >= len(parts)]
        hurried = [session for session in planned if session not in self._hurried]
        if not hurried:
            return 0.0
        for session in hurried:
            self._drafter.hurry(session)
        self._hurried |= dict.fromkeys(hurried)
        self._hurried_until_s = now_s + max(PATIENCE * self._prices.verify(1), 1e-9)
        return self._hurried_until_s - now_s

    def _wait_for_all_s(self, parts: Sequence[Part], now_s: float) -> float:
        """Seconds for which a pass waits until all texts of a fixed lookahead are drafted for."""
        drafted_for = [
            session
            for session in self._jobs.texts.values()
            if session.awaits_proposal_since_s is not None and session.is_drafter_ready
        ]
        num_texts = len(parts) + len(drafted_for)
        lookaheads = {
            session.state.opened.settings.lookahead for session in (*(part.session for part in parts), *drafted_for)
        }
        lookahead = lookaheads.pop()
        if not drafted_for or lookaheads or lookahead == "auto" or num_texts > self._jobs.most_rounds:
            return 0.0
        if not self._prices.one_group_pays(num_texts, lookahead):
            return 0.0
        return parts[0].since_s + PATIENCE_FOR_ALL * self._prices.draft_together_s(num_texts, lookahead) - now_s

    def _coming(self, now_s: float) -> dict[TargetSession, ReadyRound]:
        """The rounds that are not ready yet, and are expected."""
        coming = {}
        # One that should be there already is waited for a little longer, since its moment is only a mean.
        patience_s = PATIENCE * self._prices.verify(1)
        for session in self._jobs.texts.values():
            if session in self._ready or session.ended_s is None or session in self._hurried:
                continue
            can_hurry = session.awaits_proposal_since_s is not None and self._drafter.can_hurry(session)
            due_s = session.ended_s + session.turnaround_s.value + patience_s - now_s
            if due_s > 0.0 or can_hurry:
                num_needed = session.last_ready.num_needed if session.last_ready.reach else 1
                coming[session] = ReadyRound(
                    num_needed,
                    session.last_ready.reach,
                    due_s=max(due_s, patience_s) if due_s > 0.0 else math.inf,
                    can_hurry=can_hurry,
                )
        return coming

    def _sharing(self) -> list[Part]:
        """The parts that could share the next pass, the first of those that are ready at the front."""
        return [part for part in self._ready.values() if not part.alone and not _must_read_again(part)]

    def _chosen(self) -> list[Part]:
        """The parts of the pass that begins now, cut to the drafted tokens that they feed."""
        first = next(iter(self._ready.values()))
        if first.alone or self._jobs.num_shared == 1:
            return [first]
        parts = self._sharing()
        if len(parts) == 1:
            # A text's own policy has decided what its pass is worth.
            return parts
        plan = plan_pass([part.ready for part in parts], self._prices.verify, self._jobs.most_rounds)
        for index, num_drafted in plan.num_drafted.items():
            parts[index].cut(num_drafted)
        return [parts[index] for index in plan.num_drafted]

    # --- the work ---------------------------------------------------------------------------------

    async def _decode_plainly(self, group: list[TargetSession]) -> None:
        """Passes over texts that nobody drafts for, until there is something else to do."""
        others = [text for text in self._plain if text not in group]
        was_divided = self._num_divided > 0
        # A pass that was started ahead would not be measured.
        goes_ahead = self._jobs.num_shared == 1 or (self._all_are_plain and not others and not was_divided)
        if others:
            self._num_divided += 1
        elif was_divided:
            self._num_divided, self._max_divided = 0, min(2 * self._max_divided, MAX_DIVIDED)
        self._plain = {}
        while group:
            going_on = await self._jobs.run_plain_pass(group, goes_ahead=goes_ahead)
            group = [text for text in going_on if text.id in self._jobs.texts]
            if not goes_ahead or others or self._ready or self._changed or self._reading.wanted:
                break
        self._plain = dict.fromkeys(text for text in others if text.id in self._jobs.texts)
        self._take_in()  # what became ready during the pass has its turn first
        for text in group:
            self._order.pop(text, None)
            self._order[text] = None
            if text.id in self._jobs.texts and text not in self._ready:
                self._plain[text] = None

    async def _work(self) -> list[TargetSession]:
        """Run the next job. Returns: the sessions that had a part in it."""
        if group := self._plain_group():
            await self._decode_plainly(group)
            return group
        first = next(iter(self._ready.values()))
        session = first.session
        self._waits_until_s = math.inf
        parts = [first]
        if _must_read_again(first):
            del self._ready[session]
            await self._jobs.read_again(session, first.sequence)
        else:
            parts = self._chosen()
            for part in parts:
                del self._ready[part.session]
            is_drafted = await self._jobs.run_pass(parts)
            for part in self._ready.values():
                if part.since_s < self._jobs.pass_began_s:
                    part.pass_over()
            if is_drafted and len(self._jobs.texts) > 1:
                for _ in range(ANSWER_TURNS):
                    await trio.lowlevel.checkpoint()
        return [part.session for part in parts]


def _must_read_again(part: Part) -> bool:
    """Whether a text has a job that reads it again, instead of a pass."""
    return has_lost_tokens(part.session, part.sequence)
