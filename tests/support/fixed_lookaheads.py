"""The speed of fixed lookaheads without overlap, which follows from the script alone; to compare "auto" with."""

from __future__ import annotations

from functools import cache

from protocol.auto_policy import AutoPolicy
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_models import PROMPT, ScriptedDraft, ScriptedTarget

LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def sequential_speed(scenario: Scenario, lookahead: int, num_tokens: int) -> float:
    """Tokens per T_v(1) when drafting `lookahead` tokens, then verifying them, then drafting again."""
    prices = {"draft": scenario.draft_seconds, "verify": scenario.verify_seconds}
    return num_tokens / sum(prices[kind](width) for kind, width in passes(scenario.acceptance, lookahead, num_tokens))


@cache
def passes(acceptance: float, lookahead: int, num_tokens: int) -> list[tuple[str, int]]:
    """The passes of the two models: (model, number of tokens that it reads). Costs do not change these."""
    scenario = Scenario(acceptance, cost_ratio=1.0)
    target = ScriptedTarget(scenario).open_sequence(beside_another=True)
    draft = ScriptedDraft(scenario).open_sequence(beside_another=True)
    text, num_read, found = list(PROMPT), 0, []
    target.feed(PROMPT, 0)
    while len(text) < len(PROMPT) + num_tokens:
        drafted: list[int] = []
        for _ in range(min(lookahead, len(PROMPT) + num_tokens - len(text) - 1)):
            unread = tuple((text + drafted)[num_read:])
            drafted.append(choice(draft, unread))
            found.append(("draft", len(unread)))
            num_read += len(unread)
        found.append(("verify", 1 + len(drafted)))
        agreed = len(text)
        for token in (*drafted, None):
            text.append(choice(target, ()))
            target.feed(text[-1:], 0)
            if text[-1] != token:
                break
            agreed += 1
        num_read = min(num_read, agreed)
        draft.rewind(num_read)
    return found


def choice(sequence, tokens) -> int:
    """The next token of a scripted model after tokens that it has not read."""
    if tokens:
        sequence.feed(tokens, 0)
    row = sequence.row(len(sequence.tokens))
    return row.index(max(row))


def auto(settings, prices) -> AutoPolicy:
    return AutoPolicy(prices, prices.calibration("greedy"))
