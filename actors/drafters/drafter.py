"""The base classes of the drafters: proposals, rests, and leaving a session to the target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import trio

from actors.actor import Actor, ActorSession
from actors.session import Session
from protocol.auto_policy import AutoPolicy, policy_for
from protocol.errors import ProtocolError
from protocol.leaving import withdrawal
from protocol.lookahead_policy import Policy
from protocol.lookahead_tree import LookaheadTree, Node
from protocol.messages import Close, Due, Message, Overdue, Proposal, Rest, Verdict
from protocol.prices import Prices
from protocol.prompt_lookup import MAX_NGRAM, PromptLookup
from protocol.session_state import SessionPhase
from protocol.settings import MAX_LOOKAHEAD, Settings

logger = logging.getLogger("outrider")

# Tokens that are indexed without a checkpoint: a few milliseconds at most, in which nothing else happens.
TOKENS_PER_INDEXING = 256

MakePolicy = Callable[[Settings, Prices], Policy]


def policy_by_settings(settings: Settings, prices: Prices) -> Policy:
    """The policy that a session's settings ask for."""
    return policy_for(settings.lookahead, prices, settings.manner)


class DrafterSession(ActorSession):
    """The state of one session at a drafter.

    Attributes:
        policy: decides how far to draft and what to propose.
        index: finds earlier occurrences of the text's end.
        tree: the guesses that continue the committed text.
        is_ready: whether the drafter has read the text, and the target waits for its proposals.
        is_leaving: whether nothing more is drafted, and the session is left once that is allowed (`protocol.leaving`).
    """

    def __init__(
        self,
        shared: Session,
        policy: Policy,
        index: PromptLookup,
        tree: LookaheadTree,
        on_message: Callable[[Any, Verdict | Due | Overdue], None],
    ) -> None:
        """Make the state of a session that begins.

        Args:
            on_message: called with this session and each message of the target; must not wait. A method of the actor
                itself: a closure over the session would make a cycle that keeps the model in memory.
        """
        super().__init__(shared)
        self.policy = policy
        self.index = index
        self.tree = tree
        self.is_ready = False
        self.is_leaving = False
        self._on_message = on_message

    def receive(self, message: Message) -> None:
        """Take a verdict and answer it, or learn that an answer is late."""
        if not isinstance(message, Verdict | Due | Overdue):
            raise ProtocolError(f"the drafter cannot handle {message!r}")
        # At once, whatever the task is waiting for: if the tree continues the text, the next proposal is ready.
        self._on_message(self, message)
        self.wake()

    async def until_left(self) -> None:
        """Wait until the drafter has left the session, or the session is over."""
        while not self.has_left:
            await self.change()

    @property
    def has_left(self) -> bool:
        """Whether the drafter has nothing more to do with the session."""
        return self.state.phase in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED)

    async def index_committed(self) -> None:
        """Add the committed text, the prompt above all, to the index; before it what is expected after the prompt.

        Cancellation: strikes every few hundred tokens.
        """
        opened = self.shared.opened
        if prediction := opened.settings.prediction:
            # With the end of the prompt before it, the prediction is found as soon as the text begins.
            reference = (*opened.prompt[-MAX_NGRAM:], *prediction)
            while self.index.num_reference < len(reference):
                start = self.index.num_reference
                self.index.append_reference(reference[start : start + TOKENS_PER_INDEXING])
                await trio.lowlevel.checkpoint()
        committed = self.state.committed  # the target may lengthen it meanwhile
        while len(self.index) < len(committed):
            self.index.append(committed[len(self.index) : len(self.index) + TOKENS_PER_INDEXING])
            await trio.lowlevel.checkpoint()

    @property
    def max_proposed_tokens(self) -> int:
        """Largest useful proposal. The verdict brings a token of its own, so the last one need not be proposed."""
        return MAX_LOOKAHEAD if self.state.remaining is None else min(MAX_LOOKAHEAD, self.state.remaining - 1)

    def proposal(self, nodes: list[Node]) -> Proposal:
        """A proposal of a chain of nodes."""
        state = self.state
        guesses = [node.guess for node in nodes if node.guess is not None]
        probs = () if state.opened.settings.rule == "match" else tuple(guess.probs for guess in guesses)
        # A fixed lookahead is what the user wants verified, whatever it costs. Under the rejection rule, whether a
        # token is judged must not depend on the tokens after it, which were drafted because of it.
        may_cut = isinstance(self.policy, AutoPolicy) and state.opened.settings.rule == "match"
        reach = tuple(node.reach for node in nodes) if may_cut else ()
        tokens = tuple(guess.token for guess in guesses)
        num_stale = sum(map(self.tree.is_stale, nodes))
        return Proposal(self.id, state.round, state.next_position, tokens, probs, reach, num_stale)


