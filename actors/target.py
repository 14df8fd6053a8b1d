"""The target: judges proposals, commits text, and decodes by itself where nobody drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import attrs
import mlx.core as mx
import trio

from actors.actor import PREFIX_CACHE_BYTES, ActorSession, ModelActor
from actors.model import CachedSequence, Model, RewindMode
from actors.prefill import prefill
from actors.probe import PROBED, probe
from actors.sampling.logit_check import LogitCheck
from actors.sampling.logits_pipeline import LogitsPipeline, Tail
from actors.session import Session
from actors.workers.worker import Job, JobError, Worker
from protocol.acceptance import (
    Judgement,
    choices,
    distribution,
    draw,
    judge_by_match,
    judge_by_rejection,
    likelihoods,
)
from protocol.cached_tokens import FeedPlan
from protocol.deadlines import ROUNDS_ALONE, prompt_wait_s, proposal_wait_s
from protocol.errors import OutriderError, ProtocolError, StreamFailedError
from protocol.messages import Close, Due, Likelihood, Message, Open, Overdue, Proposal, Ready, Rest, Verdict, Withdraw
from protocol.prices import Prices
from protocol.randomness import Purpose, key_for
from protocol.replay import ReplayDebt
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD
from protocol.target_queue import TargetQueue
from protocol.trace import Event

T = TypeVar("T")

# Turns of the event loop that an answer takes where it is there already: into the drafter's mailbox, and back.
TURNS_OF_AN_ANSWER = 4


class TargetSession(ActorSession):
    """The target's part in one session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.decoder: PlainDecoder | None = None
        self.replay = ReplayDebt()
        self.seconds = 0.0  # of verify passes
        self.pass_seconds = 0.0  # of the last pass
        self.was_plain = False  # the round before
        self.was_single_step = False  # the last verify pass: the cache could have undone nothing
        self.is_drafter_ready = False  # it has read the text, and its proposals can be waited for
        self.is_alone = False  # until the drafter is ready

    @property
    def seconds_per_token(self) -> float:
        """What a generated token has taken of the target's time so far; 0 before the first."""
        return self.seconds / self.state.num_generated if self.state.num_generated else 0.0

    def receive(self, message: Message) -> None:
        """Take a proposal, or the drafter's leave."""
        match message:
            case Proposal():
                if not self.state.propose(message):
                    self.session.counts.stale_proposals += 1
            case Ready():
                self.is_drafter_ready, self.is_alone = True, False
            case Rest():
                self.state.rest(message)
            case Withdraw():
                self.state.withdraw(message)
            case _:
                raise ProtocolError(f"the target was handed {message!r}")
        self.wake()


