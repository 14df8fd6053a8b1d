"""Target and draft distributions, and the chi-square test that compares samples with them."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import scipy
from scripted import Price

# Row i: probabilities after token i. The target never says 2 after 0, where the drafter likes it best. The drafter
# never says 1 after 3, where the target likes it best.
TARGET = ((0.45, 0.35, 0.00, 0.20), (0.10, 0.20, 0.30, 0.40), (0.25, 0.25, 0.25, 0.25), (0.05, 0.70, 0.20, 0.05))


DRAFT = ((0.20, 0.20, 0.50, 0.10), (0.30, 0.20, 0.10, 0.40), (0.10, 0.40, 0.20, 0.30), (0.40, 0.00, 0.30, 0.30))


PROMPT = [1]


# A true null hypothesis is rejected once in ten thousand outcomes.
SIGNIFICANCE = 1e-4


def random_price(seed: int, part: float = 1.0) -> Price:
    """Random prices for the jobs of both actors, so that verdicts arrive in every stage of drafting."""
    dice = random.Random(seed)
    return lambda job: part * dice.choice([0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 11.0])


def pooled_p_value(samples: Sequence[tuple[Mapping[Any, int], Mapping[Any, float]]]) -> float:
    """The p-value of Pearson's chi-square test over several independent samples, each of (counts, probabilities)."""
    statistic, degrees = 0.0, 0
    for counts, probs in samples:
        num_draws = sum(counts.values())
        cells = [(counts.get(outcome, 0), num_draws * p) for outcome, p in probs.items() if p > 0]
        few = [cell for cell in cells if cell[1] < 5]
        cells = [cell for cell in cells if cell[1] >= 5]
        if sum(expected for _, expected in few) > 0:
            cells.append((sum(seen for seen, _ in few), sum(expected for _, expected in few)))
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in cells)
        degrees += len(cells) - 1
    return float(scipy.special.chdtrc(degrees, statistic))


def p_value(counts: Mapping[Any, int], probs: Mapping[Any, float]) -> float:
    """The p-value of Pearson's test; outcomes expected fewer than five times are pooled, and none is impossible."""
    impossible = [outcome for outcome in counts if probs.get(outcome, 0.0) == 0]
    assert impossible == []
    return pooled_p_value([(counts, probs)])


def outcomes(table: Sequence[Sequence[float]], length: int, stop: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """The probability of each text of `length` tokens after `PROMPT`; texts that stop are shorter."""
    open_ends, probs = {(): 1.0}, {}
    for _ in range(length):
        longer = {}
        for text, p in open_ends.items():
            for token, q in enumerate(table[(PROMPT + list(text))[-1]]):
                (probs if token in stop else longer)[(*text, token)] = p * q
        open_ends = longer
    return {**probs, **open_ends}
