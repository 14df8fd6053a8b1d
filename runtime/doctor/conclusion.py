"""The doctor's conclusion: the speed to expect of a model or a pair, and remedies, from measured forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from protocol.pass_price import PassPrice
from protocol.prices import Prices

# Acceptance rates for which the report gives speed-ups: a usual one and a good one.
USUAL_ACCEPTANCE, GOOD_ACCEPTANCE = 0.7, 0.9

# The smallest speed-up worth mentioning.
MIN_SPEEDUP = 1.05

# Width is expensive if each further token of a pass costs more than this fraction of the first.
MAX_WIDTH_COST = 0.3
# Ranks exchange for too long if that takes more than this share of a pass over one token.
MAX_EXCHANGE = 0.5
# A draft model is expensive if its step costs more than this fraction of a target pass over one token.
MAX_DRAFT_COST = 0.4


@attrs.frozen
class Findings:
    """The findings on which the conclusion rests."""

    verify_seconds: Mapping[int, float]  # seconds of the target's passes, by width in tokens; width 1 is among them
    draft_seconds: Mapping[int, float] | None  # of the draft model's passes, likewise; None without one
    same_vocabulary: bool | None  # whether target and draft share a vocabulary; None if that was not compared
    can_rewind: bool  # whether the target's caches can drop rejected tokens
    dtypes: tuple[str, ...]
    blas: str | None
    suggestions: tuple[str, ...] = ()  # draft models that fit, the best first
    is_translated: bool = False  # whether the vocabularies differ, but the draft model can draft translated tokens
    exchange_seconds: Mapping[int, float] | None = None  # of a sharded target's passes, by width; None on one machine
    num_ranks: int = 1

    @property
    def is_pair(self) -> bool:
        """Whether the draft model, if there is one, can draft for the target."""
        return self.same_vocabulary is not False or self.is_translated

    @property
    def width_cost(self) -> float:
        """The `width_cost` of the target's passes."""
        return width_cost(self.verify_seconds)

    @property
    def draft_cost(self) -> float:
        """Cost of a draft step, as a fraction of the target's pass over one token; 0 without a draft model."""
        return 0.0 if self.draft_seconds is None else self.draft_seconds[1] / self.verify_seconds[1]

    def speedup(self, acceptance: float) -> float:
        """Speed over plain decoding if each drafted token is accepted with this probability."""
        prices = Prices(verify=_price(self.verify_seconds), draft_alone=_price(self.draft_seconds or {}))
        return prices.modelled_rate(acceptance) / prices.plain_rate

    def exchange_share(self, width: int) -> float:
        """The share of a pass that is exchange between ranks; 0 on one machine."""
        if self.exchange_seconds is None:
            return 0.0
        return min(1.0, self.exchange_seconds[width] / self.verify_seconds[width])

    def break_even(self) -> float | None:
        """The smallest acceptance, in steps of 0.05, with a speed-up of `MIN_SPEEDUP`; None if there is none."""
        steps = (n / 20 for n in range(1, 20))
        return next((acceptance for acceptance in steps if self.speedup(acceptance) >= MIN_SPEEDUP), None)


def width_cost(pass_seconds: Mapping[int, float]) -> float:
    """Cost of each further token of a pass, on average, as a fraction of the first; from seconds by width."""
    return _price(pass_seconds).per_row(max(pass_seconds)) / pass_seconds[1]


def _price(pass_seconds: Mapping[int, float]) -> PassPrice:
    price = PassPrice()
    # Several times, so that the measurements outweigh the priors.
    for _ in range(10):
        for width, seconds in pass_seconds.items():
            price.observe(width, 0.0, seconds)
    return price


def conclude(found: Findings) -> list[tuple[str, str]]:
    """The conclusion: rows of (word, sentence): notes, remedies, and at the end whether to use it, in one sentence."""
    return [*_rows(found), ("in short", _in_short(found))]