class TargetActor(ModelActor[TargetSession]):
    """Verifies what is proposed, one forward pass a round.

    Each session has at most one job in the worker's queue, a chunk of its prompt or a round, and jobs are done in the
    order in which they were handed in: so a job waits for at most one of each other session. What waits there when the
    model comes free is also what a forward pass over several sessions at once would be made of; for now it takes the
    first.
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
    ) -> None:
        """As `ModelActor`, and:

        Args:
            on_failure: called once the model has failed, after which no session can go on.
            drafter: the drafter's mailbox.
            beside_another: whether a drafter, if there is one, has a model too.
            turns: where the drafter sees what this has to do.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._on_failure = on_failure
        self.drafter = drafter
        self.beside_another = beside_another
        self._turns = target_queue or TargetQueue()
        self._num_in_rounds = 0

    def _join(self, session: Session) -> TargetSession:
        return TargetSession(session)

    async def _take_part(self, part: TargetSession) -> None:
        opened, session = part.session.opened, part.session
        try:
            async with self._line(part, beside_another=opened.drafted and self.beside_another) as sequence:
                session.counts.cached_tokens = len(part.cached_tokens)
                await prefill(self.worker, sequence, part.cached_tokens, opened, self.chunk_size)
                while part.state.phase is not SessionPhase.CLOSED:
                    session.unsent = await self._round(part, sequence)
                # What has no room is handed out from where it is, and waiting for that would keep another from here.
                self._deliver_now(session)
                if part.state.finish_reason is not None:
                    self._note(part, "finish")
        except JobError as error:
            await self._end_or_break(part, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the consumer has gone, or the runtime has ended the session
        except Exception as error:  # whatever it is: it came up in this session, and the others go on
            self._fail(part, error)
        finally:
            session.end()
            # A session that failed takes no place at the drafter, also while nobody has read that it did.
            if part.state.phase is not SessionPhase.CLOSED and self.drafter is not None:
                self.drafter.send_nowait(Close(part.id))

    async def _end_or_break(self, part: TargetSession, error: JobError) -> None:
        """End a session one of whose jobs failed; and the runtime, if the model does not work any more.

        An error that is not ours may be this session's doing all the same: a prompt that there is no memory for, a
        processor. So the model counts as failed only if it fails at a text that has nothing to do with the session.
        """
        cause = error.__cause__
        if isinstance(cause, OutriderError):
            part.session.end(cause)
            return
        try:
            # Also where nobody wants the session any more: others may.
            with trio.CancelScope(shield=True):
                await self.worker.run(Job("probe", partial(probe, self.model), None, len(PROBED)))
        except JobError:
            self._on_failure(error)
        else:
            self._fail(part, cause if isinstance(cause, Exception) else error)

    def _fail(self, part: TargetSession, error: Exception) -> None:
        if isinstance(error, OutriderError):
            part.session.end(error)
            return
        failure = StreamFailedError(
            f"this stream failed, and no other: {type(error).__name__}: {error}; the model itself works"
        )
        failure.__cause__ = error
        part.session.end(failure)

    async def _round(self, part: TargetSession, sequence: CachedSequence) -> Commit:
        """Wait for a proposal, judge it, tell the drafter, and return what was committed.

        What was committed before goes to the consumer once the models are at work again, or have to be waited for:
        what a consumer does with a token takes time in the same thread.
        """
        await self._wait_for_room(part.session)
        began, busy_before = self.worker.clock(), self.worker.busy_seconds
        self._num_in_rounds += 1
        try:
            await self._wait_for_proposal(part)
            proposal, is_drafted = (
                part.state.outstanding,
                part.state.phase is not SessionPhase.UNDRAFTED,
            )
            verdict = await (
                self._decode(part, sequence) if proposal is None else self._verify(part, sequence, proposal)
            )
            # A job that runs is not abandoned, so the session may have been closed under it.
            await trio.lowlevel.checkpoint_if_cancelled()
            idle = max(0.0, self.worker.clock() - began - (self.worker.busy_seconds - busy_before))
            seconds = part.pass_seconds + idle / self._num_in_rounds
        finally:
            self._num_in_rounds -= 1
        verdict = self._read(part, verdict)
        commit = part.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        self._note(part, "verdict", round=verdict.round, num_tokens=verdict.num_accepted, commit=commit)
        if is_drafted and self.drafter is not None:
            self.drafter.send_nowait(verdict)
            if part.is_alone and part.state.phase in (SessionPhase.PROPOSING, SessionPhase.RESTING):
                self._go_on_alone(part)
        if commit.round > 0:  # the first waits for the other's prefill
            if proposal is None:
                # The first after a proposal cannot work ahead, nor can what it costs be avoided.
                if part.was_plain:
                    self.prices.plain_decode_s.observe(seconds)
            else:
                self.prices.observe_round(len(commit.tokens), seconds)
        part.was_plain = proposal is None
        return commit

    async def _wait_for_proposal(self, part: TargetSession) -> None:
        """Wait until the drafter has proposed, or leaves the round to the target, or is waited for no longer."""
        for _ in range(TURNS_OF_AN_ANSWER):
            if part.state.phase is not SessionPhase.PROPOSING:
                return
            await trio.lowlevel.checkpoint()
        began = trio.current_time()
        while part.state.phase is SessionPhase.PROPOSING:
            # Looked up again each time, since the drafter may have become ready meanwhile.
            deadline = began + self._patience_s(part)
            with trio.move_on_at(deadline):
                await self._deliver(part.session)
                await part.change()
            if part.state.phase is SessionPhase.PROPOSING and trio.current_time() >= began + self._patience_s(part):
                await self._wait_no_longer(part)

    async def _wait_no_longer(self, part: TargetSession) -> None:
        """Have the drafter propose what it has, if it can have anything; go on alone afterwards."""
        part.session.counts.draft_timeouts += 1
        self._note(part, "overdue")
        has_read_the_prompt = part.is_drafter_ready
        part.is_drafter_ready, part.is_alone = False, True
        if not has_read_the_prompt:
            self._go_on_alone(part)
        elif self.drafter is not None:
            self.drafter.send_nowait(Due(part.id, part.state.round))
            while part.state.phase is SessionPhase.PROPOSING:  # a few turns of the event loop
                await part.change()

    def _patience_s(self, part: TargetSession) -> float:
        """Seconds for which the drafter is waited for."""
        if not part.is_drafter_ready:
            return prompt_wait_s(self.prices)
        lookahead = part.session.opened.settings.lookahead
        num_steps = MAX_LOOKAHEAD if lookahead == "auto" else max(1, lookahead)
        return proposal_wait_s(self.prices, num_steps, len(self._parts))

    def _go_on_alone(self, part: TargetSession) -> None:
        """Leave a drafter that is overdue behind for another round or two."""
        # Always for a round more than the one that begins, so that decoding can be a pass ahead.
        if part.state.rests_until - part.state.round < ROUNDS_ALONE:
            overdue = Overdue(part.id, part.state.round + ROUNDS_ALONE)
            if part.state.rest(overdue) and self.drafter is not None:
                self.drafter.send_nowait(overdue)

    async def _pass(self, part: TargetSession, job: Job[T], expected_s: float) -> T:
        """Have a round's job done in its turn; several that wait could be one pass, if lines could be fed together."""
        self._turns.enter(part.id, expected_s, self.worker.clock())
        try:
            result = await self.worker.run(job, meanwhile=partial(self._deliver_now, part.session))
        finally:
            self._turns.leave(part.id, self.worker.clock())
        part.pass_seconds = job.seconds
        return result

    def _read(self, part: TargetSession, verdict: Verdict) -> Verdict:
        """The verdict, which ends the text where a stop string does.

        In the verdict, so that the drafter learns of it at once, and as it does of a stop token.
        """
        if part.session.find_stop is None:
            return verdict
        return attrs.evolve(verdict, stop=part.session.find_stop(part.state.preview(verdict)))

    async def _wait_for_room(self, session: Session) -> None:
        """Wait for a slow consumer, if what was committed last has no room."""
        statistics = session.commits.statistics()
        if statistics.current_buffer_used >= statistics.max_buffer_size:
            await self._deliver(session)

    async def _deliver(self, session: Session) -> None:
        """Give the consumer what was committed and is not given yet; waits for room."""
        if session.unsent is not None:
            await session.commits.send(session.unsent)
            session.unsent = None

    def _deliver_now(self, session: Session) -> None:
        """The same, where there is room; never waits."""
        if session.unsent is None:
            return
        try:
            session.commits.send_nowait(session.unsent)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # which the next `_deliver` will meet
        session.unsent = None

    async def _verify(self, part: TargetSession, sequence: CachedSequence, proposal: Proposal) -> Verdict:
        plan = part.cached_tokens.plan(part.state.committed)
        settle = part.replay.should_settle(len(plan.feed) - 1, self.prices.verify, part.seconds_per_token)
        job = Job(
            "verify",
            partial(verify, sequence, plan, proposal, part.session, self._tail(part, proposal), settle=settle),
            part.id,
            len(plan.feed) + (0 if settle else len(proposal.tokens)),
            proposal.round,
            lambda verified: verified.width,
        )
        # A cache that could undo nothing in the last pass most likely cannot in this one.
        expected_width = len(plan.feed) if part.was_single_step else job.num_tokens
        verified = await self._pass(part, job, self.prices.verify(expected_width))
        part.was_single_step = verified.single_step and not settle
        self.prices.observe_verify_pass(verified.width, job.began, job.ended)
        part.seconds += job.seconds
        judgement = verified.judgement
        part.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + proposal.tokens[: verified.width - len(plan.feed)]))
        wanted = proposal.start + (0 if verified.single_step else judgement.num_accepted)
        if len(part.cached_tokens) > verified.length:
            self._note(part, "rewind", num_tokens=len(part.cached_tokens) - verified.length)
            part.session.counts.replayed_tokens += wanted - verified.length
            part.cached_tokens.rewind(verified.length)
        return Verdict(
            part.id,
            proposal.round,
            proposal.start,
            judgement.num_accepted,
            judgement.token,
            verified.single_step,
            settles=verified.single_step and settle,
            likelihoods=verified.likelihoods,
        )

    def _tail(self, part: TargetSession, proposal: Proposal) -> Tail:
        """The text that the logits of a proposal's tokens are shaped by."""
        return part.session.logits_pipeline.tail(
            part.state.committed, proposal.tokens, num_rows=1 + len(proposal.tokens)
        )

    async def _decode(self, part: TargetSession, sequence: CachedSequence) -> Verdict:
        """A round without a proposal: the drafter rests, or nobody drafts any more."""
        state = part.state
        if part.decoder is None:
            part.decoder = PlainDecoder(sequence, part.session.opened, part.session.logits_pipeline)
        plan = part.cached_tokens.plan(state.committed, num_logits=0 if part.decoder.is_ahead else 1)
        # Only where the next token is the target's own as well, whatever this one is.
        goes_on = state.phase is not SessionPhase.RESTING or state.round + 1 < state.rests_until
        go_ahead = goes_on and (state.remaining is None or state.remaining > 1)
        tail = part.session.logits_pipeline.tail(state.committed)
        step = partial(part.decoder.step, plan, tail, state.next_position, go_ahead)
        expected_s = self.prices.plain_decode_s.value or self.prices.verify(1)
        token, likelihoods = await self._pass(part, Job("decode", step, part.id, 1, state.round), expected_s)
        part.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + ((token,) if part.decoder.is_ahead else ())))
        return Verdict(part.id, state.round, state.next_position, 0, token, likelihoods=likelihoods)


