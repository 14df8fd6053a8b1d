"""The doctor's conclusions, in words, from measured prices."""

from typing import Any

import attrs
import pytest
from sweeps import sweep

from runtime.doctor.conclusion import Findings, conclude

WIDTHS = (1, 2, 3, 5, 9)


def passes(first_s: float, slope: float) -> dict[int, float]:
    """Seconds of passes by number of tokens; each further token costs the share `slope` of the first."""
    return {width: first_s * (1 + slope * (width - 1)) for width in WIDTHS}


def findings(slope: float = 0.06, draft: float | None = 0.1, **changes: Any) -> Findings:
    """Findings for a target that takes 20 ms for a token, and a drafter that takes the share `draft` of that."""
    return Findings(
        **{
            "verify_seconds": passes(0.02, slope),
            "draft_seconds": None if draft is None else passes(0.02 * draft, slope),
            "same_vocabulary": True,
            "can_rewind": True,
            "dtypes": ("float32",),
            "blas": "OpenBLAS (libopenblas.so.0, 1 thread)",
        }
        | changes
    )


def test_prices_are_read_from_the_passes() -> None:
    found = findings(slope=0.5, draft=0.25)
    assert found.width_cost == pytest.approx(0.5, rel=0.02)
    assert found.draft_cost == pytest.approx(0.25)


def test_a_good_pair_is_told_its_speed_up_and_break_even() -> None:
    found = findings()
    assert 1.3 < found.speedup(0.7) < found.speedup(0.9) < 5
    assert conclude(found) == [
        (
            "in short",
            f'use it with lookahead "auto": about {found.speedup(0.7):.1f}× plain decoding with this pair at an '
            f"acceptance of 0.7, {found.speedup(0.9):.1f}× at 0.9, and hardly anything below "
            f"{found.break_even():g}. Two things are still unknown: the acceptance rate on your texts (see --stats), "
            "and how much the models slow each other down (see `outrider bench`)",
        )
    ]


def test_below_the_break_even_there_is_nothing_to_notice() -> None:
    found = findings(slope=0.2)
    least = found.break_even()
    assert found.speedup(least) >= 1.05 > found.speedup(least - 0.05)


def test_a_pair_that_needs_to_be_right_is_told_of_the_high_acceptance_alone() -> None:
    found = findings(slope=0.6, draft=0.2)
    assert found.speedup(0.7) < 1.05 < found.speedup(0.9)
    word, said = conclude(found)[-1]
    assert word == "in short"
    assert "at an acceptance of 0.9, and" in said
    assert "0.7" not in said.partition(", and")[0]


REFERENCE = "reference BLAS (libblas.so.3)"
DEAR = "each further token of a pass costs 90% of the first"
NGRAM = "try: --draft ngram, for texts that repeat themselves; needs no model"
NO_DRAFT = "in short: do not use this draft: plain decoding is about as fast even at an acceptance of 0.95"
OTHER_VOCABULARY = "in short: do not use this pair, which does not share a vocabulary; examine --draft a"
# Findings without a BLAS that would change anything.
NO_BETTER_BLAS: list[dict[str, Any]] = [{"blas": REFERENCE, "dtypes": ("bfloat16",)}, {"blas": None}, {}]


@sweep(
    ("changes", "said"),
    [
        ({"slope": 0.9, "blas": REFERENCE}, [f"try: --blas openblas: {DEAR}, with the reference BLAS", NO_DRAFT]),
        *(({"slope": 0.9, **changes}, [f"note: {DEAR}", NO_DRAFT]) for changes in NO_BETTER_BLAS),
        (
            {"slope": 0.4, "draft": 0.02, "blas": REFERENCE},
            ["try: --blas", 'in short: use it with lookahead "auto" and --blas openblas: about'],
        ),
        (
            {"draft": 0.8},
            ["try: a smaller draft model: a step of this one takes 80% of a pass", NGRAM, "in short: use it with"],
        ),
        (
            {"draft": None, "same_vocabulary": None, "suggestions": ("a", "b", "c", "d")},
            [*(f"try: --draft {name}" for name in "abc"), NGRAM, "in short: this is plain decoding; pass --draft a"],
        ),
        ({"same_vocabulary": False, "suggestions": ("a",)}, ["try: --draft a", NGRAM, OTHER_VOCABULARY]),
        ({"can_rewind": False}, ["in short: use no drafter:"]),
    ],
)
def test_what_to_try_and_what_to_use_follow_from_the_findings(changes: dict[str, Any], said: list[str]) -> None:
    rows = [f"{word}: {text}" for word, text in conclude(findings(**changes))]
    assert [row[: len(begin)] for row, begin in zip(rows, said, strict=True)] == said


def test_times_that_no_line_fits_are_predicted_from_as_they_are() -> None:
    # Up to five tokens cost no more than one, which a drafter that is always right uses; nine cost a hundred passes.
    step = dict(zip(WIDTHS, (0.001, 0.001, 0.001, 0.001, 0.1), strict=True))
    flat, draft = dict.fromkeys(WIDTHS, 0.001), dict.fromkeys(WIDTHS, 0.0001)
    stepped, plateau = (findings(verify_seconds=table, draft_seconds=draft) for table in (step, flat))
    assert 3.5 < stepped.speedup(1.0) < 5.5
    assert stepped.speedup(1.0) < plateau.speedup(1.0)


def test_on_ranks_it_is_said_how_much_of_a_pass_is_exchange() -> None:
    slow = dict.fromkeys(WIDTHS, 0.012)
    found = findings(slope=0.25, exchange_seconds=slow, num_ranks=4)
    assert [found.exchange_share(width) for width in (1, 9)] == pytest.approx([0.6, 0.2])
    rows = conclude(found)
    assert ("note", "60% of a pass of 1 token, 20% of one of 9, is exchange between 4 ranks") in rows
    assert rows[-2][1].startswith("fewer ranks, if they hold the target, or links of less latency")
    quick = conclude(findings(exchange_seconds=dict.fromkeys(WIDTHS, 0.002), num_ranks=2))
    assert [word for word, _ in quick] == ["note", "in short"]


def test_on_ranks_without_a_draft_model_it_is_said_what_one_could_bring() -> None:
    found = findings(draft=None, same_vocabulary=None, exchange_seconds=dict.fromkeys(WIDTHS, 0.002), num_ranks=2)
    said = f"{found.speedup(0.7):.1f}× at 0.7, {found.speedup(0.9):.1f}× at 0.9 acceptance"
    assert conclude(found)[0] == ("note", f"with a drafter whose steps cost nothing it would be {said}")
    # Not where a pass over several tokens costs as much as a pass for each.
    rows = conclude(attrs.evolve(found, verify_seconds=passes(0.02, 1.0)))
    assert not any("cost nothing" in said for _, said in rows)
