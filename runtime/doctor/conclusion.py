"""What to expect of a model or a pair, in words, by what their forward passes were measured to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from protocol.prices import Prices

# Acceptances of which the speed is told: a pair that suits its text, and one that suits it well.
USUAL, GOOD = 0.7, 0.9

# A speed-up that nobody would notice.
NOTABLE = 1.05

# Where each further token of a pass costs more than this part of the first, width is what speculation pays most for.
DEAR_WIDTH = 0.3
# Where a draft step costs more than this part of the target's, the drafter is.
DEAR_DRAFT = 0.4


@attrs.frozen
class Findings:
    """What the doctor has found out, as far as it matters here.

    Attributes:
        verify_seconds: of the target's passes, by their width in tokens, 1 among them.
        draft_seconds: of the draft model's; None without one.
        same_vocabulary: whether the two share one; None where that was not compared.
        can_rewind: whether the target's caches can be put right after a rejection.
        dtypes: of the target's weights.
        blas: the linear algebra in use, by its name; None where that is unknown.
        suggestions: draft models that would fit, the best first.
    """

    verify_seconds: Mapping[int, float]
    draft_seconds: Mapping[int, float] | None
    same_vocabulary: bool | None
    can_rewind: bool
    dtypes: tuple[str, ...]
    blas: str | None
    suggestions: tuple[str, ...] = ()

    @property
    def width_cost(self) -> float:
        """What each further token of a pass costs, as a part of the first."""
        return self._prices().verify.per_token / self.verify_seconds[1]

    @property
    def draft_cost(self) -> float:
        """What a draft step costs, as a part of the target's pass over one token; 0 without a draft model."""
        return 0.0 if self.draft_seconds is None else self.draft_seconds[1] / self.verify_seconds[1]

    def speedup(self, acceptance: float) -> float:
        """Speculation's speed over that of plain decoding, were each drafted token to stand with this probability."""
        prices = self._prices()
        return prices.modelled_rate(acceptance) / prices.plain_rate

    def break_even(self) -> float | None:
        """The least acceptance, in steps of 0.05, that makes a notable difference; None where none does."""
        steps = (n / 20 for n in range(1, 20))
        return next((acceptance for acceptance in steps if self.speedup(acceptance) >= NOTABLE), None)

    def _prices(self) -> Prices:
        prices = Prices()
        # More than once, so that what was measured outweighs what is believed beforehand.
        for _ in range(10):
            for width, seconds in self.verify_seconds.items():
                prices.verify.observe(width, 0.0, seconds)
            for width, seconds in (self.draft_seconds or {}).items():
                prices.draft_alone.observe(width, seconds)
        return prices


def conclude(found: Findings) -> list[tuple[str, str]]:
    """What follows from it: rows of a word and a sentence, with the remedies last."""
    return list(_rows(found))


def _rows(found: Findings) -> Iterator[tuple[str, str]]:
    if not found.can_rewind:
        yield "expect", "no gain: this target's caches cannot be put right after a rejection, so nothing is proposed"
        return
    if found.same_vocabulary is False:
        yield "expect", "an error: the two do not share a vocabulary, so the one cannot draft for the other"
        yield from _drafts(found)
        return
    if found.draft_seconds is None:
        yield "expect", "plain decoding: there is no draft model"
        yield from _faster_width(found)
        yield from _drafts(found)
        return
    least = found.break_even()
    if least is None:
        yield "expect", "no gain: with this pair, plain decoding is about as fast even at an acceptance of 0.95"
    else:
        said = f"about {_speeds(found, least)}; nothing to speak of below {least:g}"
        yield "expect", f"{said}. --stats shows the acceptance of a text"
    yield from _faster_width(found)
    if found.draft_cost > DEAR_DRAFT:
        yield "try", f"a smaller draft model: a step of this one takes {found.draft_cost:.0%} of a pass of the target"
        yield from _drafts(found)


def _speeds(found: Findings, least: float) -> str:
    """The speed-up at some acceptances that make a difference."""
    first, *rest = [acceptance for acceptance in (USUAL, GOOD) if acceptance >= least] or [least]
    more = "".join(f", {found.speedup(acceptance):.1f}× at {acceptance:g}" for acceptance in rest)
    return f"{found.speedup(first):.1f}× plain decoding with this pair at an acceptance of {first:g}{more}"


def _faster_width(found: Findings) -> Iterator[tuple[str, str]]:
    """How to have passes over several tokens cost less."""
    if found.width_cost <= DEAR_WIDTH:
        return
    dear = f"each further token of a pass costs {found.width_cost:.0%} of the first"
    if found.blas is not None and found.blas.startswith("reference BLAS") and "float32" in found.dtypes:
        yield "try", f"--blas openblas: {dear}, with the reference BLAS"
    else:
        yield "note", f"{dear}, which is what limits speculation here"


def _drafts(found: Findings) -> Iterator[tuple[str, str]]:
    for suggestion in found.suggestions[:3]:
        yield "try", f"--draft {suggestion}"
    yield "try", "--draft ngram, for texts that quote themselves: it costs no model"
