"""The drafter: grows the lookahead tree, also while the target verifies, and proposes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import cast

import attrs
import mlx.core as mx
import trio

from actors.actor import Actor, Part
from actors.model import Line, Model, Rung
from actors.prefill import prefill
from actors.session import Session
from actors.worker import Job, Worker
from protocol.acceptance import choices, distribution, draw
from protocol.books import State
from protocol.errors import OutriderError, ProtocolError
from protocol.held import Plan
from protocol.lookahead import lookahead_for
from protocol.messages import Message, Open, Proposal, Verdict, Withdraw
from protocol.randomness import Purpose, key_for
from protocol.settings import MAX_LOOKAHEAD
from protocol.trace import Event
from protocol.tree import Guess, LookaheadTree, Node

logger = logging.getLogger("outrider")


class DraftPart(Part):
    """The drafter's part in one session: its books, its tree, and what it decides from them."""

    def __init__(
        self, session: Session, context_length: int | None, hear: Callable[[DraftPart, Verdict], None]
    ) -> None:
        super().__init__(session)
        self._hear = hear
        opened = session.opened
        self.tree = LookaheadTree(opened.prompt[-1], len(opened.prompt) - 1)
        self.lookahead = lookahead_for(opened.settings.lookahead)
        self.context_length = context_length
        self.is_ready = False  # prefilled
        # False once the cache could not lose again what is not committed: then only committed tokens
        # are fed, and one token beyond them can be guessed.
        self.can_look_ahead = True

    def receive(self, message: Message) -> None:
        """Take a verdict, and answer it."""
        if not isinstance(message, Verdict):
            raise ProtocolError(f"the drafter was handed {message!r}")
        # At once, whatever the task is waiting for: where the text was drafted for, the next proposal
        # is there already.
        self._hear(self, message)
        self.wake()

    @property
    def is_past_context(self) -> bool:
        """Whether the text has outgrown the drafter: the token at position n is drafted by feeding n tokens."""
        return self.context_length is not None and self.books.next_position > self.context_length

    @property
    def useful_depth(self) -> int:
        """How many tokens beyond the committed text are worth a thought."""
        if not self.can_look_ahead:
            return 1
        most = MAX_LOOKAHEAD * 2 + 1
        if self.books.remaining is not None:
            most = min(most, self.books.remaining)
        if self.context_length is not None:
            most = min(most, self.context_length - self.books.next_position + 1)
        return max(0, most)

    def next_expansion(self) -> Node | None:
        """What to draft after next, or None to rest."""
        node = self.lookahead.expansion(self.tree, self.useful_depth)
        # Nothing comes after the end of the text.
        return None if node is None or self._ends_text(node) else node

    def next_proposal(self) -> Proposal | None:
        """What to send now, or None to draft on, or because it is not the drafter's turn."""
        books = self.books
        if books.state is not State.PROPOSING or not self.is_ready:
            return None
        # The verdict brings a token of its own, so the last one that may come need not be proposed.
        limit = self.lookahead.most if books.remaining is None else books.remaining - 1
        nodes = self.lookahead.proposal(self.tree, limit, can_grow=self.next_expansion() is not None)
        if nodes is None:
            return None
        guesses = [node.guess for node in nodes if node.guess is not None]
        return Proposal(
            self.id,
            books.round,
            books.next_position,
            tuple(guess.token for guess in guesses),
            tuple(guess.probs for guess in guesses if guess.probs is not None),
        )

    def _ends_text(self, node: Node) -> bool:
        return node is not self.tree.root and node.token in self.session.opened.stop_tokens


