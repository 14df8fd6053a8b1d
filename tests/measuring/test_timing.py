"""Timing of tokens: the timed part of a run, its rounds, and how busy a model was in it."""

from __future__ import annotations

from sweeps import sweep

from protocol.trace import Span
from runtime.measuring.timing import TimedToken, TimingWindow, busy_seconds, count_rounds, timing_window


def moments(flags: str, *, start: float = 10.0) -> list[TimedToken]:
    """Tokens a second apart: "d" is a drafted token, "t" the target's own."""
    return [TimedToken(i, flag == "d", start + i) for i, flag in enumerate(flags)]


@sweep(
    ("flags", "first", "began"),
    [("tttt", 1, 10.0), ("ddtdt", 3, 12.0), ("tddd", 1, 10.0), ("dddd", 4, 13.0)],
)
def test_timing_begins_when_the_first_round_has_ended(flags, first, began):
    assert timing_window(moments(flags)) == TimingWindow(first, began, 10.0 + len(flags) - 1)


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


def test_only_what_lies_in_the_window_counts():
    spans = [Span("target", "verify", 0, began, ended) for began, ended in ((0, 2), (3, 5), (5, 6), (9, 12), (20, 21))]
    assert busy_seconds(spans, TimingWindow(0, 1.0, 10.0)) == 1 + 2 + 1 + 1
