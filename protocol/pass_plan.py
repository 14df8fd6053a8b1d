"""The pass plan: which rounds share the target's next forward pass, how many tokens of each it reads, and when.

A pass over B texts is as wide as the widest of them, W: the others are padded, so that it costs the time of B·W rows.
Rows of one batch are computed whether or not their texts take part. Each text must feed its missing committed tokens,
and may feed drafted tokens, each worth the probability that it is accepted. The plan is the one with most tokens a
second: Σ expected tokens / (wait + T(B·W)). So rows that cost nothing, on a plateau of T, are used; a text that is no
row yet is left out of a wide pass; and a pass waits for a round that is about to be ready if the target would otherwise
compute that round alone. A round that is left out takes part in the next pass, whatever that costs.

`next_pass` decides what the target does next: it may also read prompts or wait. Chunks of prompts and passes over texts
take turns, so that no text waits for more than a pass and a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import attrs

from protocol.prices import Prices

PassSeconds = Callable[[int], float]  # the seconds of a pass, by the rows that it computes

MAX_MOMENTS = 4  # how many moments at which the pass could begin are compared
# A wait for further rounds must promise to make the pass better by this factor, since their arrival is only estimated.
MIN_GAIN_OF_WAITING = 1.02
# In units of a pass of one row: the longest wait for rounds that are about to be ready; how long past its expected time
# each is waited for; and the wait for texts asked to hurry, which answer at once but share the event loop with others.
MAX_WAIT, PATIENCE, PATIENCE_WITH_HURRIED = 1.0, 0.02, 0.5
# The longest wait for all texts of a fixed lookahead, in units of the time that drafting for all of them takes.
PATIENCE_FOR_ALL = 3.0
# Passes of few sessions after one that has failed, which may cost texts their caches, before more share one again.
SMALL_PASSES = 256


@attrs.frozen
class ReadyRound:
    """A round that could take part in the next pass."""

    # Committed tokens that its cache lacks and it must feed, >= 1: its first new token comes from the last of them.
    num_needed: int
    # For each drafted token, the probability that it and all before it are accepted; each in [0, 1], falling.
    reach: tuple[float, ...] = ()
    was_passed_over: bool = False  # whether the last pass left it out, so that this one must not
    due_s: float = 0.0  # seconds from now until it should be ready, >= 0; 0 if it is
    can_hurry: bool = False  # whether it could also take part earlier, with only the tokens that it must feed
    is_row: bool = False  # whether its text is a row of the batch, which a pass computes in any case

    def after(self, wait_s: float) -> ReadyRound | None:
        """The round as it could take part in a pass that begins after a wait; None if it could not."""
        if self.due_s <= wait_s:
            return self
        return attrs.evolve(self, reach=(), due_s=0.0) if self.can_hurry else None

    def num_drafted(self, width: int) -> int:
        """How many drafted tokens it feeds in a pass of this width."""
        return min(len(self.reach), width - self.num_needed)

    @property
    def max_width(self) -> int:
        """Tokens that it feeds if nothing is left out."""
        return self.num_needed + len(self.reach)


@attrs.frozen
class PassPlan:
    """The next pass."""

    num_drafted: dict[int, int]  # drafted tokens to feed, by the index of each round that takes part
    width: int  # of the pass
    wait_s: float = 0.0  # seconds to wait for those of them that are not ready yet; 0 if all are


def plan_pass(
    rounds: Sequence[ReadyRound],
    seconds: PassSeconds,
    max_batch: int,
    *,
    max_wait_s: float = 0.0,
    num_other_rows: int = 0,
) -> PassPlan:
    """Decide on the next pass over rounds in the order in which they became ready, at least one of which is.

    The first round that is ready takes part in any case, and so do those that were passed over, up to `max_batch`.
    `seconds` are those of a pass by its rows, rising; the batch has `num_other_rows` beside those of the rounds.
    """
    num_rows = num_other_rows + sum(each.is_row for each in rounds)
    best, best_rate = PassPlan({}, 0), -1.0
    # When the pass could begin: now, and then as further rounds become ready.
    dues_s = sorted({each.due_s for each in rounds if 0.0 < each.due_s <= max_wait_s})
    if len(dues_s) >= MAX_MOMENTS:
        dues_s = [dues_s[(len(dues_s) - 1) * i // (MAX_MOMENTS - 2)] for i in range(MAX_MOMENTS - 1)]
    for wait_s in (0.0, *dues_s):
        plan, rate = _plan_at(wait_s, rounds, seconds, max_batch, num_rows)
        if not best.num_drafted or rate > MIN_GAIN_OF_WAITING * best_rate:
            best, best_rate = plan, rate
    return best


def _plan_at(
    wait_s: float, rounds: Sequence[ReadyRound], seconds: PassSeconds, max_batch: int, num_rows: int
) -> tuple[PassPlan, float]:
    """The best pass that begins after a wait, if it computes `num_rows` rows in any case; and its tokens a second."""
    ready = {i: round for i, each in enumerate(rounds) if (round := each.after(wait_s)) is not None}
    first = next(i for i, each in enumerate(rounds) if each.due_s <= 0.0)
    required = [first, *(i for i in ready if rounds[i].was_passed_over and i != first)][:max_batch]
    optional = [i for i in ready if i not in required]
    # The expected tokens of each round, by the number of drafted ones that it feeds.
    expected = {i: list(accumulate(each.reach, initial=1.0)) for i, each in ready.items()}
    least_width = max(ready[i].num_needed for i in required)
    widths = {width for each in ready.values() for width in range(each.num_needed, each.max_width + 1)}
    best_rate, best_members, best_width = -1.0, required, least_width
    for width in sorted(width for width in widths if width >= least_width):
        total = sum(expected[i][ready[i].num_drafted(width)] for i in required)
        others = [
            (ready[i].is_row, expected[i][ready[i].num_drafted(width)], -i)
            for i in optional
            if ready[i].num_needed <= width
        ]
        # Texts that are rows cost nothing more, and the others the same each, so those with most to gain come first.
        others.sort(reverse=True)
        num_computed = num_rows + sum(not ready[i].is_row for i in required)
        for num_others in range(min(len(others), max_batch - len(required)) + 1):
            if num_others > 0:
                is_row, num_tokens, _ = others[num_others - 1]
                total += num_tokens
                num_computed += not is_row
            num_members = len(required) + num_others
            rate = total / max(wait_s + seconds(num_computed * width), 1e-12)
            # Of two equally good plans, take the one with more texts, and then the narrower one.
            if rate > best_rate or (rate == best_rate and num_members > len(best_members)):
                members = [*required, *(-index for *_, index in others[:num_others])]
                best_rate, best_members, best_width = rate, members, width
    num_drafted = {i: ready[i].num_drafted(best_width) for i in sorted(best_members)}
    wait_s = max(ready[i].due_s for i in best_members)
    return PassPlan(num_drafted, best_width, wait_s), best_rate


# --- the next pass --------------------------------------------------------------------------------


@attrs.frozen
class Turn:
    """A text whose next round could begin."""

    round: ReadyRound = ReadyRound(1)  # what it would feed
    lookahead: int | Literal["auto"] = 0  # the session's setting
    is_plain: bool = False  # whether the round is one token of the target's own
    # Whether the pass for that token was launched already, whose result must come before any other pass of the text.
    is_ahead: bool = False
    is_alone: bool = False  # whether it must have a pass to itself
    reads_again: bool = False  # whether it needs a job that reads again what its cache has lost, before any pass
    is_due: bool = False  # whether a chunk of a prompt was read since the round became ready
    since_s: float = 0.0  # when it became ready, in seconds


@attrs.frozen
class Expected:
    """A text whose next round cannot begin yet."""

    awaits_drafter: bool  # whether it waits for a proposal; if not, it waits for its consumer
    is_drafter_ready: bool = False  # whether the drafter has read the text
    lookahead: int | Literal["auto"] = "auto"  # the session's setting
    last: ReadyRound | None = None  # its last round that was in a pass; None if there was none
    due_s: float = 0.0  # when the next one should be ready, as experience says
    can_hurry: bool = False  # whether the drafter can be asked for what it has
    was_hurried: bool = False  # whether it was asked
    is_row: bool = False  # as for `ReadyRound`

    def coming(self, now_s: float, patience_s: float) -> ReadyRound | None:
        """Its next round, as far as it can be foreseen; None if it is not waited for."""
        if self.last is None or self.was_hurried:
            return None
        # If it should be there already, wait a little longer, since its expected time is only a mean.
        due_s = self.due_s + patience_s - now_s
        if due_s <= 0.0 and not self.can_hurry:
            return None
        num_needed = self.last.num_needed if self.last.reach else 1
        due_s = max(due_s, patience_s) if due_s > 0.0 else math.inf
        return ReadyRound(num_needed, self.last.reach, due_s=due_s, can_hurry=self.can_hurry, is_row=self.is_row)


@attrs.frozen
class TargetView:
    """What the target could do."""

    turns: Sequence[Turn]  # texts whose rounds could begin, in the order in which they became ready
    expected: Sequence[Expected]  # the other texts whose prompts were read
    prices: Prices  # of both models
    now_s: float = 0.0  # the time in seconds
    has_prompts: bool = False  # whether there are prompts to read
    most_shared: int = 1  # most texts that may share a pass of this model, >= 1
    max_batch: int = 1  # most texts to have in the next pass, in [1, most_shared]
    idle_since_s: float = -math.inf  # when the last job ended
    hurried_until_s: float = -math.inf  # until when to wait for texts that were asked to hurry

    @property
    def all_are_plain(self) -> bool:
        """Whether all texts that can go on do so without drafts."""
        return not any(each.awaits_drafter for each in self.expected) and all(turn.is_plain for turn in self.turns)


@attrs.frozen
class NextJob:
    """What the target does next: "prompts" to read a chunk, "again" to read again what a text has lost, "plain" for a
    pass without drafts, "verify" for any other pass, "wait" for nothing.
    """

    kind: Literal["prompts", "again", "plain", "verify", "wait"]
    # The texts that take part, as indices of `TargetView.turns`, each with the number of drafted tokens that it feeds.
    num_drafted: dict[int, int] = attrs.field(factory=dict)
    wait_s: float = 0.0  # seconds to wait, > 0, unless something changes first; inf to wait until something does
    hurried: tuple[int, ...] = ()  # whose drafter is to be asked for what it has, as indices of `TargetView.expected`


def next_pass(view: TargetView) -> NextJob:
    """Decide what the target does next. It never waits while there are prompts to read, nor for longer than it may."""
    if view.has_prompts and not any(turn.is_due for turn in view.turns):
        return NextJob("prompts")
    job = _next_round(view)
    return NextJob("prompts") if job.kind == "wait" and view.has_prompts else job


def _next_round(view: TargetView) -> NextJob:
    if not view.turns:
        return NextJob("wait", wait_s=math.inf)
    first = view.turns[0]
    if first.reads_again:
        return NextJob("again", {0: 0})
    if view.most_shared == 1:
        return NextJob("plain" if first.is_plain else "verify", {0: len(first.round.reach)})
    if view.all_are_plain:
        return NextJob("plain", dict.fromkeys(range(min(len(view.turns), view.max_batch)), 0))
    if ahead := [index for index, turn in enumerate(view.turns) if turn.is_ahead]:
        return NextJob("plain", dict.fromkeys(ahead, 0))
    if first.is_alone or len(view.turns) + len(view.expected) == 1:
        return NextJob("verify", {0: len(first.round.reach)})
    sharing = [index for index, turn in enumerate(view.turns) if not turn.is_alone and not turn.reads_again]
    rounds = [view.turns[index].round for index in sharing]
    if (job := _wait_for_more(view, rounds)) is not None:
        return job
    if len(rounds) == 1:
        # For a single text, its drafter's policy has chosen the number of tokens.
        return NextJob("verify", {sharing[0]: len(rounds[0].reach)})
    num_other_rows = sum(each.is_row for each in view.expected)
    num_other_rows += sum(turn.round.is_row for turn in view.turns if turn.is_alone or turn.reads_again)
    plan = plan_pass(rounds, view.prices.verify, view.max_batch, num_other_rows=num_other_rows)
    return NextJob("verify", {sharing[index]: number for index, number in plan.num_drafted.items()})


def _wait_for_more(view: TargetView, rounds: Sequence[ReadyRound]) -> NextJob | None:
    """How a pass over some rounds that are ready waits for others; None to begin it now."""
    now_s, seconds = view.now_s, view.prices.verify
    patience_s = PATIENCE * seconds(1)
    if view.hurried_until_s > now_s and any(each.was_hurried for each in view.expected):
        return NextJob("wait", wait_s=view.hurried_until_s - now_s)
    if (wait_s := _wait_for_all_s(view, len(rounds))) > 0.0:
        return NextJob("wait", wait_s=wait_s)
    found = [(index, each.coming(now_s, patience_s)) for index, each in enumerate(view.expected)]
    coming = [(index, round) for index, round in found if round is not None]
    if not coming:
        return None
    waits_until_s = max(view.turns[0].since_s, view.idle_since_s) + MAX_WAIT * seconds(1)
    all_rounds = [*rounds, *(round for _, round in coming)]
    num_other_rows = sum(each.is_row for each in view.expected) - sum(round.is_row for _, round in coming)
    plan = plan_pass(
        all_rounds, seconds, view.max_batch, max_wait_s=waits_until_s - now_s, num_other_rows=num_other_rows
    )
    if plan.wait_s > 0.0:
        return NextJob("wait", wait_s=plan.wait_s)
    hurried = tuple([coming[index - len(rounds)][0] for index in plan.num_drafted if index >= len(rounds)])
    hurried_s = max(PATIENCE_WITH_HURRIED * seconds(1), 1e-9)
    return NextJob("wait", wait_s=hurried_s, hurried=hurried) if hurried else None


def _wait_for_all_s(view: TargetView, num_ready: int) -> float:
    """Seconds to wait for the proposals of all texts, if all have the same lookahead; <= 0 to begin now."""
    drafted_for = [each for each in view.expected if each.awaits_drafter and each.is_drafter_ready]
    num_texts = num_ready + len(drafted_for)
    sharing = [turn for turn in view.turns if not turn.is_alone and not turn.reads_again]
    # A drafter may rest in "auto"; a plain round at a fixed lookahead is an exception, for which nobody waits.
    lookaheads = {0 if turn.is_plain and turn.lookahead != "auto" else turn.lookahead for turn in sharing}
    lookaheads |= {each.lookahead for each in drafted_for}
    if not drafted_for or len(lookaheads) != 1 or num_texts > view.max_batch:
        return 0.0
    lookahead = lookaheads.pop()
    if lookahead == "auto":
        lookahead = view.prices.best_lookahead()
    if lookahead == 0:
        return 0.0
    num_rows = sum(turn.round.is_row for turn in view.turns) + sum(each.is_row for each in view.expected)
    if not view.prices.one_group_pays(num_texts, lookahead, num_rows=num_rows):
        return 0.0
    together_s = view.prices.draft_together_s(num_texts, lookahead)
    return view.turns[0].since_s + PATIENCE_FOR_ALL * together_s - view.now_s


# --- after a failure ------------------------------------------------------------------------------


@attrs.define
class PassLimit:
    """How many sessions may share a pass after one has failed, as if it had been too large for memory.

    Half as many sessions as were in the pass that failed share one, then twice as many after `SMALL_PASSES`, then
    again after twice as many passes, and so on.
    """

    max_batch: int  # most sessions that share a pass, >= 1
    # Most sessions in the next pass, in [1, max_batch].
    most: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.max_batch, takes_self=True))
    _num_passes: int = attrs.field(default=0, init=False)
    _most_passes: int = attrs.field(default=SMALL_PASSES, init=False)

    def fail(self, num_sessions: int) -> None:
        """Note that a pass over so many sessions has failed."""
        self._num_passes, self.most = 0, max(1, num_sessions // 2)

    def lift(self) -> None:
        """Note that the size of a pass was not why it has failed."""
        self.most = self.max_batch

    def settle(self, num_open: int) -> None:
        """Note how many sessions are open: if they fit into one pass, they are fewer than when it failed."""
        if num_open <= self.most:
            self.most, self._most_passes = self.max_batch, SMALL_PASSES

    def count_pass(self) -> None:
        """Note a pass that has not failed, while fewer sessions than usual may share one."""
        self._num_passes += 1
        if self._num_passes >= self._most_passes:
            self._num_passes, self._most_passes = 0, 2 * self._most_passes
            self.most = min(self.max_batch, 2 * self.most)
