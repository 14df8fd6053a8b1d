"""The drafter without a model: proposes what came after the same words earlier in the session's own text."""

from __future__ import annotations

from collections.abc import Callable

import trio

from actors.actor import Actor, Part
from actors.session import Session
from protocol.books import State
from protocol.errors import ProtocolError
from protocol.lookahead import lookahead_for
from protocol.messages import Message, Proposal, Verdict
from protocol.ngram import PromptLookup
from protocol.trace import Event
from protocol.tree import Guess, LookaheadTree, Node

# Tokens of a prompt that are indexed in a row: a few milliseconds at most, in which nothing else happens.
INDEXED_IN_A_ROW = 256


class LookupPart(Part):
    """The lookup's part in one session: its books, the index over its text, and what was found there."""

    def __init__(self, session: Session, hear: Callable[[LookupPart, Verdict], None]) -> None:
        super().__init__(session)
        self._hear = hear
        opened = session.opened
        self.index = PromptLookup()
        self.tree = LookaheadTree(opened.prompt[-1], len(opened.prompt) - 1)
        self.lookahead = lookahead_for(opened.settings.lookahead)

    def receive(self, message: Message) -> None:
        """Take a verdict, and answer it."""
        if not isinstance(message, Verdict):
            raise ProtocolError(f"the drafter was handed {message!r}")
        self._hear(self, message)
        self.wake()

    def look_up(self) -> None:
        """Grow the tree anew from the committed text, by a chain of what is found."""
        books = self.books
        self.tree = LookaheadTree(books.committed[-1], books.next_position - 1)
        # One more than may be proposed: a guess at the token that the target puts after the proposal.
        most = self.lookahead.most + 1
        if (found := self.index.lookup(most=most if books.remaining is None else min(most, books.remaining))) is None:
            return
        node: Node = self.tree.root
        for token, confidence in zip(found.tokens, found.confidences, strict=True):
            node = self.tree.expand(node, Guess(token, confidence))
            if token in self.session.opened.stop_tokens:
                return  # nothing comes after the end of the text

    def next_proposal(self) -> Proposal:
        """What was found, or nothing."""
        books = self.books
        # The verdict brings a token of its own, so the last one that may come need not be proposed.
        limit = self.lookahead.most if books.remaining is None else books.remaining - 1
        nodes = self.lookahead.proposal(self.tree, limit, can_grow=False) or []
        probs = () if books.opened.settings.rule == "match" else (None,) * len(nodes)
        return Proposal(self.id, books.round, books.next_position, tuple(node.token for node in nodes), probs)


class LookupActor(Actor[LookupPart]):
    """Looks up, for all sessions; has no model and no thread, and answers a verdict as it hears it."""

    name = "draft"
    busy_seconds = 0.0  # there are no jobs

    def __init__(
        self,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
        *,
        target: trio.MemorySendChannel[Message],
    ) -> None:
        """As `Actor`, and:

        Args:
            target: the target's mailbox.
        """
        super().__init__(on_event, clock)
        self._target = target

    def _join(self, session: Session) -> LookupPart:
        return LookupPart(session, self._hear)

    async def _take_part(self, part: LookupPart) -> None:
        prompt = part.session.opened.prompt
        for begin in range(0, len(prompt), INDEXED_IN_A_ROW):
            part.index.append(prompt[begin : begin + INDEXED_IN_A_ROW])
            await trio.lowlevel.checkpoint()
        self._propose(part)
        while part.books.state is not State.CLOSED:
            await part.change()

    def _propose(self, part: LookupPart) -> None:
        part.look_up()
        proposal = part.next_proposal()
        part.books.propose(proposal)
        self._target.send_nowait(proposal)
        self._note(part, "proposal", round=proposal.round, num_tokens=len(proposal.tokens))

    def _hear(self, part: LookupPart, verdict: Verdict) -> None:
        """Move on to what a verdict has committed, and propose what comes after it."""
        commit = part.books.apply(verdict)
        if commit is None:
            part.session.counts.stale_proposals += 1
            return
        if commit.finish_reason is not None:
            return
        part.index.append(commit.tokens)
        if part.tree.advance(commit.tokens):
            part.session.counts.lookahead_hits += 1
            self._note(part, "hit", round=verdict.round, num_tokens=len(part.tree.chain()))
        else:
            part.session.counts.lookahead_misses += 1
            self._note(part, "miss", round=verdict.round)
        self._propose(part)
