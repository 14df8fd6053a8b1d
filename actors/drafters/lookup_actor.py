"""The drafter without a model: proposes what came after the same words earlier in the session's own text."""

from __future__ import annotations

from collections.abc import Callable

import trio

from actors.actor import ActorSession
from actors.drafters.draft_actor import INDEXED_IN_A_ROW, MakePolicy, policy_by_settings
from actors.drafters.drafter import Drafter
from actors.session import Session
from protocol.errors import ProtocolError
from protocol.lookahead_policy import MIN_REACH, UNPRICED_LOOKAHEAD, AutoPolicy, ChainPolicy, Policy, PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node
from protocol.messages import Due, Message, Overdue, Proposal, Ready, Rest, Verdict
from protocol.prices import Prices
from protocol.prompt_lookup import PromptLookup
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD
from protocol.trace import Event

# Rounds in a row without anything to propose, after which the target is left alone. Then it need not wait for an
# answer before it goes on, which is worth a little; and a little late is what the next proposal may be.
PATIENCE = 8
# Rounds for which it is left alone at a time: as long as nothing turns up, that is said anew each round, and must
# be heard before the target's next round but one begins.
REST = 3


class LookupSession(ActorSession):
    """The lookup's part in one session: its books, the index over its text, and what was found there."""

    def __init__(
        self, session: Session, policy: Policy, hear: Callable[[LookupSession, Verdict | Due | Overdue], None]
    ) -> None:
        super().__init__(session)
        self._hear = hear
        opened = session.opened
        self.policy = policy
        # A match of one token is right too seldom to be proposed unseen, and often enough to be priced.
        self.index = PromptLookup(shortest=1 if isinstance(policy, AutoPolicy) else 2)
        self.tree = LookaheadTree(opened.prompt[-1], len(opened.prompt) - 1)
        self.num_idle = 0  # rounds in a row without anything to propose
        self.is_ready = False  # the prompt is indexed

    def receive(self, message: Message) -> None:
        """Take a verdict, and answer it; or hear that the prompt takes too long."""
        if not isinstance(message, Verdict | Due | Overdue):
            raise ProtocolError(f"the drafter was handed {message!r}")
        self._hear(self, message)
        self.wake()

    @property
    def may_rest(self) -> bool:
        """Whether there has been nothing to propose for long enough to leave the target alone."""
        return isinstance(self.policy, AutoPolicy) and self.num_idle > PATIENCE

    def follow(self, commit: Commit) -> bool:
        """Move on to what was committed. True for a hit: its last token had been found, too."""
        if isinstance(self.policy, AutoPolicy):
            # Under either rule, also those that were not judged: what was looked up is no draw, so the token that
            # came is the same one as often as it would have stood.
            for _, guess, was_right in self.tree.outcomes(commit.tokens):
                self.policy.calibration.observe(guess, was_right)
        was_hit = self.tree.advance(commit.tokens)
        if self.is_ready:
            self.index.append(commit.tokens)
            self.look_up()
        return was_hit

    async def index_text(self) -> None:
        """Index the prompt, and what the target has committed meanwhile.

        Cancellation: strikes every few hundred tokens.
        """
        committed = self.state.committed
        while len(self.index) < len(committed):
            self.index.append(committed[len(self.index) : len(self.index) + INDEXED_IN_A_ROW])
            await trio.lowlevel.checkpoint()
        self.is_ready = True
        self.look_up()

    def look_up(self) -> None:
        """Grow the tree anew from the committed text, by the chain that is found."""
        state, policy = self.state, self.policy
        self.tree = LookaheadTree(state.committed[-1], state.next_position - 1)
        # One more than may be proposed: a guess at the token that the target puts after the proposal.
        wanted = 1 + (policy.lookahead if isinstance(policy, ChainPolicy) else MAX_LOOKAHEAD)
        wanted = wanted if state.remaining is None else min(wanted, state.remaining)
        if (found := self.index.lookup(num_tokens=wanted)) is None:
            return
        node, least = self.tree.root, self._least_reach()
        for token, raw in zip(found.tokens, found.confidences, strict=True):
            confidence = policy.calibration(0, raw) if isinstance(policy, AutoPolicy) else raw
            node = self.tree.expand(node, Guess(token, confidence, raw=raw))
            # Nothing comes after the end of the text, and nothing is proposed after what is not.
            if token in self.session.opened.stop_tokens or node.reach < least:
                return

    def _least_reach(self) -> float:
        """A reach below which nothing will be proposed."""
        if not isinstance(self.policy, AutoPolicy):
            return 0.0
        prices = self.policy.prices
        return max(MIN_REACH, prices.rate * prices.verify.per_token)

    def worth_proposing(self, now: float) -> list[Node]:
        """What was found, as far as the policy wants it proposed."""
        # The verdict brings a token of its own, so the last one that may come need not be proposed.
        limit = MAX_LOOKAHEAD if self.state.remaining is None else min(MAX_LOOKAHEAD, self.state.remaining - 1)
        if isinstance(self.policy, AutoPolicy) and not self.policy.prices.is_known:
            limit = min(limit, UNPRICED_LOOKAHEAD)
        # All there is to find is there; nothing is gained by waiting.
        view = PolicyView(
            tree=self.tree,
            max_proposal=limit,
            max_depth=limit,
            can_expand=lambda _: False,
            num_to_feed=lambda _: 0,
            now_s=now,
        )
        return self.policy.proposal(view) or []

    def proposal(self, nodes: list[Node]) -> Proposal:
        """A proposal of these."""
        state = self.state
        probs = () if state.opened.settings.rule == "match" else (None,) * len(nodes)
        return Proposal(self.id, state.round, state.next_position, tuple(node.token for node in nodes), probs)


