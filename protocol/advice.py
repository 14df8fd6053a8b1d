"""Advice: what the statistics of a stream say would be faster, in sentences for its user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from protocol.statistics import Statistics

# No advice is given before this many rounds, or drafted tokens.
MIN_ROUNDS = 10
MIN_PROPOSED = 30

# A loss of a few per cent against plain decoding may be noise.
MIN_SPEED_UP = 0.95
LOW_ACCEPTANCE = 0.3
# Advice on rounds of one kind is given if they are more than this share of all rounds.
MAX_SHARE_OF_ROUNDS = 0.8


def advise(statistics: Statistics, lookahead: int | Literal["auto"] | None) -> tuple[str, ...]:
    """Sentences on what would be faster, most important first; none if nothing stands out, or nothing is known yet.

    Args:
        statistics: of one stream, or of a whole runtime.
        lookahead: the setting; 0 if nothing is drafted, None for several streams with different settings.
    """
    if lookahead == 0 or statistics.rounds < MIN_ROUNDS:
        return ()
    return tuple(_advice(statistics, lookahead))


def _advice(s: Statistics, lookahead: int | Literal["auto"] | None) -> Iterator[str]:
    draft_s, decode_s = s.estimates.draft_seconds, s.estimates.verify_seconds
    if s.draft_failures:
        yield "the drafter failed, and the rest was decoded without it; the warnings of the logger 'outrider' say why"
    if s.draft_timeouts:
        yield (
            f"the target went on alone {s.draft_timeouts} times because the drafter was late, with a proposal or with "
            "the prompt; use a smaller draft model, or see what else keeps its device busy"
        )
    is_plausible = s.estimates.is_plausible
    if is_plausible and 0 < decode_s <= draft_s:
        yield (
            f"a draft step takes {_duration(draft_s)} and a decoding step of the target {_duration(decode_s)}, so "
            'drafting cannot pay; use a smaller draft model, or draft="ngram"'
        )
    speed_up = modelled_speed_up(s) if is_plausible else None
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
    if s.n1_rounds > MAX_SHARE_OF_ROUNDS * s.rounds:
        yield (
            f"in {s.n1_rounds} of {s.rounds} rounds the caches could undo nothing (N=1), and speculation gains nothing "
            'then; open the models with rewind="auto" and without max_kv_size'
        )
    # If the drafter was late, an earlier sentence says so.
    if s.resting_rounds > MAX_SHARE_OF_ROUNDS * s.rounds and not s.draft_timeouts:
        yield (
            f"{s.resting_rounds} of {s.rounds} rounds were left to the target alone, since speculating does not pay "
            "here; without a draft nothing would be slower"
        )


def modelled_speed_up(s: Statistics) -> float | None:
    """Speed of these rounds, as a multiple of plain decoding's, if the models did nothing else; None if not known.

    It is computed from measured prices, not from the clock: a slow reader or other streams make a stream slow, too.
    """
    prices, num_verdicts = s.estimates, s.lookahead_hits + s.lookahead_misses
    plain_s = prices.plain_seconds or prices.verify_seconds
    if plain_s <= 0 or prices.verify_seconds <= 0 or s.rounds == 0:
        return None
    num_drafted = s.proposed / s.rounds
    verify_s = prices.verify_seconds + num_drafted * prices.verify_seconds_per_token
    drafting_s = num_drafted * prices.draft_seconds
    # On a miss the target waits for the drafter; on a hit only if the drafter cannot keep pace.
    miss_rate = s.lookahead_misses / num_verdicts if num_verdicts else 1.0
    waiting_s = max(miss_rate * drafting_s, drafting_s - verify_s)
    contention_s = min(1.0, prices.contention) * (1.0 - miss_rate) * min(drafting_s, verify_s)
    return s.tokens_per_round * plain_s / (verify_s + waiting_s + contention_s)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
