"""The drafter: grows the lookahead tree, also while the target verifies, and proposes from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import attrs
import trio

from actors.actor import PREFIX_CACHE_BYTES, ActorSession, ModelActor
from actors.drafters.draft_steps import Drafted, DraftSteps, FellBack, Outcome, Refused, catch_up
from actors.drafters.drafter import Drafter
from actors.model import CachedSequence, Model
from actors.prefill import prefill, read_on
from actors.session import Session
from actors.workers.worker import Job, Step, Steps, Worker
from protocol.errors import ProtocolError
from protocol.lookahead_policy import AutoPolicy, ChainPolicy, Policy, PolicyView, policy_for
from protocol.lookahead_tree import LOOKED_UP, Guess, LookaheadTree, Node
from protocol.messages import Due, Message, Overdue, Proposal, Ready, Rest, Verdict
from protocol.prices import Prices
from protocol.prompt_lookup import PromptLookup
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD, Settings
from protocol.target_queue import TargetQueue
from protocol.trace import Event

# Tokens of a prompt that are indexed in a row: a few milliseconds at most, in which nothing else happens.
INDEXED_IN_A_ROW = 256
# Tokens that are looked up after a miss.
LOOKED_UP_AT_ONCE = 8
# Rows of logits that are looked at when catching up, at most: each is as wide as the vocabulary.
MOST_ROWS = 32
# Committed tokens that it need not have read to be ready: it reads so many with its next draft step.
FEW_BEHIND = 8
# Rounds for which the drafter leaves the target alone at a time.
REST = 8
# Rounds before its end at which a rest is prolonged, if it is: soon enough for the target to work ahead all the time.
SAY_SO_BEFORE = 2

MakePolicy = Callable[[Settings, Prices], Policy]


def policy_by_settings(settings: Settings, prices: Prices) -> Policy:
    """The policy that a session's settings ask for."""
    return policy_for(settings.lookahead, prices, settings.manner)


@attrs.define
class Drafting:
    """Draft steps that are under way.

    Attributes:
        steps: as the worker does them.
        node: what is drafted after at the moment; None where that is of no use any more.
        until: when that is expected to be done.
        beside: whether the target worked when that began.
    """

    steps: Steps[Outcome]
    node: Node | None = None
    until: float = 0.0
    beside: bool = False


