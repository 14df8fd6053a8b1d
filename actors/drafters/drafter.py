"""The base classes of the drafters: copies, proposals, rests, and leaving a session to the target."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, TypeVar

from actors.actor import Actor, ActorSession, Mailbox
from actors.drafters.copy_search import CopySearch
from actors.session import Session
from protocol.auto_policy import AutoPolicy, policy_for
from protocol.copying import MAX_MATCH, Copied, Forced
from protocol.draft_plan import Standing
from protocol.logits_processors import Forcing
from protocol.lookahead_policy import ChainPolicy, Policy, PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node, withdrawal
from protocol.messages import Message, Proposal, Rest, Rested, Verdict
from protocol.open_options import WorkAhead
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD, Settings

logger = logging.getLogger("outrider")

# A drafter that only copies rests after this many rounds without a copy; the target then goes on without waiting.
MAX_IDLE_ROUNDS = 8
LIKELY = 0.5  # a session counts as having something to copy if the first copied token is at least this likely

MakePolicy = Callable[[Settings, Prices], Policy]


def policy_by_settings(settings: Settings, prices: Prices, work_ahead: WorkAhead = "auto") -> Policy:
    """The policy that a session's settings ask for. See `policy_for`."""
    return policy_for(settings.lookahead, prices, settings.calibration_key, work_ahead)