# --- on the target's thread -----------------------------------------------------------------------


@attrs.frozen
class Verified:
    """The outcome of one verify pass.

    Attributes:
        judgement: what stands, and what comes next.
        width: tokens that went through the model.
        length: tokens that the cache holds afterwards.
        single_step: whether only committed tokens were fed.
        likelihoods: of what stands and what comes next, where the session asks for them.
    """

    judgement: Judgement
    width: int
    length: int
    single_step: bool
    likelihoods: tuple[Likelihood, ...] = ()


def verify(
    sequence: CachedSequence, plan: FeedPlan, proposal: Proposal, session: Session, tail: Tail, *, settle: bool
) -> Verified:
    """One forward pass over what is not in the cache yet and the proposal; then the cache is put right.

    Where the cache could not lose the drafted tokens again, they are not fed (the N=1 fallback): the
    pass predicts one token, and the first drafted one is compared with it. So it is where replay has become
    dear enough to settle it.

    What was accepted before a row that no token can be chosen from stands, as it would where nobody drafts.

    Raises: NotANumberError, ProcessorError: there is no such row before it.
    """
    width = len(plan.feed) + len(proposal.tokens)
    single_step = bool(proposal.tokens) and (settle or sequence.prepare(width, proposal.start) is RewindMode.SINGLE)
    drafted = proposal.tokens[:1] if single_step else proposal.tokens
    fed = () if single_step else drafted
    logits = sequence.feed(plan.feed + fed, 1 + len(fed))
    assert logits is not None
    processed = session.logits_pipeline.process(logits, tail, proposal.start)
    logit_check = LogitCheck.of(logits, processed)
    filtered = session.logits_pipeline.filter(processed, proposal.start)
    judgement = judge(filtered, drafted, proposal, session, logit_check.arrays())
    num_fed = 0 if single_step else judgement.num_accepted
    if judgement.num_accepted + (judgement.token is not None) > (num_sound := logit_check.num_sound()):
        if num_sound == 0:
            logit_check.check(0, proposal.start, "target")
        # The next round asks for the row that is missing, and so feeds the token before it again.
        judgement, num_fed = Judgement(num_sound, None), num_sound - 1
    tokens = drafted[: judgement.num_accepted] + (() if judgement.token is None else (judgement.token,))
    likely = asked_likelihoods(processed, tokens, session.opened)
    length = sequence.rewind(proposal.start + num_fed)
    sequence.check(length)
    return Verified(judgement, len(plan.feed) + len(fed), length, single_step, likely)