class LookupActor(Drafter[LookupSession]):
    """Looks up, for all sessions; has no model and no thread, and answers a verdict as it hears it."""

    name = "draft"
    busy_seconds = 0.0  # there are no jobs

    def __init__(
        self,
        on_event: Callable[[Event], None],
        prices: Prices,
        clock: Callable[[], float],
        *,
        target: trio.MemorySendChannel[Message],
        make_policy: MakePolicy = policy_by_settings,
    ) -> None:
        """As `Actor`, and:

        Args:
            target: the target's mailbox.
            make_policy: decides how much of what is found is proposed.
        """
        super().__init__(on_event, prices, clock)
        # Looking up takes next to no time, and no other time is ever measured.
        prices.observe_draft_step(1, 0.0, 0.0, beside_target=False)
        self._target = target
        self._make_policy = make_policy

    def _join(self, session: Session) -> LookupSession:
        return LookupSession(session, self._make_policy(session.opened.settings, self.prices), self._hear)

    async def _take_part(self, part: LookupSession) -> None:
        try:
            await part.index_text()
            self._target.send_nowait(Ready(part.id))
            self._answer(part)
        except Exception as error:  # whatever it is: it costs speed, never text
            self._fail(part, error)
            return
        while part.state.phase is not SessionPhase.CLOSED:
            await part.change()

    def _hear(self, part: LookupSession, message: Verdict | Due | Overdue) -> None:
        match message:
            case Verdict():
                self._hear_verdict(part, message)
            case Due():  # it answers at once, so that has crossed its answer
                self._target.send_nowait(Ready(part.id))
            case Overdue():
                part.state.rest(message)

    def _hear_verdict(self, part: LookupSession, verdict: Verdict) -> None:
        """Move on to what a verdict has committed, and answer it."""
        was_resting = part.state.phase is SessionPhase.RESTING
        commit = part.state.apply(verdict)
        if commit is None:
            part.session.counts.stale_proposals += 1
            return
        if commit.finish_reason is not None:
            return
        was_hit = part.follow(commit)
        if not part.is_ready:
            return
        if not was_resting:
            self._count_hit(part, verdict, was_hit)
        self._answer(part)

    def _count_hit(self, part: LookupSession, verdict: Verdict, was_hit: bool) -> None:
        if was_hit:
            part.session.counts.lookahead_hits += 1
            self._note(part, "hit", round=verdict.round, num_tokens=len(part.tree.chain()))
        else:
            part.session.counts.lookahead_misses += 1
            self._note(part, "miss", round=verdict.round)

    def _answer(self, part: LookupSession) -> None:
        """Propose what is found; or leave the next rounds to the target, if there has been nothing for a while."""
        nodes = part.worth_proposing(self._clock())
        part.num_idle = 0 if nodes else part.num_idle + 1
        if part.may_rest:
            self._rest(part)
        elif part.state.phase is SessionPhase.PROPOSING:
            proposal = part.proposal(nodes)
            part.state.propose(proposal)
            self._target.send_nowait(proposal)
            self._note(part, "proposal", round=proposal.round, num_tokens=len(nodes), tokens=proposal.tokens)

    def _rest(self, part: LookupSession) -> None:
        """Leave some rounds to the target alone; or some more, as long as nothing turns up."""
        was_resting = part.state.phase is SessionPhase.RESTING
        rest = Rest(part.id, part.state.round + REST)
        if part.state.rest(rest):
            self._target.send_nowait(rest)
            if not was_resting:
                self._note(part, "rest", num_tokens=REST)
