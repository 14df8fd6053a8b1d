"""Timing of tokens: the timed part of a run, and its rounds."""

from __future__ import annotations

from sweeps import sweep

from runtime.bench.contenders import TimedToken, count_rounds, run_of


def moments(flags: str, *, start: float = 10.0) -> list[TimedToken]:
    """Tokens a second apart: "d" is a drafted token, "t" the target's own."""
    return [TimedToken(i, flag == "d", start + i) for i, flag in enumerate(flags)]


@sweep(
    ("flags", "first", "began"),
    [("tttt", 1, 10.0), ("ddtdt", 3, 12.0), ("tddd", 1, 10.0), ("dddd", 4, 13.0)],
)
def test_timing_begins_when_the_first_round_has_ended(flags, first, began):
    run = run_of([moments(flags)], 5.0, {}, with_prompts=False)
    assert (run.num_timed, run.seconds) == (len(flags) - first, 10.0 + len(flags) - 1 - began)


@sweep(
    ("flags", "num_draft_tokens", "rounds", "proposed"),
    [
        ("tttt", 0, 4, 0),
        ("ddtdtt", 2, 3, 5),  # the last round needs one token, and one is proposed
        ("ddtddtdd", 2, 3, 6),
        ("dddtdddd", 8, 2, 12),
    ],
)
def test_rounds_and_proposals_are_told_from_who_proposed_the_tokens(flags, num_draft_tokens, rounds, proposed):
    drafted = [flag == "d" for flag in flags]
    assert count_rounds(drafted, num_draft_tokens, max_tokens=len(flags)) == (rounds, proposed)


def test_several_texts_are_timed_from_the_call_to_the_last_token_of_all():
    run = run_of([moments("ttt", start=11.0), moments("t", start=14.0)], 10.0, {}, with_prompts=True)
    assert (run.num_tokens, run.num_timed, run.seconds, run.first_tokens) == (4, 4, 4.0, (1.0, 4.0))
    assert run.texts == ((0, 1, 2), (0,))