class DraftSession(ActorSession):
    """The drafter's part in one session: its books, its tree, and what it decides from them."""

    def __init__(
        self,
        session: Session,
        context_length: int | None,
        policy: Policy,
        hear: Callable[[DraftSession, Verdict | Due | Overdue], None],
    ) -> None:
        super().__init__(session)
        self._hear = hear
        opened = session.opened
        self.tree = LookaheadTree(opened.prompt[opened.num_prompt - 1], opened.num_prompt - 1)
        if opened.num_resumed:  # draws depend on all that was generated
            self.tree.advance(opened.prompt[opened.num_prompt :])
        self.policy = policy
        self.text = PromptLookup()  # for what to propose after a miss, when nothing is drafted yet
        self.context_length = context_length
        self.is_ready = False  # it has read the text, and the target waits for its proposals
        self.is_late = False  # it was ready, and the target has stopped waiting for a proposal
        # False once the cache could not lose again what is not committed: then only committed tokens
        # are fed, and one token beyond them can be guessed.
        self.can_look_ahead = True
        self.due = 0.0  # when the verdict on what is proposed is expected
        self.drafting: Drafting | None = None

    def receive(self, message: Message) -> None:
        """Take a verdict, and answer it; or hear that an answer is late."""
        if not isinstance(message, Verdict | Due | Overdue):
            raise ProtocolError(f"the drafter was handed {message!r}")
        # At once, whatever the task is waiting for: where the text was drafted for, the next proposal
        # is there already.
        self._hear(self, message)
        self.wake()

    async def index_text(self) -> None:
        """Make what the text says so far, the prompt above all, known to the lookup.

        Cancellation: strikes every few hundred tokens.
        """
        committed = self.state.committed  # which the target may lengthen meanwhile
        while isinstance(self.policy, AutoPolicy) and len(self.text) < len(committed):
            self.text.append(committed[len(self.text) : len(self.text) + INDEXED_IN_A_ROW])
            await trio.lowlevel.checkpoint()

    @property
    def is_past_context(self) -> bool:
        """Whether the text has outgrown the drafter: the token at position n is drafted by feeding n tokens."""
        return self.context_length is not None and self.state.next_position > self.context_length

    @property
    def useful_depth(self) -> int:
        """How many tokens beyond the committed text are worth a thought."""
        if not self.can_look_ahead:
            return 1
        most = MAX_LOOKAHEAD * 2 + 1
        if self.state.remaining is not None:
            most = min(most, self.state.remaining)
        if self.context_length is not None:
            most = min(most, self.context_length - self.state.next_position + 1)
        return max(0, most)

    @property
    def num_behind(self) -> int:
        """Committed tokens that the drafter has not read."""
        return len(self.state.committed) - len(self.cached_tokens)

    def view(self, now: float, queue_slack_s: float = 0.0) -> PolicyView:
        """What the policy may look at; see `PolicyView` for the slack."""
        # The verdict brings a token of its own, so the last one that may come need not be proposed.
        limit = MAX_LOOKAHEAD if self.state.remaining is None else min(MAX_LOOKAHEAD, self.state.remaining - 1)
        return PolicyView(
            tree=self.tree,
            max_proposal=limit,
            max_depth=self.useful_depth,
            can_expand=self._may_go_on,
            num_to_feed=self._width,
            now_s=now,
            verdict_due_s=self.due if self.state.phase is SessionPhase.VERIFYING else None,
            drafting_node=self.drafting.node if self.drafting else None,
            drafting_until_s=self.drafting.until if self.drafting else 0.0,
            queue_slack_s=queue_slack_s,
        )

    def next_expansion(self, now: float, queue_slack_s: float = 0.0) -> Node | None:
        """What to draft after next, or None to do nothing until something changes."""
        if self.state.phase not in (SessionPhase.PROPOSING, SessionPhase.VERIFYING) or not self.is_ready:
            return None
        return self.policy.expansion(self.view(now, queue_slack_s))

    def next_proposal(self, now: float, queue_slack_s: float = 0.0) -> Proposal | None:
        """What to send now, or None to draft on, or because it is not the drafter's turn."""
        state = self.state
        if state.phase is not SessionPhase.PROPOSING or not self.is_ready:
            return None
        nodes = self.policy.proposal(self.view(now, queue_slack_s))
        if nodes is None:
            return None
        return self.proposal(nodes)

    def proposal_by_now(self, now: float) -> Proposal:
        """What has been drafted by now, as much as can be of use; maybe nothing."""
        most = self.policy.lookahead if isinstance(self.policy, ChainPolicy) else MAX_LOOKAHEAD
        return self.proposal(self.tree.chain()[: min(most, self.view(now).max_proposal)])

    def proposal(self, nodes: list[Node]) -> Proposal:
        """A proposal of these."""
        state = self.state
        guesses = [node.guess for node in nodes if node.guess is not None]
        probs = () if state.opened.settings.rule == "match" else tuple(guess.probs for guess in guesses)
        return Proposal(self.id, state.round, state.next_position, tuple(guess.token for guess in guesses), probs)

    def learn(self, commit: Commit, num_judged: int) -> None:
        """See which guesses were right."""
        if not isinstance(self.policy, AutoPolicy):
            return
        by_match = self.session.opened.settings.rule == "match"
        for index, guess, was_right in self.tree.outcomes(commit.tokens):
            # Under the rejection rule a draw that was not judged may differ from the token that came and would
            # have stood all the same.
            if by_match or guess.rank != 0 or index < num_judged:
                self.policy.calibration.observe(guess, was_right)

    def follow(self, commit: Commit) -> bool:
        """Move on to what was committed. True for a hit: its last token had been drafted, too."""
        was_hit = self.tree.advance(commit.tokens)
        # Before the prompt is indexed, `index_text` comes by here as well.
        if isinstance(self.policy, AutoPolicy) and len(self.text) == commit.start:
            self.text.append(commit.tokens)
            if not was_hit and (found := self.text.lookup(num_tokens=LOOKED_UP_AT_ONCE)) is not None:
                self.tree.look_up(
                    [
                        Guess(token, self.policy.calibration(LOOKED_UP, raw), rank=LOOKED_UP, raw=raw)
                        for token, raw in zip(found.tokens, found.confidences, strict=True)
                    ]
                )
        return was_hit

    def _may_go_on(self, node: Node) -> bool:
        """Whether anything comes after a node, other than the end of the text."""
        return node is self.tree.root or node.token not in self.session.opened.stop_tokens

    def _width(self, node: Node) -> int:
        """How many tokens must be fed to draft after a node."""
        return len(self.cached_tokens.plan(self.state.committed, self.tree.path(node)).feed)


