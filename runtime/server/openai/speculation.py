"""The part of a chunk that says how its tokens were drafted, for `stream_options.include_speculation`."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.statistics import Statistics
from runtime.generation.token_reader import Token
from runtime.server.openai.responses import Speculation, SpeculationStatistics
from runtime.server.timelines import Timeline

# The longest time between two chunks with speculation.
INTERVAL_S = 0.25


def speculation(tokens: Iterable[Token], statistics: Statistics, timeline: Timeline) -> Speculation:
    """The tokens of a chunk, the statistics so far, and what the models did since the last chunk."""
    so_far: SpeculationStatistics = {
        "prompt_tokens": statistics.prompt_tokens,
        "cached_tokens": statistics.cached_tokens,
        "prefilled_tokens": statistics.prefilled_tokens,
        "generated_tokens": statistics.generated_tokens,
        "proposed": statistics.proposed,
        "accepted": statistics.accepted,
        "acceptance_rate": statistics.acceptance_rate,
        "rows_per_pass": statistics.rows_per_pass,
        "generation_tps": statistics.generation_tps,
        "time_to_first_token": statistics.time_to_first_token,
        "elapsed": statistics.elapsed,
    }
    return {
        "tokens": [
            {"id": token.id, "text": token.text, "from_draft": token.from_draft, "is_thinking": token.is_thinking}
            for token in tokens
        ],
        "statistics": so_far,
        **timeline.new_activity(),
    }