def asked_likelihoods(logits: mx.array, tokens: tuple[int, ...], opened: Open) -> tuple[Likelihood, ...]:
    """The likelihoods of tokens, where the session asks for them."""
    num_top = opened.settings.logprobs
    return likelihoods(logits, tokens, num_top) if num_top else ()


def judge(
    logits: mx.array, drafted: tuple[int, ...], proposal: Proposal, session: Session, beside: Sequence[mx.array]
) -> Judgement:
    """Apply the session's acceptance rule to the proposal's first `len(drafted)` tokens; evaluates `beside`, too."""
    opened, settings = session.opened, session.opened.settings
    if settings.rule == "match":
        return judge_by_match(
            logits,
            drafted,
            temperature=settings.temperature,
            seed=opened.seed,
            start=proposal.start,
            also_evaluate=beside,
            chosen=session.logits_pipeline.sample(logits),
        )
    return judge_by_rejection(
        logits,
        drafted,
        proposal.probs[: len(drafted)],
        temperature=settings.temperature,
        seed=opened.seed,
        start=proposal.start,
        also_evaluate=beside,
    )


@attrs.frozen
class _Launched:
    """A token that is being computed.

    Attributes:
        token: (1,) id.
        logits: (1, V) processed, of which it comes.
        peaks: of that row.
    """

    token: mx.array
    logits: mx.array
    logit_check: LogitCheck

    def launch(self) -> None:
        mx.async_eval(self.token, *self.logit_check.arrays())