class DraftActor(Actor[DraftPart]):
    """Drafts one token a job, for all sessions in turn."""

    name = "draft"

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        *,
        target: trio.MemorySendChannel[Message],
        target_vocab_size: int,
    ) -> None:
        """As `Actor`, and:

        Args:
            target: the target's mailbox.
            target_vocab_size: the width of its logits.
        """
        super().__init__(model, worker, on_event)
        self._target = target
        self._target_vocab_size = target_vocab_size

    def _join(self, session: Session) -> DraftPart:
        return DraftPart(session, self.model.context_length, self._hear)

    async def _take_part(self, part: DraftPart) -> None:
        opened = part.session.opened
        if part.is_past_context:
            self._withdraw(part)
            return
        try:
            line = await self.worker.run(Job("open", partial(self.model.open_line, beside_another=True), part.id))
            try:
                await prefill(self.worker, line, part.held, opened)
                part.is_ready = True
                await self._draft_on(part, line)
            finally:
                with trio.CancelScope(shield=True):
                    await self.worker.run(Job("close", line.close, part.id))
        except OutriderError as error:
            # It costs speed, never text: the target goes on by itself.
            logger.warning("drafting failed, session %d goes on without: %s", part.id, error, exc_info=error)
            part.session.counts.draft_failures += 1
            self._withdraw(part)

    def _withdraw(self, part: DraftPart) -> None:
        """Leave the session to the target, which is faster alone than with empty proposals."""
        self._note(part, "withdraw")
        part.books.withdraw(Withdraw(part.id))
        self._target.send_nowait(Withdraw(part.id))

    async def _draft_on(self, part: DraftPart, line: Line) -> None:
        """Draft, and send proposals, until the session is over."""
        while part.books.state is not State.CLOSED:
            if part.is_past_context:
                self._withdraw(part)
                return
            self._propose(part)
            node = part.next_expansion()
            if node is None:
                await part.change()
                continue
            guess = await self._draft(part, line, node)
            # The text may have gone another way meanwhile, and taken the node with it.
            if guess is not None and node.alive:
                part.tree.expand(node, guess)

    async def _draft(self, part: DraftPart, line: Line, node: Node) -> Guess | None:
        beyond = part.tree.path(node)
        plan = part.held.plan(part.books.committed, beyond)
        if plan.keep < len(part.held):
            self._note(part, "rewind", num_tokens=len(part.held) - plan.keep)
        drafted = await self.worker.run(
            Job(
                "draft",
                partial(
                    draft,
                    line,
                    plan,
                    len(part.books.committed),
                    part.session.opened,
                    self._target_vocab_size,
                ),
                part.id,
                len(plan.feed),
                part.books.round,
            )
        )
        match drafted:
            case Drafted():
                part.can_look_ahead = drafted.can_look_ahead
                part.held.follow(plan)
                return drafted.guess
            case FellBack():
                # Ask again for the same node, with more to feed.
                part.session.counts.draft_replayed_tokens += plan.keep - drafted.length
                part.held.rewind(drafted.length)
            case Refused():
                part.can_look_ahead = False
                part.held.rewind(plan.keep)
        return None

    def _propose(self, part: DraftPart) -> None:
        if (proposal := part.next_proposal()) is not None:
            part.books.propose(proposal)
            self._target.send_nowait(proposal)
            self._note(part, "proposal", round=proposal.round, num_tokens=len(proposal.tokens), tokens=proposal.tokens)

    def _hear(self, part: DraftPart, verdict: Verdict) -> None:
        """Move on to what a verdict has committed."""
        commit = part.books.apply(verdict)
        if commit is None:
            part.session.counts.stale_proposals += 1
            return
        if commit.finish_reason is not None:
            return
        if part.tree.advance(commit.tokens):
            part.session.counts.lookahead_hits += 1
            self._note(part, "hit", round=verdict.round, num_tokens=len(part.tree.chain()))
        else:
            part.session.counts.lookahead_misses += 1
            self._note(part, "miss", round=verdict.round)
        self._propose(part)


# --- on the drafter's thread ----------------------------------------------------------------------


@attrs.frozen
class Drafted:
    """A drafted token, and whether the cache could now take one that is not committed and lose it again."""

    guess: Guess
    can_look_ahead: bool


@attrs.frozen
class FellBack:
    """The cache could only go back to a checkpoint, and holds `length` tokens; nothing was fed."""

    length: int


@attrs.frozen
class Refused:
    """The cache could not lose the text again if it came to that; nothing was fed."""


def draft(line: Line, plan: Plan, settled: int, opened: Open, vocab_size: int) -> Drafted | FellBack | Refused:
    """Draft one token.

    Args:
        line: the draft model's cache of this session.
        plan: how to bring it in line with the text that the token comes after.
        settled: length of the committed text; the text to draft after may go beyond it.
        opened: of the session.
        vocab_size: the width of the target's logits. Ids beyond it are not drafted: they are rows
            that pad the draft's embedding.

    Returns: the token, its confidence, and under the rejection rule the distribution that it was drawn from; or
        what stood against it.
    """
    if (length := line.rewind(plan.keep)) < plan.keep:
        return FellBack(length)
    position = plan.keep + len(plan.feed)
    if position > settled and line.prepare(len(plan.feed), settled) is Rung.SINGLE:
        return Refused()
    rows = line.feed(plan.feed, 1)
    assert rows is not None
    logits = rows[:, :vocab_size]
    settings, seed = opened.settings, opened.seed
    # Confidence at temperature 0 is the model's own at 1: an argmax says nothing of how sure it is.
    probs = distribution(logits[0], settings.temperature or 1.0)
    if settings.rule == "match":
        token = choices(logits, settings.temperature, seed, position, vocab_size)[0]
        confidence = probs[token]
        mx.eval(token, confidence)
        sent_with_it = None
    else:
        token = draw(probs, key_for(seed, Purpose.DRAFT, position))
        # What a draw from this q may expect, not what this draw may: a decision to propose a token must
        # not depend on the token (see protocol.lookahead).
        confidence = (probs * probs).sum()
        mx.eval(token, confidence, probs)
        sent_with_it = probs
    line.check(position)
    guess = Guess(cast(int, token.item()), cast(float, confidence.item()), sent_with_it)
    return Drafted(guess, line.prepare(1, settled) is not Rung.SINGLE)
