"""Evaluations of a drafter: how often its drafts for held-out text are accepted, by depth, category and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs

# The temperature of `AcceptanceRates.sampled`.
TEMPERATURE = 0.7
# The name of all categories together.
ALL = "all"


@attrs.frozen
class DraftAgreement:
    """What was drafted for a window, or for several."""

    # How many drafts there are, and after each step agree with the target so far: their likeliest tokens are the same.
    num_agreeing: tuple[int, ...]
    # For each step, how many tokens are accepted at `TEMPERATURE` on average, where those before agree.
    num_sampled: tuple[float, ...]


@attrs.frozen
class AcceptanceRates:
    """How often, in [0, 1], the token of each step is accepted where those before it agree with the target."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]  # at `TEMPERATURE`

    @property
    def num_accepted(self) -> float:
        """Tokens of a greedy draft that are accepted on average."""
        reached, total = 1.0, 0.0
        for rate in self.greedy:
            reached *= rate
            total += reached
        return total


def acceptance_of(drafted: Sequence[DraftAgreement]) -> AcceptanceRates:
    """The acceptance in some windows, of at least one."""
    agreeing = [sum(each) for each in zip(*(window.num_agreeing for window in drafted), strict=True)]
    sampled = [sum(each) for each in zip(*(window.num_sampled for window in drafted), strict=True)]
    return AcceptanceRates(
        greedy=tuple(round(right / max(1, asked), 4) for asked, right in pairwise(agreeing)),
        sampled=tuple(round(likely / max(1, asked), 4) for asked, likely in zip(agreeing, sampled, strict=False)),
    )


def acceptance_by_category(drafted: Sequence[DraftAgreement], categories: Sequence[str]) -> dict[str, AcceptanceRates]:
    """The acceptance of all windows, as `ALL`, and of those of each category, if there are several."""
    names = sorted(set(categories))
    found = {ALL: acceptance_of(drafted)}
    if len(names) > 1:
        for name in names:
            pairs = zip(drafted, categories, strict=True)
            found[name or "none"] = acceptance_of([window for window, category in pairs if category == name])
    return found


@attrs.frozen
class Evaluation:
    """The figures of an evaluation; a line of the log."""

    batches: int  # learnt from so far
    tokens: int
    minutes: float  # spent on learning and evaluations so far
    loss: float | None  # mean since the evaluation before; None before anything was learnt
    acceptance: dict[str, AcceptanceRates]  # on held-out text, by category; that of all is the first
    accepted: float  # tokens of `NUM_STEPS` greedy drafts that are accepted
    learning_rate: float
    is_best: bool  # whether the drafter was written