class DrafterSession(ActorSession):
    """The state of one session at a drafter."""

    def __init__(
        self, shared: Session, policy: Policy, target_vocab_size: int, *, has_model: bool, grammar_only: bool = False
    ) -> None:
        """Of a session that has just begun; with `grammar_only`, nothing is copied."""
        super().__init__(shared)
        self.policy = policy  # decides how far to draft and what to propose
        self.target_vocab_size = target_vocab_size  # the width of the target's logits
        self.has_model = has_model  # whether it can go on where a copy ends
        self.search = self._new_search() if self.copies and not grammar_only else None
        processors = self.settings.logits_processors
        # What the text's grammar forces; None without one.
        self.forced = next((each.forced_text() for each in processors if isinstance(each, Forcing)), None)
        # The guesses that continue the committed text.
        self.tree = LookaheadTree(self.opened.prompt[-1], len(self.opened.prompt) - 1)
        self.standing = Standing.NEW  # whether the target waits for its proposals
        self.is_leaving = False  # whether nothing more is drafted; see `protocol.lookahead_tree.withdrawal`
        self.num_rested = 0  # rounds of the last rest
        self.num_idle_rounds = 0  # rounds in a row in which the target judged no copied token
        self.verdict_due_s = 0.0  # when the verdict on the last proposal was expected, in seconds on the actors' clock
        self._copied: list[Guess] = []  # after the root
        self._is_copying = False

    @property
    def is_ready(self) -> bool:
        """Whether the target waits for proposals."""
        return self.standing is Standing.READY

    @property
    def is_late(self) -> bool:
        """Whether the target has stopped waiting for a proposal, although the drafter was ready."""
        return self.standing is Standing.LATE

    @property
    def has_left(self) -> bool:
        """Whether the drafter has no further part in the session."""
        return self.state.phase in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED)

    @property
    def copies(self) -> bool:
        """Whether tokens may be copied; not if the user has fixed the lookahead of a draft model."""
        return not self.has_model or isinstance(self.policy, AutoPolicy)

    def _new_search(self) -> CopySearch:
        """The search in the prompt; before it, in the user's prediction, if there is one."""
        prompt, prediction = self.opened.prompt, self.settings.prediction
        search = CopySearch()
        if prediction:
            # With the end of the prompt before it, the prediction is found as soon as the answer begins.
            search.append(prompt[-MAX_MATCH:])
            search.append(prediction)
        search.append(prompt)
        return search

    def follow(self, commit: Commit, num_judged: int = 0) -> bool:
        """Advance the tree over a commit, before which `num_judged` drafted tokens were judged, and calibrate the
        drafter's confidence. True for a hit: the commit's last token was in the tree, too.
        """
        policy = self.policy
        if isinstance(policy, AutoPolicy):
            for index, guess, was_right in self.tree.outcomes(commit.tokens):
                # A draw that was not judged might have been accepted even if it differs from the committed token.
                if index < num_judged or self.settings.rule == "match":
                    policy.calibration.observe(guess, was_right)
            # Copies that were not judged count, too, under any rule: a copied token is not drawn at random, so it
            # equals the committed token as often as it would be accepted.
            for guess, token in zip(self._copied, commit.tokens, strict=False):
                was_right = guess.token == token
                policy.calibration.observe(guess, was_right)
                if not self.has_model:
                    policy.calibration.average(float(was_right))
                if not was_right:
                    break
        was_hit = self.tree.advance(commit.tokens)
        if self.search is not None:
            self.search.append(commit.tokens)
        if self.forced is not None:
            self.forced.append(commit.tokens)
        self.copy()
        return was_hit

    def copy(self) -> None:
        """Put into the tree what the grammar forces, and what followed earlier occurrences of the text's end."""
        policy = self.policy
        if self.search is None and self.forced is None:
            return
        before = self._copied
        self._copied = policy.copied(self._guesses(self._chained(self._max_copied)), then_drafts=self.has_model)
        is_awake = self.state.phase is not SessionPhase.RESTING  # one that rests takes part in no pass over proposals
        self.count_copying(is_awake and bool(self._copied) and self._copied[0].confidence >= LIKELY)
        if before or self._copied:
            self.tree.copy(self._copied)

    def count_copying(self, is_copying: bool) -> None:
        """Count the session among those with something to copy, or no longer; one of a fixed lookahead never counts."""
        if isinstance(self.policy, AutoPolicy):
            self.policy.prices.num_copying += is_copying - self._is_copying
            self._is_copying = is_copying

    def force_after(self, node: Node) -> None:
        """Put what the grammar forces after a drafted token into the tree."""
        if self.can_continue(node) and (found := self.forced_after(self.tree.path(node))):
            self.tree.copy(self.policy.copied(self._guesses(found), then_drafts=True), node)

    @property
    def _max_copied(self) -> int:
        """One more token than may be proposed, as a guess at the token that the verdict adds."""
        most = 1 + (self.policy.lookahead if isinstance(self.policy, ChainPolicy) else MAX_LOOKAHEAD)
        return most if self.state.remaining is None else min(most, self.state.remaining)

    def _guesses(self, tokens: Iterable[Forced | Copied]) -> Iterator[Guess]:
        for found in itertools.islice(tokens, self._max_copied):
            yield Guess(found.token, found.confidence, raw=found.confidence, copy_kind=found.kind)
            if found.token in self.opened.stop_tokens:
                return

    def _chained(self, num_tokens: int) -> Iterator[Forced | Copied]:
        """Text that is forced, a copy as far as the grammar allows it, more forced text, and so on."""
        if self.forced is None:
            yield from self._copies(num_tokens, ())
            return
        beyond: tuple[int, ...] = ()
        while len(beyond) < num_tokens:
            found: Sequence[Forced | Copied] = self.forced_after(beyond)
            if not found:
                found = list(self._copies(min(MAX_MATCH, num_tokens - len(beyond)), beyond))
                found = found[: self.forced.num_allowed(beyond, [each.token for each in found])]
            if not found:
                return
            yield from found
            beyond += tuple([each.token for each in found])

    def forced_after(self, beyond: Sequence[int]) -> list[Forced]:
        """What the grammar forces after some drafted tokens; for a fixed lookahead nothing that is in doubt."""
        if self.forced is None:
            return []
        max_doubt = 1 if self.has_model and not isinstance(self.policy, AutoPolicy) else 2
        size = self.target_vocab_size  # a tokenizer may have more tokens than the model
        return list(
            itertools.takewhile(lambda each: each.doubt <= max_doubt and each.token < size, self.forced.after(beyond))
        )

    def _copies(self, num_tokens: int, beyond: Sequence[int]) -> Iterator[Copied]:
        if self.search is None:
            return iter(())
        # A match of one token is seldom right: only for a policy that weighs its price, without a model that guesses
        # better.
        shortest = 1 if isinstance(self.policy, AutoPolicy) and not self.has_model else 2
        return self.search.lookup(num_tokens, beyond, shortest=shortest)

    @property
    def max_proposal(self) -> int:
        """Largest useful proposal. The verdict brings a token of its own, so the last one need not be proposed."""
        remaining = self.state.remaining
        return MAX_LOOKAHEAD if remaining is None else min(MAX_LOOKAHEAD, remaining - 1)

    @property
    def max_depth(self) -> int:
        """How many drafted tokens beyond the committed text can be of use, >= 0; 0 if nothing is drafted."""
        return 0

    def can_continue(self, node: Node) -> bool:
        """Whether a node's token does not end the text."""
        return node is self.tree.root or node.token not in self.opened.stop_tokens

    def num_to_feed(self, node: Node) -> int:
        """How many tokens must be fed to draft after a node."""
        return 0

    def view(self, now_s: float, queue_slack_s: float = 0.0, *, may_draft: bool = True) -> PolicyView:
        """What the policy may look at now; with `may_draft` False, only what has been drafted by now counts."""
        is_verifying = self.state.phase is SessionPhase.VERIFYING
        return PolicyView(
            self.tree,
            self.max_proposal,
            self.max_depth,
            self.can_continue if may_draft else lambda _: False,
            self.num_to_feed,
            now_s,
            verdict_due_s=self.verdict_due_s if is_verifying else None,
            queue_slack_s=queue_slack_s,
        )

    def proposal(self, nodes: list[Node]) -> Proposal:
        """A proposal of a chain of nodes."""
        state = self.state
        guesses = [node.best for node in nodes if node.best is not None]
        probs = () if self.settings.rule == "match" else tuple(guess.probs for guess in guesses)
        # A fixed lookahead is what the user wants verified, whatever it costs. Under the rejection rule, whether a
        # token is judged must not depend on the tokens after it, which were drafted because of it.
        may_cut = isinstance(self.policy, AutoPolicy) and self.settings.rule == "match"
        reach = tuple(node.reach for node in nodes) if may_cut else ()
        tokens = tuple(guess.token for guess in guesses)
        num_stale = sum(1 for _ in itertools.takewhile(self.tree.is_stale, nodes))
        drafters = tuple(guess.drafter for guess in guesses)
        return Proposal(self.id, state.round, state.next_position, tokens, probs, reach, num_stale, drafters)