S = TypeVar("S", bound=DrafterSession)


class Drafter(Actor[S]):
    """An actor that proposes tokens. Without it, a session goes on, only slower.

    Attributes:
        rest_rounds: rounds that the drafter leaves to the target alone at a time.
    """

    rest_rounds: ClassVar[int]
    _target: trio.MemorySendChannel[Message]

    def _hand_over(self, message: Message) -> None:
        session = self._sessions.get(message.session)
        is_left = session is not None and session.state.phase is SessionPhase.UNDRAFTED
        # The target may have sent it before it knew that the session is left.
        if not is_left or isinstance(message, Close):
            super()._hand_over(message)

    def _fail(self, session: S, error: Exception) -> None:
        """Leave a session to the target because of an error. It costs speed, never text."""
        if not session.is_leaving:
            logger.warning("drafting failed, session %d goes on without: %s", session.id, error, exc_info=error)
            session.shared.counts.draft_failures += 1
        if session.is_leaving or session.is_broken:
            # Its decisions themselves have failed. They do not depend on which tokens were drawn, so this does not.
            self._withdraw(session, at_once=True)
        else:
            self._leave(session)

    def _leave(self, session: S) -> None:
        """Draft no more for a session, and leave it to the target as soon as that is allowed."""
        session.is_leaving = True
        self._withdraw(session)

    def _withdraw(self, session: S, *, at_once: bool = False) -> None:
        """Leave a session to the target, which is faster alone than with empty proposals, if that is allowed.

        Args:
            at_once: see `withdrawal`.
        """
        if session.has_left or (message := withdrawal(session.id, session.tree, at_once=at_once)) is None:
            return
        self._note(session, "withdraw")
        session.state.withdraw(message)
        self._target.send_nowait(message)

    def withdraw_from_all(self) -> None:
        """Leave every session to the target, at a moment that a user has chosen. Never waits."""
        for session in list(self._sessions.values()):
            self._leave(session)  # with a proposal of what was drawn, where it is the drafter's turn
            self._withdraw(session, at_once=True)

    def _rest(self, session: S) -> None:
        """Leave the next `rest_rounds` rounds to the target; in a rest, prolong it."""
        was_resting = session.state.phase is SessionPhase.RESTING
        rest = Rest(session.id, session.state.round + self.rest_rounds)
        if session.state.rest(rest):
            self._target.send_nowait(rest)
            if not was_resting:
                self._note(session, "rest", num_tokens=self.rest_rounds)

    def _send_proposal(self, session: S, proposal: Proposal) -> None:
        session.state.propose(proposal)
        self._target.send_nowait(proposal)
        self._note(session, "proposal", round=proposal.round, num_tokens=len(proposal.tokens), tokens=proposal.tokens)

    def _count_hit(self, session: S, verdict: Verdict, was_hit: bool) -> None:
        """Count whether the last token of a verdict's commit was in the tree."""
        if was_hit:
            session.shared.counts.lookahead_hits += 1
            self._note(session, "hit", round=verdict.round, num_tokens=len(session.tree.chain()))
        else:
            session.shared.counts.lookahead_misses += 1
            self._note(session, "miss", round=verdict.round)
