"""The statistics of a stream as a table on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol.reprs import shown, size_in_words
from runtime.terminal.display import stderr_console
from runtime.terminal.tables import show_pairs

if TYPE_CHECKING:
    from protocol.statistics import Statistics


def print_statistics(statistics: Statistics, ending: str | None = None) -> None:
    """Print a table of statistics on stderr, and how the text ended; see `ending_of`."""
    console = stderr_console()
    if console.is_terminal:
        console.print()
    show_pairs(console, [*([] if ending is None else [("end", ending)]), *rows_of(statistics)])


def ending_of(finish_reason: str | None, stop_reason: str | int | None) -> str:
    """How a text ended, by the last token's reasons."""
    if finish_reason is None:
        return "early, before the text was over"
    if finish_reason == "length":
        return "cut off, by --max-tokens or the context"
    if stop_reason is None:
        return "by the model"
    return f"at the stop {'string' if isinstance(stop_reason, str) else 'token'} {shown(stop_reason)}"


def rows_of(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Names and values of the table."""
    s = statistics
    cached = f", of which {s.cached_tokens:,} were cached" if s.cached_tokens else ""
    yield "tokens", f"{s.generated_tokens:,} after a prompt of {s.prompt_tokens:,}{cached}"
    yield "speed", "not known after a single round" if s.generation_tps is None else f"{s.generation_tps:.1f} tokens/s"
    yield "first token", "none came" if s.time_to_first_token is None else f"after {_duration(s.time_to_first_token)}"
    if s.acceptance_rate is not None:
        copied, forced = s.accepted_copied + s.rejected_copied, s.accepted_grammar + s.rejected_grammar
        if s.model_acceptance is not None:
            accepted = s.accepted - s.accepted_copied - s.accepted_grammar
            yield "acceptance", f"{s.model_acceptance:.1%} ({accepted:,} of {s.proposed - copied - forced:,} proposed)"
        if s.copy_acceptance is not None:
            yield "copies", f"{s.copy_acceptance:.1%} ({s.accepted_copied:,} of {copied:,} proposed)"
        if s.grammar_acceptance is not None:
            yield "forced", f"{s.grammar_acceptance:.1%} ({s.accepted_grammar:,} of {forced:,} proposed)"
        if s.stale_acceptance is not None:
            fresh = "–" if s.fresh_acceptance is None else f"{s.fresh_acceptance:.1%}"
            yield "fresh and stale", f"{fresh} and {s.stale_acceptance:.1%} of the drafts"
    else:
        yield "acceptance", "nothing was proposed"
    yield "tokens per round", f"{s.tokens_per_round:.2f} in {s.rounds:,} round{'' if s.rounds == 1 else 's'}"
    if s.rows_per_pass is not None and s.rows_per_pass > 1:
        waits = f"a round waited {_duration(s.wait_seconds / s.pass_rows)}, at most {_duration(s.longest_wait_seconds)}"
        yield "shared passes", f"{s.rows_per_pass:.2f} streams a pass; {waits}"
    if s.resting_rounds:
        yield "undrafted", f"{s.resting_rounds:,} rounds, in which speculating did not pay"
    if s.draft_timeouts:
        yield "late drafter", f"{s.draft_timeouts:,} times, and the target went on without it"
    if s.draft_failures:
        yield "failed drafter", f"{s.draft_failures:,} times, and the target went on without it"
    yield "lookahead", f"{s.lookahead_hits:,} hits, {s.lookahead_misses:,} misses"
    yield "busy", f"target {s.target_busy:.0%}, draft {s.draft_busy:.0%}"
    yield "peak memory", size_in_words(s.peak_memory)
    for sentence in s.advice:
        yield "advice", sentence


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