S = TypeVar("S", bound=DrafterSession)


class Drafter(Actor[S]):
    """An actor that proposes tokens. Without it, a session goes on, only slower."""

    rest_rounds: ClassVar[int]  # that the drafter leaves to the target alone in the first rest
    max_rest_rounds: ClassVar[int]  # likewise at a time, as rests are prolonged
    _target: Mailbox

    def _forget(self, session: S) -> None:
        super()._forget(session)
        session.count_copying(False)

    async def _let_go(self, session: S) -> None:
        if session.id in self._sessions:
            self._forget(session)

    def _hand_over(self, message: Message) -> None:
        session = self._sessions.get(message.session)
        # The target may have sent it before it knew of the drafter's withdrawal. Such a session ends by itself.
        if session is not None and session.state.phase is not SessionPhase.UNDRAFTED:
            super()._hand_over(message)
            self._look_at(session)

    def _give_up(self, session: S, error: Exception) -> None:
        """Leave a session to the target because of an error, and keep its cache from other sessions."""
        try:
            self._fail(session, error)
        except Exception as of_its_own:  # its decisions have failed, too
            self._fail(session, of_its_own)
        session.is_broken = True

    def _fail(self, session: S, error: Exception) -> None:
        """Leave a session to the target because of an error. It costs speed, never text."""
        if not session.is_leaving:
            logger.warning("drafting failed, session %d goes on without: %s", session.id, error, exc_info=error)
            session.shared.counts.draft_failures += 1
        if session.is_leaving or session.is_broken:
            # The decisions themselves have failed. They do not depend on which tokens were drawn, so leaving does not.
            self._withdraw(session, at_once=True)
        else:
            self._leave(session)

    def _leave(self, session: S) -> None:
        session.is_leaving = True
        self._withdraw(session)

    def _withdraw(self, session: S, *, at_once: bool = False) -> None:
        """Leave a session to the target, which is faster alone than with empty proposals; if `withdrawal` allows it."""
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
            self._look_at(session)

    def _rest(self, session: S, num_rounds: int | None = None) -> None:
        """Leave some rounds to the target, by default `rest_rounds`, and more each time that a rest is prolonged."""
        was_resting = session.state.phase is SessionPhase.RESTING
        num_rounds = num_rounds or self.rest_rounds
        if was_resting:
            num_rounds = max(num_rounds, min(2 * session.num_rested, self.max_rest_rounds))
        rest = Rest(session.id, session.state.round + num_rounds)
        if session.state.rest(rest):
            session.num_rested = num_rounds
            session.count_copying(False)
            self._target.send_nowait(rest)
            if not was_resting:
                self._note(session, "rest", num_tokens=num_rounds)

    @property
    def _max_idle_rounds(self) -> int:
        """`MAX_IDLE_ROUNDS`, and fewer where several sessions share passes: all wait for the one that is awake."""
        return 2 * MAX_IDLE_ROUNDS // max(2, self.prices.num_texts)

    def _follow(self, session: S, message: Verdict | Rested) -> Commit | None:
        """Commit what the target has committed. None if the message was stale, and nothing changed."""
        state, start, proposal = session.state, session.state.next_position, session.state.outstanding
        commit: Commit | None = None
        if isinstance(message, Verdict):
            commit = state.apply(message)
            if commit is not None and proposal is not None:
                judged_some = any(each != "model" for each in proposal.drafters[: message.num_judged])
                session.num_idle_rounds = 0 if judged_some else session.num_idle_rounds + 1
        elif state.follow(message):
            commit = Commit(session.id, message.round, start, message.tokens, 0, resting=True)
        if commit is None:
            session.shared.counts.stale_proposals += 1
        return commit

    def _send_proposal(self, session: S, proposal: Proposal) -> None:
        session.state.propose(proposal)
        self._target.send_nowait(proposal)
        self._note(session, "proposal", round=proposal.round, num_tokens=len(proposal.tokens), tokens=proposal.tokens)

    def _count_hit(self, session: S, round: int, was_hit: bool) -> None:
        if was_hit:
            session.shared.counts.lookahead_hits += 1
            self._note(session, "hit", round=round, num_tokens=len(session.tree.chain()))
        else:
            session.shared.counts.lookahead_misses += 1
            self._note(session, "miss", round=round)
