"""What the figures of a stream mean for whoever chose its models and settings, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from protocol.statistics import Statistics

# Fewer rounds or drafted tokens than these say nothing yet.
MIN_ROUNDS = 10
MIN_PROPOSED = 30

# What is within a few per cent of plain decoding is no loss to speak of, and may be noise.
MIN_SPEED_UP = 0.95
LOW_ACCEPTANCE = 0.3
# Of the rounds; where most are of a kind, the stream is.
MOST = 0.8


def advise(statistics: Statistics, lookahead: int | Literal["auto"] | None) -> tuple[str, ...]:
    """Sentences on what would be faster, most important first; none where nothing stands out, or is known yet.

    Args:
        statistics: of one stream, or of a whole runtime.
        lookahead: most tokens in one proposal, or "auto"; 0 where nothing is drafted, None for streams that differ.
    """
    if lookahead == 0 or statistics.rounds < MIN_ROUNDS:
        return ()
    return tuple(_advice(statistics, lookahead))


def _advice(s: Statistics, lookahead: int | Literal["auto"] | None) -> Iterator[str]:
    step, decode = s.estimates.draft_seconds, s.estimates.verify_seconds
    if s.draft_failures:
        yield "the drafter failed, and the rest was decoded without it; the warnings of the logger 'outrider' say why"
    if s.draft_timeouts:
        yield (
            f"the target went on alone {s.draft_timeouts} times because the drafter was late, with a proposal or with "
            "the prompt; use a smaller draft model, or see what else keeps its device busy"
        )
    if 0 < decode <= step:
        yield (
            f"a draft step takes {_duration(step)} and a decoding step of the target {_duration(decode)}, so drafting "
            'cannot pay; use a smaller draft model, or draft="ngram"'
        )
    speed_up = modelled_speed_up(s)
    if isinstance(lookahead, int) and speed_up is not None and speed_up < MIN_SPEED_UP:
        yield (
            f"lookahead={lookahead} decodes about {speed_up:.1f}× as fast as plain decoding would, by what the passes "
            'cost here; use lookahead="auto"'
        )
    if s.acceptance_rate is not None and s.acceptance_rate < LOW_ACCEPTANCE and s.proposed >= MIN_PROPOSED:
        yield (
            f"only {s.acceptance_rate:.0%} of {s.proposed} drafted tokens were accepted; use a draft model that is "
            "closer to the target, or was trained on such texts"
        )
    if s.n1_rounds > MOST * s.rounds:
        yield (
            f"in {s.n1_rounds} of {s.rounds} rounds the caches could undo nothing (N=1), and speculation gains nothing "
            'then; open the models with rewind="auto" and without max_kv_size'
        )
    # Where the drafter was late, that is said above.
    if s.resting_rounds > MOST * s.rounds and not s.draft_timeouts:
        yield (
            f"{s.resting_rounds} of {s.rounds} rounds were left to the target alone, since speculating does not pay "
            "here; without a draft nothing would be slower"
        )


def modelled_speed_up(s: Statistics) -> float | None:
    """Speed of these rounds over that of plain decoding, were the models at nothing else; None where it is not known.

    By measured prices and not by the clock: a slow reader, or other streams, make a stream slow and not its lookahead
    wrong.
    """
    prices, verdicts = s.estimates, s.lookahead_hits + s.lookahead_misses
    plain = prices.plain_seconds or prices.verify_seconds
    if plain <= 0 or prices.verify_seconds <= 0 or s.rounds == 0:
        return None
    num_drafted = s.proposed / s.rounds
    verify = prices.verify_seconds + num_drafted * prices.verify_seconds_per_token
    drafting = num_drafted * prices.draft_seconds
    # On a miss the target waits for the drafter; on a hit only where the drafter cannot keep pace.
    miss_rate = s.lookahead_misses / verdicts if verdicts else 1.0
    waiting = max(miss_rate * drafting, drafting - verify)
    delay = min(1.0, prices.contention) * (1.0 - miss_rate) * min(drafting, verify)
    return s.tokens_per_round * plain / (verify + waiting + delay)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
