"""The speed of fixed lookaheads without overlap, which follows from the script alone; to compare "auto" with."""

import itertools
from collections.abc import Iterator
from functools import cache

from scenario import Scenario
from scripted_models import PROMPT, ScriptedDraft, ScriptedTarget

from protocol.auto_policy import AutoPolicy

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def sequential_speed(scenario: Scenario, lookahead: int, num_tokens: int) -> float:
    """Tokens per T_v(1) when drafting `lookahead` tokens, then verifying them, then drafting again."""
    prices = {"draft": scenario.draft_seconds, "verify": scenario.verify_seconds}
    return num_tokens / sum(prices[kind](width) for kind, width in passes(scenario.acceptance, lookahead, num_tokens))


def passes(acceptance: float, lookahead: int, num_tokens: int) -> Iterator[tuple[str, int]]:
    """The passes of the two models: (model, number of tokens that it reads). Costs do not change these."""
    agrees = agreements(acceptance, num_tokens)
    length, num_read = 0, -len(PROMPT)
    while length < num_tokens:
        num_drafted = min(lookahead, num_tokens - length - 1)
        for end in range(length, length + num_drafted):
            yield "draft", end - num_read
            num_read = end
        yield "verify", 1 + num_drafted
        agreed = length + sum(itertools.takewhile(bool, agrees[length : length + num_drafted]))
        length, num_read = agreed + 1, min(num_read, agreed)


@cache
def agreements(acceptance: float, num_tokens: int) -> list[bool]:
    """For each token of the text, whether the draft would have chosen it, too."""
    scenario = Scenario(acceptance, cost_ratio=1.0)
    both = [model(scenario).open_sequence(alongside_model=True) for model in (ScriptedTarget, ScriptedDraft)]
    tokens, found = PROMPT, []
    for _ in range(num_tokens):
        rows = []
        for sequence in both:
            sequence.feed(tokens, 0)
            rows.append(sequence.row(len(sequence.tokens)))
        token, drafted = (row.index(max(row)) for row in rows)
        found.append(token == drafted)
        tokens = (token,)
    return found


def auto(settings, prices) -> AutoPolicy:
    return AutoPolicy(prices, prices.calibration("greedy"))