def _in_short(found: Findings) -> str:
    if not found.can_rewind:
        return (
            "use no drafter: this target's caches cannot be put right after a rejection, so nothing would be proposed"
        )
    other = f"--draft {found.suggestions[0]}" if found.suggestions else "--draft ngram"
    if not found.is_pair:
        return f"do not use this pair, which does not share a vocabulary; examine {other}"
    if found.draft_seconds is None:
        return f"this is plain decoding; pass {other} as well to see what a drafter would gain"
    if (min_acceptance := found.break_even()) is None:
        return "do not use this draft: plain decoding is about as fast even at an acceptance of 0.95"
    blas = " and --blas openblas" if _wants_openblas(found) else ""
    return (
        f'use it with lookahead "auto"{blas}: about {_speeds(found, min_acceptance)}, and hardly anything below '
        f"{min_acceptance:g}. Two things are still unknown: the acceptance rate on your texts (see --stats), and how "
        "much the models slow each other down (see `outrider bench`)"
    )


def _rows(found: Findings) -> Iterator[tuple[str, str]]:
    if not found.can_rewind:
        return
    is_expensive = found.draft_cost > MAX_DRAFT_COST
    if found.is_pair:
        on_ranks = found.exchange_seconds is not None
        # The possible gain on ranks, where passes are dearest, shown before a draft model is loaded in vain.
        if on_ranks and found.draft_seconds is None and found.speedup(USUAL_ACCEPTANCE) >= MIN_SPEEDUP:
            speeds = (f"{found.speedup(each):.1f}× at {each:g}" for each in (USUAL_ACCEPTANCE, GOOD_ACCEPTANCE))
            yield "note", f"with a drafter whose steps cost nothing it would be {', '.join(speeds)} acceptance"
        yield from _exchange(found)
        yield from _faster_width(found)
        if found.is_translated:
            yield "try", "a draft model of the target's vocabulary, if there is one: more of its drafts are accepted"
        if is_expensive:
            yield (
                "try",
                f"a smaller draft model: a step of this one takes {found.draft_cost:.0%} of a pass of the target",
            )
    if not found.is_pair or found.draft_seconds is None or found.is_translated or is_expensive:
        for suggestion in found.suggestions[:3]:
            yield "try", f"--draft {suggestion}"
        yield "try", "--draft ngram, for texts that repeat themselves; needs no model"


def _speeds(found: Findings, min_acceptance: float) -> str:
    first, *rest = [
        acceptance for acceptance in (USUAL_ACCEPTANCE, GOOD_ACCEPTANCE) if acceptance >= min_acceptance
    ] or [min_acceptance]
    more = "".join(f", {found.speedup(acceptance):.1f}× at {acceptance:g}" for acceptance in rest)
    return f"{found.speedup(first):.1f}× plain decoding with this pair at an acceptance of {first:g}{more}"


def _exchange(found: Findings) -> Iterator[tuple[str, str]]:
    if found.exchange_seconds is None:
        return
    widest = max(found.exchange_seconds)
    narrow, wide = (f"{found.exchange_share(width):.0%}" for width in (1, widest))
    ranks = f"exchange between {found.num_ranks} ranks"
    yield "note", f"{narrow} of a pass of 1 token, {wide} of one of {widest}, is {ranks}"
    if found.exchange_share(1) > MAX_EXCHANGE:
        yield (
            "try",
            ("fewer ranks, if they hold the target, or links of less latency: a pass exchanges more than it computes"),
        )


def _faster_width(found: Findings) -> Iterator[tuple[str, str]]:
    if found.width_cost <= MAX_WIDTH_COST:
        return
    expensive = f"each further token of a pass costs {found.width_cost:.0%} of the first"
    if _wants_openblas(found):
        yield "try", f"--blas openblas: {expensive}, with the reference BLAS"
    else:
        yield "note", f"{expensive}, which is what limits speculation here"


def _wants_openblas(found: Findings) -> bool:
    has_reference = found.blas is not None and found.blas.startswith("reference BLAS") and "float32" in found.dtypes
    return has_reference and found.width_cost > MAX_WIDTH_COST
