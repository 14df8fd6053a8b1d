"""Deadlines: how long the target should wait for its drafter. Waiting never changes the text, only the speed."""

from __future__ import annotations

from protocol.prices import Prices

# The shortest wait for a drafter that is reading the prompt: no user notices so short a delay of the first token.
MIN_PROMPT_WAIT_S = 0.1
# The shortest wait for a proposal. A shorter delay may be due to a busy machine, and not to the drafter.
MIN_PROPOSAL_WAIT_S = 1.0
PROPOSAL_FACTOR = 4.0  # the wait for a proposal is this many times the expected time of its draft steps
UNPRICED_PROPOSAL_WAIT_S = 60.0  # the wait for a proposal before any draft step has been measured
ROUNDS_ALONE = 2  # rounds that the target decodes alone before it decides again


def prompt_wait_s(prices: Prices) -> float:
    """Seconds, > 0, that a target which has read the prompt waits for a drafter that is still reading it.

    What waiting can save: the time that a token takes longer in plain decoding. So a wait costs at most twice what the
    better choice in hindsight would have cost (the ski rental argument).
    """
    if prices.plain_rate <= 0.0:
        return MIN_PROMPT_WAIT_S
    gain = max(0.0, 1.0 - prices.plain_rate / prices.best_rate)
    return max(MIN_PROMPT_WAIT_S, gain / prices.plain_rate)


def proposal_wait_s(prices: Prices, num_steps: int, num_sessions: int) -> float:
    """Seconds, > 0, that the target waits for a drafter of `num_sessions` sessions to draft `num_steps` for one."""
    if not prices.draft_alone.is_known:
        return UNPRICED_PROPOSAL_WAIT_S
    expected_s = num_steps * num_sessions * prices.draft_s(1, beside_target=num_sessions > 1)
    return max(MIN_PROPOSAL_WAIT_S, PROPOSAL_FACTOR * expected_s)
