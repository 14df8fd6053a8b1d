"""A scenario: the few numbers that describe a machine and a pair of models to the simulator.

The unit of time is T_v(1), the time that the target takes to decode one token; of a sharded target, on one machine.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.settings import MAX_SEED
from protocol.validation import check_integer, check_number, is_integer, must_be, validator
from protocol.wording import Message
from runtime.simulation.sharding import Sharding

# The acceptance of a trained drafter falls from `acceptance` to `stale_acceptance` with the number of its own hidden
# states that it drafts on: each of them leaves this share of the difference.
STALENESS_KEEPS = 0.75


def _check_pairs(name: str, value: Any, key: str, meaning: str) -> None:
    """Check pairs of a whole number that rises from 1 on, and of something else.

    Args:
        name: of the field.
        value: of the field.
        key, meaning: what the two of a pair are, for the message.
    """
    previous = 0
    for pair in value:
        if not isinstance(pair, tuple) or len(pair) != 2 or not is_integer(pair[0]) or pair[0] <= previous:
            raise must_be(name, f"pairs ({key}, {meaning}) with {key}s that start at 1 and rise", pair)
        previous = pair[0]


def _check_changes(_: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    _check_pairs(attribute.name, value, "token", "acceptance")
    for _token, acceptance in value:
        check_number(Message("an acceptance in {option}", option=attribute.name), acceptance, 0, 1)


def _check_table(_: Any, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    _check_pairs(attribute.name, value, "width", "time")
    for _width, time in value:
        check_number(Message("a time in {option}", option=attribute.name), time, above=0)
    if value and value[0][0] != 1:
        raise SettingsError.of(
            "{option} must begin with width 1, got {value}", option=attribute.name, value=value[0][0]
        )


@attrs.frozen
class Scenario:
    """A machine and a pair of models.

    Attributes:
        acceptance: probability that the draft's first choice is the target's token, in [0, 1].
        cost_ratio: time of a draft step, > 0, in units of T_v(1).
        contention: share of a draft step's time by which it delays the target when both run, in [0, 1]; 0 for
            separate hardware.
        verify_slope: a verify pass over m tokens takes T_v(1)·(1 + verify_slope·(m − 1)); >= 0.
        draft_slope: the same for a draft pass, in units of a draft step; None for the same slope.
        verify_table, draft_table: instead of a slope, pairs (width, time) as they were measured on a device, in any
            unit of time; widths begin at 1 and rise. Between them times are interpolated, and beyond the last one they
            rise as between the last two, if they rise there. Empty for the slope.
        overhead: time added to every forward pass, >= 0, in units of T_v(1).
        second_choice: probability that the draft's second choice is right where its first is wrong, in [0, 1]. The
            second choice is never likelier than the first, so it is right less often where the first is very unlikely.
        spread: concentration of the draft's confidence, > 0. At each position the first choice is right with a
            probability drawn from the Beta distribution with mean `acceptance` and concentration `spread`. A small
            value means a draft that knows when it is right; a large value means the same confidence everywhere.
        overconfidence: how far the draft overstates its confidence, >= 0: its logits are multiplied by
            1 + overconfidence. At 0 its confidence is calibrated.
        stale_acceptance: for a drafter that was trained for the target, what `acceptance` comes down to, in
            [0, acceptance], as more and more of the hidden states that it reads are its own: each takes a quarter of
            what is left. The draft's confidence says nothing of that. None for a draft model, which reads none.
        acceptance_changes: pairs (token, acceptance): from that generated token on, that acceptance holds. Tokens
            are >= 1 and rise.
        sharding: the ranks of a target that is sharded over several machines, and their links; None for one machine.
            The draft model runs on one of them.
        seed: seed of the text and of everything that is drawn, in [0, 2**64).

    Raises: SettingsError: a value is out of its range.
    """

    acceptance: float = attrs.field(validator=validator(check_number, 0, 1))
    cost_ratio: float = attrs.field(validator=validator(check_number, above=0))
    contention: float = attrs.field(default=0.0, validator=validator(check_number, 0, 1))
    verify_slope: float = attrs.field(default=0.06, validator=validator(check_number, 0))
    draft_slope: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(validator(check_number, 0))
    )
    verify_table: tuple[tuple[int, float], ...] = attrs.field(default=(), validator=_check_table)
    draft_table: tuple[tuple[int, float], ...] = attrs.field(default=(), validator=_check_table)
    overhead: float = attrs.field(default=0.0, validator=validator(check_number, 0))
    second_choice: float = attrs.field(default=0.45, validator=validator(check_number, 0, 1))
    spread: float = attrs.field(default=1.3, validator=validator(check_number, above=0))
    overconfidence: float = attrs.field(default=0.0, validator=validator(check_number, 0))
    stale_acceptance: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(validator(check_number, 0, 1))
    )
    acceptance_changes: tuple[tuple[int, float], ...] = attrs.field(default=(), validator=_check_changes)
    sharding: Sharding | None = None
    seed: int = attrs.field(default=0, validator=validator(check_integer, 0, MAX_SEED))

    def __attrs_post_init__(self) -> None:
        if self.stale_acceptance is not None and self.stale_acceptance > self.acceptance:
            bound = f"at most the acceptance of {self.acceptance:g}"
            raise must_be("stale_acceptance", bound, self.stale_acceptance)

    def relative_acceptance(self, staleness: int) -> float:
        """The acceptance of a token that was drafted on `staleness` hidden states of the drafter's own, relative to one
        that was drafted on none; in [0, 1].
        """
        if self.stale_acceptance is None or self.acceptance == 0.0:
            return 1.0
        least = self.stale_acceptance / self.acceptance
        return least + (1.0 - least) * STALENESS_KEEPS**staleness

    def verify_seconds(self, num_tokens: int) -> float:
        """Time of a target pass over `num_tokens` tokens, in units of T_v(1)."""
        alone = _relative_time(self.verify_table, self.verify_slope, num_tokens)
        return self.overhead + (alone if self.sharding is None else self.sharding.pass_seconds(alone, num_tokens))

    def draft_seconds(self, num_tokens: int) -> float:
        """Time of a draft pass over `num_tokens` tokens, in units of T_v(1)."""
        slope = self.verify_slope if self.draft_slope is None else self.draft_slope
        return self.overhead + self.cost_ratio * _relative_time(self.draft_table, slope, num_tokens)


def _relative_time(table: tuple[tuple[int, float], ...], slope: float, width: int) -> float:
    """The time of a pass over `width` tokens, relative to a pass over one."""
    if not table:
        return 1.0 + slope * (width - 1)
    if len(table) == 1 or width == 1:
        return 1.0
    right = min(bisect_left(table, (width, 0.0)), len(table) - 1)
    (low, low_time), (high, high_time) = table[max(right, 1) - 1], table[max(right, 1)]
    slope = (high_time - low_time) / (high - low)
    if width > high:
        return (high_time + (width - high) * max(0.0, slope)) / table[0][1]
    return (low_time + (width - low) * slope) / table[0][1]
