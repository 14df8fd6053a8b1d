"""Prices: what a forward pass costs and what speculating gains, measured while the models work.

T_v(n) is the time of a target's pass over n rows, of however many texts. T_d is the time of a draft step. κ is the
share of a draft step by which it delays the target when both run. R is the rate of committed tokens, of all texts
together. Machines, caches and other programs change, so all of these are averages in which the past fades.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from protocol.calibration import Calibration
from protocol.pass_price import MAX_SURPRISE, PassPrice


@attrs.define
class Mean:
    """An exponentially weighted mean."""

    memory: float = 50.0  # in observations, > 1
    value: float = 0.0  # 0 before the first
    _weight: float = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._weight = min(self.memory, self._weight + 1.0)
        self.value += (value - self.value) / self._weight

    @property
    def is_known(self) -> bool:
        """Whether there was a value."""
        return self._weight > 0


@attrs.frozen
class Estimates:
    """A snapshot of what a runtime has measured of its two models; 0 where nothing was measured yet.

    Attributes:
        verify_seconds: T_v(1): a verify pass over one token, with no drafter beside it.
        verify_seconds_per_token: what each further token adds to it, on average over the next four.
        draft_seconds: T_d: a draft step while the target waits.
        contention: κ: the share of a draft step's time by which it delays the target when both run; about in [0, 1].
        plain_seconds: a token decoded without a drafter.
        tokens_per_second: R, recently, while speculating.
        acceptance: the probability, recently, that a drafted token is accepted, in [0, 1].
        verify_table: T_v as pairs (rows, seconds), both rising; empty before the first pass.
    """

    verify_seconds: float
    verify_seconds_per_token: float
    draft_seconds: float
    contention: float
    plain_seconds: float
    tokens_per_second: float
    acceptance: float
    verify_table: tuple[tuple[int, float], ...] = ()

    @property
    def is_plausible(self) -> bool:
        """Whether the prices go together: a pass over one token and a plainly decoded token are the same work, and no
        pass takes much longer than its tokens one by one. If not, the machine did something else meanwhile.
        """
        one, other = sorted((self.verify_seconds, self.plain_seconds))
        passes = ((rows * self.verify_seconds, seconds) for rows, seconds in self.verify_table)
        return all(less == 0.0 or more < IMPLAUSIBLE * less for less, more in ((one, other), *passes))


MeasurementKind = Literal["draft", "reading", "verify", "gap", "plain", "round", "rate"]
# What the drafter measures; the target measures the rest.
OF_DRAFTER: frozenset[MeasurementKind] = frozenset({"draft", "reading", "rate"})


@attrs.frozen
class Measurement:
    """What one actor has measured, for the prices of the other actor if that is in another process."""

    # A draft step, a pass in which the drafter read some text, a target's pass, a gap between passes, a round without a
    # drafter, a speculative round; or that the speculative rate was replaced by the modelled one.
    kind: MeasurementKind
    # Tokens that the draft step fed, rows of the pass, texts of the round without a drafter, or tokens that the
    # speculative round committed.
    number: int = 0
    seconds: float = 0.0  # that it took
    ended_s: float = 0.0  # when it ended, on the clock of this process
    beside_target: bool = False  # whether the target worked beside the draft step


IMPLAUSIBLE = 10.0  # a price that is off by this factor is not plausible
LAST_ROW_OF_SLOPE = 5  # the row up to which `Estimates.verify_seconds_per_token` averages
# How many rules' calibrations are remembered: clients choose temperatures as they like, and each makes a rule.
MAX_RULES = 16
# In the first few of this many rounds, a fixed lookahead works ahead whatever the prices say, to keep them current.
TRIED_EVERY_ROUNDS, TRIED_ROUNDS = 512, 8
NEARLY_BEST = 0.99  # the share of the best rate from which on another lookahead is as good
RATE_MEMORY_ROUNDS = 40.0  # rounds over which the speculative rate is averaged


@attrs.define
class Prices:
    """Everything that a runtime measures of its models. It outlives streams, which begin with what was measured."""

    verify: PassPrice = attrs.field(factory=PassPrice)  # seconds of a target's pass, by rows
    draft_alone: PassPrice = attrs.field(factory=PassPrice)  # seconds of a draft step while the target waits, by rows
    draft_slowdown: Mean = attrs.field(factory=Mean)  # by what factor a draft step takes longer beside the target
    num_texts: int = 1  # how many texts could share a target's pass now, >= 1
    num_copying: int = 0  # how many of the texts that do not rest have something to copy now
    # Idle seconds before a pass whose proposals are all copied; none without proposals, as passes are started ahead.
    gap_s: Mean = attrs.field(factory=lambda: Mean(memory=30.0))
    drafts_together: bool = False  # whether texts share the drafter's passes, too
    # How often, recently, the text that a verdict committed had been drafted for, in [0, 1].
    hit_rate: Mean = attrs.field(factory=lambda: Mean(memory=30.0))
    # Seconds after a draft step beside the target in which the target still has only its share of the cores; 0 where
    # the models do not share cores.
    core_hold_s: float = 0.0
    tell: Callable[[Measurement], None] = lambda measured: None  # called with each measurement; must not wait or raise
    _calibrations: dict[object, Calibration] = attrs.field(factory=dict)
    _last_calibration: Calibration = attrs.field(factory=Calibration)
    # Seconds of a round without drafts, by how many texts share its pass.
    _plain_rounds_s: dict[int, Mean] = attrs.field(factory=lambda: {1: Mean()})
    _num_rounds: int = 0  # speculative ones
    # Tokens and seconds of speculative rounds, with the same weights, by the bit length of the number of texts.
    _speculative: dict[int, tuple[float, float]] = attrs.field(factory=dict)
    # When the drafter worked, and until when the target had fewer cores for it: (began, held_until).
    _drafting: deque[tuple[float, float]] = attrs.field(factory=lambda: deque(maxlen=256))
    _unpriced_passes: deque[tuple[int, float, float]] = attrs.field(factory=deque)  # (width, began, ended)
    _pays_ahead: dict[tuple[int, int], bool] = attrs.field(factory=dict)  # by lookahead and number of texts
    _best_lookaheads: dict[int, int] = attrs.field(factory=dict)  # by number of texts

    # --- measurements -----------------------------------------------------------------------------

    def observe_draft_step(self, width: int, began_s: float, ended_s: float, *, beside_target: bool) -> None:
        """Add a draft step over `width` tokens, and whether the target worked meanwhile."""
        seconds = ended_s - began_s
        self.tell(Measurement("draft", width, seconds, ended_s, beside_target=beside_target))
        if not beside_target or not self.draft_alone.is_known:
            self.draft_alone.observe(width, 0.0, seconds)
        elif (expected_s := self.draft_alone(width)) > 0:
            self.draft_slowdown.observe(min(seconds / expected_s, MAX_SURPRISE))
            if self.draft_slowdown.value < 1.0:
                # No step is faster beside the target than alone: the price of a step alone is too high, from a busier
                # time.
                self.draft_alone.observe(width, 0.0, seconds)
        self._note_drafting(began_s, ended_s, beside_target=beside_target)

    def observe_draft_reading(self, began_s: float, ended_s: float) -> None:
        """Add a pass in which the drafter read some text, so that passes of the target beside it do not seem dear."""
        self.tell(Measurement("reading", seconds=ended_s - began_s, ended_s=ended_s))
        self._note_drafting(began_s, ended_s, beside_target=True)

    def _note_drafting(self, began_s: float, ended_s: float, *, beside_target: bool) -> None:
        held_until = ended_s + self.core_hold_s if beside_target else ended_s
        if self._drafting:
            held_until = max(held_until, self._drafting[-1][1])
        self._drafting.append((began_s, held_until))
        self._price_passes(until_s=ended_s)

    def observe_verify_pass(self, rows: int, began_s: float, ended_s: float) -> None:
        """Add a target's pass over `rows` rows, those of padding included."""
        self.tell(Measurement("verify", rows, ended_s - began_s, ended_s))
        self._price_passes(until_s=ended_s)
        # Priced later: a draft step that overlaps the end of this pass is reported only when it ends.
        self._unpriced_passes.append((rows, began_s, ended_s))

    def observe_gap(self, seconds: float) -> None:
        """Add the gap before a pass whose proposals are all copied."""
        self.tell(Measurement("gap", seconds=seconds))
        self.gap_s.observe(seconds)

    def observe_plain_round(self, seconds: float, *, num_texts: int = 1) -> None:
        """Add a round without drafts, from the last verdict to its own, in a pass that `num_texts` shared."""
        self.tell(Measurement("plain", num_texts, seconds))
        known = self._plain_rounds_s.setdefault(num_texts, Mean())
        if known.value > 0.0:
            seconds = min(seconds, MAX_SURPRISE * known.value)
        known.observe(seconds)

    def observe_round(self, num_tokens: int, seconds: float) -> None:
        """Add a speculative round: the tokens that it committed, and the time from the last verdict to its own."""
        self.tell(Measurement("round", num_tokens, seconds))
        self._num_rounds += 1
        keep = 1.0 - 1.0 / RATE_MEMORY_ROUNDS
        total_tokens, total_s = self._speculated
        self._speculative[self.num_texts.bit_length()] = keep * total_tokens + num_tokens, keep * total_s + seconds

    def reset_speculative_rate(self) -> None:
        """Replace the measured speculative rate by the modelled one, with the weight of a few rounds."""
        self.tell(Measurement("rate"))
        seconds = 3.0 * self.verify(2)
        rate = self.modelled_rate(self._last_calibration.mean_acceptance)
        self._speculative[self.num_texts.bit_length()] = seconds * rate, seconds

    def take(self, measured: Measurement) -> None:
        """Add what the actor in the other process has measured."""
        number, seconds, ended_s = measured.number, measured.seconds, measured.ended_s
        match measured.kind:
            case "draft":
                self.observe_draft_step(number, ended_s - seconds, ended_s, beside_target=measured.beside_target)
            case "reading":
                self.observe_draft_reading(ended_s - seconds, ended_s)
            case "verify":
                self.observe_verify_pass(number, ended_s - seconds, ended_s)
            case "gap":
                self.observe_gap(seconds)
            case "plain":
                self.observe_plain_round(seconds, num_texts=number)
            case "round":
                self.observe_round(number, seconds)
            case "rate":
                self.reset_speculative_rate()

    def known_of_target(self) -> Iterator[Measurement]:
        """What was measured of the target so far, for a drafter that begins in another process."""
        for rows, seconds in self.verify.table():
            yield Measurement("verify", rows, seconds)
        for num_texts, known in self._plain_rounds_s.items():
            if known.is_known:
                yield Measurement("plain", num_texts, known.value)

    @property
    def acceptance(self) -> float:
        """The probability, recently, that a drafted token is accepted, in [0, 1]."""
        return self._last_calibration.mean_acceptance

    def take_drafter(self, acceptance: float, hit_rate: float | None, *, drafts_together: bool) -> None:
        """Set what the drafter in the other process knows; see `acceptance`, and the attributes for the others."""
        self._last_calibration.mean_acceptance = acceptance
        self.hit_rate = Mean(memory=30.0)
        if hit_rate is not None:
            self.hit_rate.observe(hit_rate)
        self.drafts_together = drafts_together

    def forget_target(self) -> None:
        """Forget what the target's passes cost. Only before anything refers to `verify`, which is replaced."""
        self.verify = PassPrice()
        self._plain_rounds_s = {1: Mean()}
        self._unpriced_passes.clear()

    def forget_drafter(self) -> None:
        """Forget what the last drafter cost and how often it was right, because another one comes."""
        self.draft_alone = PassPrice()
        self.draft_slowdown = Mean()
        self.hit_rate = Mean(memory=30.0)
        self._calibrations.clear()
        self._last_calibration = Calibration()
        self._speculative.clear()
        self._drafting.clear()

    def calibration(self, rule: object) -> Calibration:
        """The drafter's calibration under a rule, by any hashable name; the last `MAX_RULES` are remembered."""
        known = self._calibrations.pop(rule) if rule in self._calibrations else Calibration()
        self._last_calibration = self._calibrations[rule] = known
        if len(self._calibrations) > MAX_RULES:
            # Of the rule that was asked for longest ago. Sessions that use this calibration keep it.
            del self._calibrations[next(iter(self._calibrations))]
        return known

    # --- expectations -----------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether passes of both models were measured."""
        return self.verify.is_known and self.draft_alone.is_known

    def draft_s(self, width: int, *, beside_target: bool) -> float:
        """Seconds of a draft step over `width` tokens, while the target works or while it waits."""
        alone_s = self.draft_alone(width)
        return alone_s * self._draft_slowdown if beside_target else alone_s

    @property
    def _draft_slowdown(self) -> float:
        return self.draft_slowdown.value if self.draft_slowdown.is_known else 1.0

    def extra_seconds(self, *, only_copies: bool) -> Callable[[float], float]:
        """Seconds that a proposal of some length adds to a pass, for each of the texts that have one.

        With `only_copies` these are the texts with something to copy, and a pass without proposals is started ahead.
        """
        verify, num_texts = self.verify, self.num_texts
        num_drafting, without_s = num_texts, verify(num_texts)
        if only_copies:
            num_drafting = min(num_texts, max(1, self.num_copying))
            plain_s = self.plain_round_s
            # With several texts, the pass after this one is not started ahead either.
            restart_s = max(0.0, without_s - plain_s) if num_texts > 1 else 0.0
            without_s = plain_s - self.gap_s.value - restart_s
        return lambda num_drafted: max(0.0, verify(num_texts * (1 + num_drafted)) - without_s) / num_drafting

    def draft_share_s(self, width: int, *, beside_target: bool) -> float:
        """A text's share of a draft step over `width` tokens of each text that shares it, in seconds."""
        num_texts = self.num_texts if self.drafts_together else 1
        return self.draft_s(num_texts * width, beside_target=beside_target) / num_texts

    @property
    def plain_rate(self) -> float:
        """Tokens per second of all texts without a drafter."""
        round_s = self.plain_round_s
        return self.num_texts / round_s if round_s > 0 else 0.0

    @property
    def plain_decode_s(self) -> Mean:
        """Seconds of a token of a single text without a drafter, with the trip through the event loop."""
        return self._plain_rounds_s[1]

    @property
    def plain_round_s(self) -> float:
        """Seconds of a round of all texts without drafts; 0 before any pass was measured."""
        num_texts = self.num_texts
        if (measured := self._plain_rounds_s.get(num_texts)) is not None and measured.is_known:
            return measured.value
        known = {number: mean.value for number, mean in self._plain_rounds_s.items() if mean.is_known}
        pass_s = self.verify(num_texts)
        if not known:
            return pass_s
        nearest = min(known, key=lambda number: max(number, num_texts) / min(number, num_texts))
        nearest_pass_s = self.verify(nearest)
        return known[nearest] * (pass_s / nearest_pass_s if nearest_pass_s > 0 else 1.0)

    @property
    def speculative_rate(self) -> float:
        """Tokens per second, recently, of speculative rounds of about as many texts; 0 before the first."""
        tokens, seconds = self._speculated
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def _speculated(self) -> tuple[float, float]:
        return self._speculative.get(self.num_texts.bit_length(), (0.0, 0.0))

    @property
    def rate(self) -> float:
        """R: what a second is worth, in tokens. At least the plain rate, since plain decoding is always possible."""
        return max(self.plain_rate, self.speculative_rate)

    @property
    def best_rate(self) -> float:
        """Tokens per second to expect of speculating or of plain decoding, whichever is faster."""
        if not self.is_known:
            return self.rate
        return max(self.rate, self.modelled_rate(self._last_calibration.mean_acceptance))

    def modelled_rate(self, acceptance: float) -> float:
        """Tokens per second of the best fixed lookahead for texts that share all passes, at this acceptance; or 0."""
        return max((rate for _, rate in self._modelled_rates(acceptance)), default=0.0)

    def best_lookahead(self) -> int:
        """The fixed lookahead that should be best for texts that share all passes, at the drafter's acceptance; the
        longest of nearly equal ones, which also shows what longer ones cost.
        """
        known = self._best_lookaheads.get(self.num_texts)
        if known is None:
            rates = [(0, self.plain_rate), *self._modelled_rates(self._last_calibration.mean_acceptance)]
            least = NEARLY_BEST * max(rate for _, rate in rates)
            known = max(lookahead for lookahead, rate in rates if rate >= least)
            self._best_lookaheads[self.num_texts] = known
        return known

    def _modelled_rates(self, acceptance: float) -> Iterator[tuple[int, float]]:
        """Fixed lookaheads, and tokens per second with each."""
        tokens, reach, num_texts = 1.0, 1.0, self.num_texts
        step_s = self.draft_share_s(1, beside_target=False)
        hit_rate = self.hit_rate.value if self.hit_rate.is_known else 0.5
        slowdown = 0.0 if self.core_hold_s else self.verify.target_slowdown
        hidden_step_s = slowdown * self.draft_share_s(1, beside_target=True)
        for k in range(1, 17):
            reach *= acceptance
            tokens += reach
            pass_s, num_steps = self.verify(num_texts * (k + 1)), num_texts * k
            # A drafter that works ahead: on a miss the target waits for it. On a hit the target was only slowed down,
            # unless the drafter cannot keep pace at all.
            beside_s = self._beside_drafter_s(pass_s)
            ahead_s = beside_s + max(
                num_steps * (hit_rate * hidden_step_s + (1.0 - hit_rate) * step_s), num_steps * step_s - beside_s
            )
            if (seconds := min(ahead_s, pass_s + num_steps * step_s)) > 0.0:
                # Plain passes of several texts are started ahead.
                seconds += self.gap_s.value if num_texts > 1 else 0.0
                yield k, num_texts * tokens / seconds

    def works_ahead(self, lookahead: int) -> bool:
        """Whether drafting `lookahead` >= 1 tokens beside a pass is worth more at hits than it takes from the pass."""
        if not (self.is_known and self.hit_rate.is_known) or self._num_rounds % TRIED_EVERY_ROUNDS < TRIED_ROUNDS:
            return True
        # Until something is measured, texts that share passes have one answer, which is computed once.
        known = self._pays_ahead.get((lookahead, self.num_texts))
        if known is None:
            known = self._pays_ahead[lookahead, self.num_texts] = self._pays_to_work_ahead(lookahead)
        return known

    def _pays_to_work_ahead(self, lookahead: int) -> bool:
        pass_s = self.verify(self.num_texts * (1 + lookahead))
        drafting_s = self.num_texts * lookahead * self.draft_share_s(1, beside_target=False)
        if self.core_hold_s:
            ahead_s = self._beside_drafter_s(pass_s)
        else:
            # Up to a proposal, the token after it, and the next proposal; at a hit, a proposal is there already.
            num_steps = 1.0 + (2.0 - self.hit_rate.value) * lookahead
            steps_s = self.num_texts * num_steps * self.draft_share_s(1, beside_target=True)
            ahead_s = pass_s + self.verify.target_slowdown * min(pass_s, steps_s)
        return ahead_s + (1.0 - self.hit_rate.value) * drafting_s <= pass_s + drafting_s

    def draft_together_s(self, num_texts: int, num_steps: int) -> float:
        """Seconds in which proposals of `num_steps` tokens are drafted for several texts, while the target waits."""
        num_passes, width = (1, num_texts) if self.drafts_together else (num_texts, 1)
        return num_passes * num_steps * self.draft_s(width, beside_target=False)

    def one_group_pays(self, num_texts: int, lookahead: int, *, num_rows: int = 0) -> bool:
        """Whether `num_texts` texts, >= 2, of a fixed lookahead, >= 1, are faster if all are drafted for, and then
        verified in one pass. Otherwise two groups alternate: one is drafted for while the other is verified, in a pass
        of half the texts, which computes the batch's `num_rows` rows in any case.
        """
        if not self.is_known:
            return False
        half = (num_texts + 1) // 2
        pass_s = self.verify(max(half, num_rows) * (1 + lookahead))
        drafting_s = self.draft_together_s(half, lookahead)
        beside_s = drafting_s * self._draft_slowdown
        alternating_s = 2 * max(pass_s + self.verify.target_slowdown * min(pass_s, beside_s), beside_s)
        return self.verify(num_texts * (1 + lookahead)) + self.draft_together_s(num_texts, lookahead) <= alternating_s

    def _beside_drafter_s(self, pass_s: float) -> float:
        """Seconds that a pass of `pass_s` alone takes while a drafter works and has its share of the cores."""
        return pass_s / (1.0 - self.verify.target_slowdown) if self.core_hold_s else pass_s

    def estimates(self) -> Estimates:
        """A snapshot."""
        return Estimates(
            verify_seconds=self.verify(1),
            verify_seconds_per_token=self.verify.per_row(LAST_ROW_OF_SLOPE),
            draft_seconds=self.draft_s(1, beside_target=False),
            contention=self.contention,
            plain_seconds=self.plain_decode_s.value,
            tokens_per_second=self.speculative_rate,
            acceptance=self.acceptance,
            verify_table=self.verify.table(),
        )

    @property
    def contention(self) -> float:
        """κ: seconds by which the target is delayed for each second that a draft step takes when it runs alone."""
        return self.verify.target_slowdown * self._draft_slowdown

    # --- passes, and the draft steps beside them --------------------------------------------------

    def _price_passes(self, until_s: float) -> None:
        """Price the passes that ended by then, since all of the drafter's work beside them is known now."""
        self._pays_ahead.clear()
        self._best_lookaheads.clear()
        while self._unpriced_passes and self._unpriced_passes[0][2] <= until_s:
            width, began_s, ended_s = self._unpriced_passes.popleft()
            overlap_s, next_began = 0.0, math.inf
            for step_began, held_until in reversed(self._drafting):
                if held_until <= began_s:
                    break
                overlap_s += max(0.0, min(ended_s, held_until, next_began) - max(began_s, step_began))
                next_began = step_began
            self.verify.observe(width, overlap_s, ended_s - began_s)