class PlainDecoder:
    """Decoding without a drafter, one forward pass ahead of what is read.

    The next pass is launched before the token that it starts from is read back, so that building its
    graph and the way through trio cost nothing while the device computes. Where a user's code has a say, which is
    called with what is computed and nothing else, the pass alone is launched, and its token chosen in the next step.
    """

    def __init__(self, sequence: CachedSequence, opened: Open, logits_pipeline: LogitsPipeline) -> None:
        self._line = sequence
        self._opened = opened
        self._shaping = logits_pipeline
        self._pending: _Launched | None = None  # the next token, not read
        self._rows: mx.array | None = None  # or (1, V), the model's logits of which it is to be chosen

    @property
    def is_ahead(self) -> bool:
        """Whether the cache already processes the last token that was returned."""
        return self._pending is not None or self._rows is not None

    def step(self, plan: FeedPlan, tail: Tail, position: int, go_ahead: bool) -> tuple[int, tuple[Likelihood, ...]]:
        """The token at a position, and how likely it was, where that is asked for.

        Args:
            plan: how to bring the cache in line; nothing to do where the decoder is ahead.
            tail: of the text before the token.
            position: absolute, of the token wanted.
            go_ahead: whether a token after it will be wanted.

        Raises: NotANumberError, ProcessorError: no token can be chosen.
        """
        now, self._pending = self._pending, None
        if now is None:
            rows, self._rows = self._rows, None
            if rows is None:
                rows = self._line.feed(plan.feed, 1)
                assert rows is not None
            now = self._choose(rows, self._shaping.process(rows, tail, position), position)
        now.launch()
        if go_ahead:
            rows = self._line.feed_lazy(now.token)
            if self._shaping.runs_user_code:
                self._rows = rows
                mx.async_eval(rows)
            else:
                following = self._shaping.process_lazily(rows, tail, position, now.token)
                self._pending = self._choose(rows, following, position + 1)
                self._pending.launch()
        self._line.check(plan.keep + len(plan.feed) + (1 if go_ahead else 0))
        chosen = cast(int, now.token.item())
        now.logit_check.check(0, position, "target")
        return chosen, asked_likelihoods(now.logits, (chosen,), self._opened)

    def _choose(self, rows: mx.array, logits: mx.array, position: int) -> _Launched:
        """What comes of the model's logits (1, V), once they are processed; lazy."""
        settings, seed = self._opened.settings, self._opened.seed
        filtered = self._shaping.filter(logits, position)
        if (chosen := self._shaping.sample(filtered)) is not None:
            token = chosen
        elif settings.rule == "match":
            token = choices(filtered, settings.temperature, seed, position, logits.shape[1])
        else:
            probs = distribution(filtered[0], settings.temperature)
            token = draw(probs, key_for(seed, Purpose.RECOVER, position))[None]
        return _Launched(token, logits, LogitCheck.of(rows, logits))
