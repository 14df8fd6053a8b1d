"""The state of one session that the runtime and both actors share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import trio

from actors.sampling.logits_pipeline import LogitsPipeline
from protocol.errors import OutriderError
from protocol.messages import Open
from protocol.scores import TokenScore
from protocol.session_state import Commit
from protocol.statistics import Counts
from protocol.stop_strings import Stop

# Tokens by which a text may grow while memory for more is asked for, in passes launched already or in a row.
ASK_BEFORE = 192


class ReasoningLimit(Protocol):
    """How much an answer may reason, and how its reasoning is closed then."""

    def follow(self, committed: Sequence[int]) -> None:
        """Read the text so far, prompt included; each time at least as much as before."""

    @property
    def num_left(self) -> int | None:
        """Tokens that may follow the text that was read before its reasoning is to be closed, >= 0; None for any."""

    def num_to_judge(self, drafted: Sequence[int], num_certain: int, num_closing: int = 0) -> int:
        """How many of some drafted tokens, from the front, one pass may judge: behind none is the reasoning to be
        closed already, by `num_closing` tokens that are forced next.

        Of those after the first `num_certain`, which were drawn at random, none may be left out for what it is: that
        would change the distribution.
        """

    def closing(self, committed: Sequence[int]) -> tuple[int, ...]:
        """The tokens that close the reasoning in which the text ends."""

    def end(self) -> None:
        """Allow no more reasoning."""


@attrs.define(eq=False)
class Session:
    """One generation, as the runtime gives it to the actors, in trio's thread only. What it calls must not raise."""

    opened: Open
    # Where the target puts committed tokens. Bounded, so that a slow consumer slows down the models; closed at the end.
    commits: trio.MemorySendChannel[Commit]
    counts: Counts = attrs.field(factory=Counts)  # statistics that the actors count; the consumer's side counts tokens
    unsent: Commit | None = None  # the last commit, while the channel has no space for it
    error: OutriderError | None = None  # the reason why nothing more comes, if that is not the end of the text
    # Called when no actor works on the session any more and their cached sequences are put away.
    on_left: Callable[[], None] | None = None
    has_left: trio.Event = attrs.field(factory=trio.Event, init=False)  # set then
    _num_actors: int = attrs.field(default=0, init=False)
    is_unwanted: bool = False  # whether nobody will read the rest. May be set in any thread.
    logits_pipeline: LogitsPipeline = attrs.field(
        init=False, default=attrs.Factory(lambda self: LogitsPipeline(self.opened), takes_self=True)
    )
    # Reads each round's tokens before they are committed, once and in order: where a stop string ends the text.
    find_stop: Callable[[Commit], Stop | None] | None = None
    # Of the answer; None if it may reason as long as it wants. The target follows the text with it.
    reasoning_limit: ReasoningLimit | None = None
    # Called when the target should look again: a commit fits now, or the reasoning is to end. Must not wait.
    on_change: Callable[[], None] | None = None
    scores: list[TokenScore] = attrs.field(factory=list)  # of the tokens to score, as far as the target has come
    num_reserved: float = math.inf  # tokens, prompt included, for which there is memory
    # Called once the text has nearly as many; must not wait. It either raises `num_reserved`, or sets `awaits_memory`.
    on_full: Callable[[], None] | None = None
    awaits_memory: bool = False  # whether no round may begin, because the text has nearly `num_reserved` tokens

    def end(self, error: OutriderError | None = None) -> None:
        """Close the commits, and record the reason. The first reason stands."""
        if self.error is None:
            self.error = error
        self.commits.close()

    def join(self) -> None:
        """Count an actor that begins to work on the session."""
        self._num_actors += 1

    def leave(self) -> None:
        """Count an actor that has ended its work; the last one calls `on_left`."""
        self._num_actors -= 1
        if self._num_actors == 0:
            self.has_left.set()
            if self.on_left is not None:
                self.on_left()

    def note_length(self, num_tokens: int) -> None:
        """Note that the text has so many tokens now, prompt included: ask for memory for more in time."""
        if num_tokens + ASK_BEFORE >= self.num_reserved and not self.awaits_memory and self.on_full is not None:
            self.on_full()

    @property
    def is_blocked(self) -> bool:
        """Whether no round may begin: the last commit does not fit into the channel, or memory is short."""
        return self.awaits_memory or (self.unsent is not None and self.room <= 0)

    @property
    def room(self) -> float:
        """How many commits fit into the channel."""
        statistics = self.commits.statistics()
        return statistics.max_buffer_size - statistics.current_buffer_used

    def make_room(self) -> None:
        """Note that the consumer has taken something: send the unsent commit. Never waits."""
        if self.unsent is not None:
            self.deliver_nowait()
            if self.on_change is not None:
                self.on_change()

    def deliver_nowait(self) -> None:
        """Send the unsent commit, if there is space for it. Never waits."""
        if self.unsent is None:
            return
        try:
            self.commits.send_nowait(self.unsent)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # later, or its consumer has gone
        self.unsent = None