class DraftActor(ModelActor[DraftSession], Drafter[DraftSession]):
    """Drafts a token a step, for all sessions in turn.

    Attributes:
        chains: whether a step is launched before the choice that it starts from is read back; None for where the
            device works ahead of what it is asked for, which a GPU does.
    """

    name = "draft"

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
    ) -> None:
        """As `ModelActor`, and:

        Args:
            target: the target's mailbox.
            target_vocab_size: the width of its logits.
            make_policy: decides how far a session is drafted ahead.
            turns: at the target; None where it has no other sessions than one.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._make_policy = make_policy
        self._turns = target_queue or TargetQueue()
        self.chains: bool | None = None

    @property
    def is_alive(self) -> bool:
        """See `Actor.is_alive`; the target must not be waiting for it in vain, either."""
        return super().is_alive and not self._hangs()

    def _hangs(self) -> bool:
        return self.worker.is_hanging or any(part.is_late for part in list(self._parts.values()))

    def _join(self, session: Session) -> DraftSession:
        policy = self._make_policy(session.opened.settings, self.prices)
        return DraftSession(session, self.model.context_length, policy, self._hear)

    async def _take_part(self, part: DraftSession) -> None:
        opened = part.session.opened
        if part.is_past_context:
            self._withdraw(part)
            return
        try:
            async with self._line(part, beside_another=True) as sequence:
                await prefill(self.worker, sequence, part.cached_tokens, opened, self.chunk_size)
                await part.index_text()
                await self._draft_on(part, sequence)
        except Exception as error:  # whatever it is: it costs speed, never text
            self._fail(part, error)

    async def _draft_on(self, part: DraftSession, sequence: CachedSequence) -> None:
        """Draft, and send proposals, until the session is over."""
        while part.state.phase is not SessionPhase.CLOSED:
            if part.is_past_context:
                self._withdraw(part)
                return
            if not part.is_ready:
                await self._become_ready(part, sequence)
                continue
            if part.state.phase is SessionPhase.RESTING and part.policy.should_catch_up(part.num_behind):
                await self._catch_up(part, sequence)
                continue
            node = self._next_expansion(part)
            if node is None:
                await part.change()
            else:
                await self._draft(part, sequence, node)

    async def _become_ready(self, part: DraftSession, sequence: CachedSequence) -> None:
        """Read a pass of what the target has committed alone; or, if that is little, have it wait for proposals."""
        if part.num_behind > FEW_BEHIND:
            await read_on(
                self.worker,
                sequence,
                part.cached_tokens,
                part.session.opened,
                part.state.committed,
                self.chunk_size,
            )
            return
        part.is_ready = True
        if part.is_late:
            part.is_late = False
            self._note(part, "rejoin")
        self._target.send_nowait(Ready(part.id))
        self._take_turn(part)

    def _next_expansion(self, part: DraftSession) -> Node | None:
        now = self.worker.clock()
        return part.next_expansion(now, self._slack(part, now))

    def _slack(self, part: DraftSession, now: float) -> float:
        """See `PolicyView.queue_slack_s`."""
        if part.state.phase is not SessionPhase.VERIFYING:
            return self._turns.remaining_s(now)
        if self._is_waited_for_by_others(part):
            # What they need is sure to be of use, and the target will have it.
            return math.inf
        return self._turns.others_s(part.id)

    def _is_waited_for_by_others(self, part: DraftSession) -> bool:
        return any(
            other.state.phase is SessionPhase.PROPOSING and other.is_ready
            for other in self._parts.values()
            if other is not part
        )

    async def _draft(self, part: DraftSession, sequence: CachedSequence, node: Node) -> None:
        """Draft after a node, and on down the drafter's own choices, as long as nothing else is wanted."""
        plan = part.cached_tokens.plan(part.state.committed, part.tree.path(node))
        if plan.keep < len(part.cached_tokens):
            self._note(part, "rewind", num_tokens=len(part.cached_tokens) - plan.keep)
        on_thread = DraftSteps(
            sequence,
            len(part.state.committed),
            part.session,
            self._target_vocab_size,
            part.policy.num_guesses,
            self.worker.clock,
            self.chains,
        )
        now = self.worker.clock()
        draft_budget = part.policy.draft_budget(part.view(now, self._slack(part, now)), node)
        tail = part.session.logits_pipeline.tail(part.state.committed, part.tree.path(node))
        steps = Steps(
            "draft",
            partial(on_thread.begin, plan, node.trail, tail, draft_budget),
            partial(self._heed, part),
            part.id,
            len(plan.feed),
            part.state.round,
        )
        part.drafting = Drafting(steps)
        self._begin_step(part, part.drafting, node, len(plan.feed))
        try:
            await self.worker.run_steps(steps)
        finally:
            part.drafting = None

    def _begin_step(self, part: DraftSession, drafting: Drafting, node: Node | None, num_tokens: int) -> None:
        drafting.node = node
        drafting.beside = part.state.phase is SessionPhase.VERIFYING
        drafting.until = self.worker.clock() + self.prices.draft_s(
            num_tokens, beside_target=drafting.beside or self._turns.is_busy
        )
        drafting.steps.round = part.state.round

    def _heed(self, part: DraftSession, job: Job[Step[Outcome]], outcome: Outcome, goes_on: bool) -> None:
        """See what a draft step has brought; if another follows, it is after its choice."""
        drafting, following = part.drafting, None
        assert drafting is not None
        node, drafting.node = drafting.node, None
        match outcome:
            case Drafted():
                # By now, since a step may have waited for others'.
                beside = drafting.beside or self._turns.was_busy_since(job.began)
                self.prices.observe_draft_step(job.num_tokens, job.began, job.ended, beside_target=beside)
                part.can_look_ahead = outcome.can_look_ahead
                part.cached_tokens.follow(outcome.fed)
                # The text may have gone another way meanwhile, and taken the node with it.
                if node is not None and node.alive:
                    following = part.tree.expand(node, *self._calibrated(part, outcome))
            case FellBack():
                # What is wanted may still be the same, with more to feed.
                part.session.counts.draft_replayed_tokens += outcome.wanted - outcome.length
                part.cached_tokens.rewind(outcome.length)
            case Refused():
                part.can_look_ahead = False
                part.cached_tokens.rewind(outcome.length)
        self._propose(part)
        if goes_on:
            self._begin_step(part, drafting, following, 1)
            self._reconsider(part)

    def _reconsider(self, part: DraftSession) -> None:
        """Have the draft steps that are under way end where something else is wanted by now.

        What is wanted instead is asked for once they have: the step that is running is not abandoned.
        """
        if (drafting := part.drafting) is None:
            return
        if drafting.node is None or drafting.node is not self._next_expansion(part):
            drafting.steps.interrupt()

    def _calibrated(self, part: DraftSession, drafted: Drafted) -> tuple[Guess, ...]:
        if not isinstance(part.policy, AutoPolicy):
            return drafted.guesses
        calibration = part.policy.calibration
        return tuple(attrs.evolve(guess, confidence=calibration(guess.rank, guess.raw)) for guess in drafted.guesses)

    async def _catch_up(self, part: DraftSession, sequence: CachedSequence) -> None:
        """Read what the target has committed in a rest, and see what would have been guessed right."""
        assert isinstance(part.policy, AutoPolicy)
        plan = part.cached_tokens.plan(part.state.committed, num_logits=0)
        num_rows = min(len(plan.feed), MOST_ROWS)
        tail = part.session.logits_pipeline.tail(part.state.committed, num_rows=num_rows)
        call = partial(catch_up, sequence, plan, part.session, self._target_vocab_size, num_rows, tail)
        job = Job("draft", call, part.id, len(plan.feed), part.state.round)
        outcome = await self.worker.run(job)
        if isinstance(outcome, FellBack):
            part.session.counts.draft_replayed_tokens += outcome.wanted - outcome.length
            part.cached_tokens.rewind(outcome.length)
            return
        self.prices.observe_draft_step(len(plan.feed), job.began, job.ended, beside_target=True)
        part.cached_tokens.follow(plan)
        # Of the last, what comes is not known yet.
        came = part.state.committed[plan.keep + len(plan.feed) - len(outcome) + 1 :]
        by_match = part.session.opened.settings.rule == "match"
        for (token, raw), actual in zip(outcome, came, strict=False):
            if by_match:
                part.policy.calibration.observe(Guess(token, raw, raw=raw), token == actual)
            else:
                part.policy.calibration.observe_unjudged(raw)

    def _take_turn(self, part: DraftSession) -> None:
        """Begin the drafter's turn: propose, draft on, or leave some rounds to the target alone."""
        if part.state.phase is SessionPhase.PROPOSING and part.is_ready and part.policy.should_rest():
            self._rest(part)
        else:
            self._propose(part)

    def _rest(self, part: DraftSession) -> None:
        was_resting = part.state.phase is SessionPhase.RESTING
        rest = Rest(part.id, part.state.round + REST)
        if part.state.rest(rest):
            self._target.send_nowait(rest)
            if not was_resting:
                self._note(part, "rest", num_tokens=REST)

    def _propose(self, part: DraftSession) -> None:
        now = self.worker.clock()
        if (proposal := part.next_proposal(now, self._slack(part, now))) is not None:
            self._send(part, proposal)

    def _send(self, part: DraftSession, proposal: Proposal) -> None:
        now = self.worker.clock()
        part.state.propose(proposal)
        self._target.send_nowait(proposal)
        part.due = now + self._turns.remaining_s(now) + self.prices.verify(1 + len(proposal.tokens))
        self._note(part, "proposal", round=proposal.round, num_tokens=len(proposal.tokens), tokens=proposal.tokens)

    def _hear(self, part: DraftSession, message: Verdict | Due | Overdue) -> None:
        match message:
            case Verdict():
                self._hear_verdict(part, message)
            case Due():
                self._hear_of_lateness(part, message)
            case Overdue():
                part.state.rest(message)
                self._reconsider(part)

    def _hear_of_lateness(self, part: DraftSession, due: Due) -> None:
        """Propose what there is, end what is being drafted as soon as that can be, and catch up."""
        # Also where the two have crossed: the target goes on alone until it hears that the drafter is ready.
        part.is_late = part.is_late or part.is_ready
        part.is_ready = False
        if part.state.phase is SessionPhase.PROPOSING and part.state.round == due.round:
            self._send(part, part.proposal_by_now(self.worker.clock()))
        self._reconsider(part)

    def _hear_verdict(self, part: DraftSession, verdict: Verdict) -> None:
        """Move on to what a verdict has committed."""
        was_resting, proposal = part.state.phase is SessionPhase.RESTING, part.state.outstanding
        commit = part.state.apply(verdict)
        if commit is None:
            part.session.counts.stale_proposals += 1
            return
        if commit.finish_reason is not None:
            self._reconsider(part)
            return
        part.learn(commit, len(proposal.tokens) if proposal is not None else 0)
        was_hit = part.follow(commit)
        if not part.is_ready:
            return
        if was_resting:
            is_ending = part.state.rests_until - part.state.round == SAY_SO_BEFORE
            if is_ending and part.policy.should_rest_on(part.num_behind):
                self._rest(part)
        else:
            self._count_hit(part, verdict, was_hit)
        self._take_turn(part)
        self._reconsider(part)

    def _count_hit(self, part: DraftSession, verdict: Verdict, was_hit: bool) -> None:
        # Others' passes hide a miss as well as a hit does.
        self.prices.hit_rate.observe(float(was_hit or self._turns.is_busy))
        if was_hit:
            part.session.counts.lookahead_hits += 1
            self._note(part, "hit", round=verdict.round, num_tokens=len(part.tree.chain()))
        else:
            part.session.counts.lookahead_misses += 1
            self._note(part, "miss", round=verdict.round)
