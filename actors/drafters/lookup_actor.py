"""The drafter without a model: proposes the tokens that followed the same tokens earlier in the session's text."""

from __future__ import annotations

from collections.abc import Callable

from actors.actor import Mailbox
from actors.drafters.drafter import Drafter, DrafterSession, FromTarget, MakePolicy, policy_by_settings
from actors.session import Session
from protocol.auto_policy import MIN_REACH, UNPRICED_LOOKAHEAD, AutoPolicy
from protocol.draft_plan import Need
from protocol.lookahead_policy import ChainPolicy, Policy, PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node
from protocol.messages import Due, Overdue, Ready, Rested, Verdict
from protocol.prices import Prices
from protocol.prompt_lookup import PromptLookup
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD
from protocol.trace import Event

# The drafter rests after this many rounds in a row without a proposal. In a rest, the target does not wait for an
# answer before it goes on, which saves a little time. In return, the next proposal may come a little late.
MAX_IDLE_ROUNDS = 8


class LookupSession(DrafterSession):
    """The state of one session at the lookup.

    Attributes:
        num_idle_rounds: rounds in a row without anything to propose.
    """

    def __init__(
        self,
        shared: Session,
        policy: Policy,
        on_message: Callable[[LookupSession, FromTarget], None],
    ) -> None:
        # A match of one token is seldom right. Only a policy that weighs its price should propose it.
        index = PromptLookup(shortest=1 if isinstance(policy, AutoPolicy) else 2)
        prompt = shared.opened.prompt
        tree = LookaheadTree(prompt[-1], len(prompt) - 1)
        super().__init__(shared, policy, index, tree, on_message)
        self.num_idle_rounds = 0

    @property
    def may_rest(self) -> bool:
        """Whether nothing was found for so many rounds that the drafter may rest."""
        return isinstance(self.policy, AutoPolicy) and self.num_idle_rounds > MAX_IDLE_ROUNDS

    def follow(self, commit: Commit) -> bool:
        """Advance over a commit. True for a hit: the tree also contained the commit's last token."""
        if isinstance(self.policy, AutoPolicy):
            # Guesses that were not judged count too, under either rule. A looked-up token is not a random draw, so it
            # equals the committed token as often as it would have been accepted.
            for _, guess, was_right in self.tree.outcomes(commit.tokens):
                self.policy.calibration.observe(guess, was_right)
        was_hit = self.tree.advance(commit.tokens)
        if self.is_ready:
            self.index.append(commit.tokens)
            self.look_up()
        return was_hit

    def look_up(self) -> None:
        """Replace the tree by the chain that the index finds after the committed text."""
        state, policy = self.state, self.policy
        self.tree = LookaheadTree(state.committed[-1], state.next_position - 1)
        # One more token than may be proposed, as a guess at the token that the verdict adds.
        max_tokens = 1 + (policy.lookahead if isinstance(policy, ChainPolicy) else MAX_LOOKAHEAD)
        if state.remaining is not None:
            max_tokens = min(max_tokens, state.remaining)
        if (found := self.index.lookup(num_tokens=max_tokens)) is None:
            return
        node, min_reach = self.tree.root, self._min_reach()
        for token, raw in zip(found.tokens, found.confidences, strict=True):
            confidence = policy.calibration(0, raw) if isinstance(policy, AutoPolicy) else raw
            node = self.tree.expand(node, Guess(token, confidence, raw=raw))
            # Nothing comes after the end of the text, and no node is proposed whose parent is not.
            if token in self.shared.opened.stop_tokens or node.reach < min_reach:
                return

    def _min_reach(self) -> float:
        """The reach, in [0, 1], below which no node will be proposed."""
        return MIN_REACH if isinstance(self.policy, AutoPolicy) else 0.0

    def worth_proposing(self, now_s: float) -> list[Node]:
        """The found nodes that the policy wants to propose."""
        max_tokens = self.max_proposed_tokens
        if isinstance(self.policy, AutoPolicy) and not self.policy.prices.is_known:
            max_tokens = min(max_tokens, UNPRICED_LOOKAHEAD)
        # The tree is complete, so the policy gains nothing by waiting.
        view = PolicyView(
            tree=self.tree,
            max_proposal=max_tokens,
            max_depth=max_tokens,
            can_expand=lambda _: False,
            num_to_feed=lambda _: 0,
            now_s=now_s,
        )
        return self.policy.proposal(view) or []


class LookupActor(Drafter[LookupSession]):
    """Drafts for all sessions by lookup. It has no model and no thread, and answers a verdict as it receives it."""

    name = "draft"
    # A rest is prolonged in each round without a proposal. The target must hear of that before the round after its next
    # one begins, so that it can decode a pass ahead.
    rest_rounds = max_rest_rounds = 3
    busy_seconds = 0.0  # there are no jobs

    def __init__(
        self,
        on_event: Callable[[Event], None],
        prices: Prices,
        clock: Callable[[], float],
        *,
        target: Mailbox,
        make_policy: MakePolicy = policy_by_settings,
    ) -> None:
        """As `Actor`, and:

        Args:
            target: the target's mailbox.
            make_policy: makes the policy that decides how much of the found tokens is proposed.
        """
        super().__init__(on_event, prices, clock)
        # A lookup takes next to no time, and no other duration is ever measured.
        prices.observe_draft_step(1, 0.0, 0.0, beside_target=False)
        self._target = target
        self._make_policy = make_policy

    def _new_session(self, shared: Session) -> LookupSession:
        return LookupSession(shared, self._make_policy(shared.opened.settings, self.prices), self._receive)

    def _need(self, session: LookupSession) -> Need | None:
        if session.is_ready:
            return None
        if not session.is_indexed:
            return Need.READ
        session.is_ready = True
        session.look_up()
        self._target.send_nowait(Ready(session.id))
        self._answer(session)
        return None

    async def _prepare(self, session: LookupSession, need: Need) -> None:
        await self._index(session)

    def _receive(self, session: LookupSession, message: FromTarget) -> None:
        match message:
            case Verdict() | Rested():
                self._receive_verdict(session, message)
            case Due():  # lookup answers at once, so this message and the answer have crossed
                if message.is_late:
                    self._target.send_nowait(Ready(session.id))
            case Overdue():
                session.state.rest(message)

    def _receive_verdict(self, session: LookupSession, verdict: Verdict | Rested) -> None:
        """Advance over a verdict's commit, and answer it."""
        was_resting = session.state.phase is SessionPhase.RESTING
        commit = self._follow(session, verdict)
        if commit is None or commit.finish_reason is not None:
            return
        was_hit = session.follow(commit)
        if not session.is_ready:
            return
        if not was_resting:
            self._count_hit(session, verdict.round, was_hit)
        self._answer(session)

    def _answer(self, session: LookupSession) -> None:
        """Propose the found tokens; or rest, if nothing has been found for a while."""
        nodes = session.worth_proposing(self._clock())
        session.num_idle_rounds = 0 if nodes else session.num_idle_rounds + 1
        if session.may_rest:
            self._rest(session)
        elif session.state.phase is SessionPhase.PROPOSING:
            self._send_proposal(session, session.proposal(nodes))
