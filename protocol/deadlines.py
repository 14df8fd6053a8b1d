"""How long the target waits for its drafter before it decodes on alone.

Waiting is never needed for the text, only for speed: a target that goes on alone loses what speculating would have
gained in a round or two, until the drafter has caught up. So it waits about as long as that is worth.
"""

from __future__ import annotations

from protocol.prices import Prices

# A drafter that has not read the prompt is waited for at least so long: less is not noticed by who waits for the
# first token.
LEAST_PROMPT_WAIT_S = 0.1
# One that is late with a proposal: less says more of a busy machine than of the drafter.
LEAST_PROPOSAL_WAIT_S = 1.0
# A proposal may take so many times what its draft steps should take. After that it is taken not to come.
PROPOSAL_FACTOR = 4.0
# The wait for a proposal while no draft step was measured yet.
UNPRICED_PROPOSAL_WAIT_S = 60.0
# Rounds for which the target goes on alone before it asks itself again.
ROUNDS_ALONE = 2


def prompt_wait_s(prices: Prices) -> float:
    """Seconds that the target waits, its own prompt read, for a drafter that is still reading the prompt, > 0.

    If the drafter is ready just after the target has begun a pass alone, the pass commits one token where a
    speculative round would have committed more. That loss is the most that waiting can save, and waiting exactly so
    long costs at most twice what the better choice in hindsight would have (the ski rental argument).
    """
    if prices.plain_rate <= 0.0:
        return LEAST_PROMPT_WAIT_S
    gain = max(0.0, 1.0 - prices.plain_rate / prices.best_rate)
    return max(LEAST_PROMPT_WAIT_S, gain / prices.plain_rate)


def proposal_wait_s(prices: Prices, num_steps: int, num_sessions: int) -> float:
    """Seconds that the target waits for the proposal of a drafter that has read the text, > 0.

    Args:
        num_steps: draft steps that a proposal may take, >= 1.
        num_sessions: sessions that the drafter works for, >= 1: it takes them in turn.
    """
    if not prices.draft_alone.is_known:
        return UNPRICED_PROPOSAL_WAIT_S
    expected_s = num_steps * num_sessions * prices.draft(1, beside=num_sessions > 1)
    return max(LEAST_PROPOSAL_WAIT_S, PROPOSAL_FACTOR * expected_s)
