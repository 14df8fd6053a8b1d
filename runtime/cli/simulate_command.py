"""The command `outrider simulate`: the speed that a draft model would bring on a machine described by a few numbers.

It decodes one text, or several at once, in simulated time, and compares the speeds of the ways to decode. Nothing here
imports mlx before the arguments are checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.options import options_of
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integer, must_be
from runtime.cli.arguments.settings import add_flags, add_options
from runtime.cli.command import Command
from runtime.cli.flags import flag
from runtime.measuring.plots import PLOT_FORMATS, check_plot
from runtime.simulation.comparison import (
    LOOKAHEADS,
    NUM_TOKENS,
    STREAM_LOOKAHEADS,
    STREAM_TOKENS,
    Comparison,
    RanksComparison,
    StreamsComparison,
    TextComparison,
    compare,
    compare_ranks,
    compare_streams,
)
from runtime.simulation.scenario import MAX_STREAMS, Scenario
from runtime.simulation.sharding import MAX_RANKS, SHAPES, Sharding
from runtime.terminal.display import CommandOutcome, Display, Output, warnings_at_the_end

_SCENARIO = options_of(Scenario)
_SHARDING = options_of(Sharding)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario = parser.add_argument_group("scenario")
    add_options(scenario, Scenario, required=True)
    sharding = parser.add_argument_group("a target over several machines")
    add_flags(
        sharding,
        (
            "--ranks LIST",
            "number of machines that the target is sharded over, or several numbers to compare, separated by commas; "
            "the draft model runs on one of the machines",
        ),
        ("--shape MODEL", f"layers and hidden size of a known model: {', '.join(SHAPES)}", {"choices": SHAPES}),
    )
    add_options(sharding, Sharding)
    lookaheads, of_streams = (",".join(map(str, each)) for each in (LOOKAHEADS, STREAM_LOOKAHEADS))
    add_flags(
        parser.add_argument_group("run"),
        (
            "--tokens N",
            f"length of each text in tokens (default: {NUM_TOKENS}, or {STREAM_TOKENS} with --streams)",
            {"type": int},
        ),
        (
            "--lookahead LIST",
            f"fixed lookaheads to compare, separated by commas (default: {lookaheads}, or {of_streams} with --streams)",
        ),
        (
            "--streams N",
            f"decode N texts at once, 1 to {MAX_STREAMS}, and compare plain batches, turns and shared passes; the cost "
            "of a pass over several texts is that of all its rows, padding included",
            {"type": int},
        ),
    )
    add_flags(
        parser.add_argument_group("output"),
        ("--json", "print one JSON object instead of a table"),
        ("--plot FILE", f"write a plot of the speeds ({', '.join(PLOT_FORMATS)}; needs matplotlib)"),
    )


def simulate(arguments: argparse.Namespace) -> CommandOutcome:
    """Compare the ways of decoding, and show the figures."""
    several = arguments.streams is not None
    num_tokens = (STREAM_TOKENS if several else NUM_TOKENS) if arguments.tokens is None else arguments.tokens
    check_integer("tokens", num_tokens, 1)
    lookaheads = _lookaheads(arguments.lookahead, STREAM_LOOKAHEADS if several else LOOKAHEADS)
    if several:
        check_integer("streams", arguments.streams, 1, MAX_STREAMS)
    plot = check_plot(arguments.plot)
    scenario = _scenario({name: value for name, value in vars(arguments).items() if name in _SCENARIO})
    ranks, sharding = _sharding(arguments)
    scenario = attrs.evolve(scenario, sharding=sharding)
    if len(ranks) > 1 and (several or plot is not None):
        other = "--streams" if several else "--plot"
        raise SettingsError(f"--ranks must be one number with {other}, got {len(ranks)}; run the command for each")
    comparison: TextComparison | StreamsComparison | RanksComparison
    with warnings_at_the_end(), Display() as display:
        if len(ranks) > 1:
            comparison = compare_ranks(scenario, ranks, num_tokens, lookaheads, on_progress=display.show_activity)
        elif several:
            comparison = compare_streams(
                scenario, arguments.streams, num_tokens, lookaheads, on_progress=display.show_activity
            )
        else:
            comparison = compare(scenario, num_tokens, lookaheads, on_progress=display.show_activity)
    if plot is not None:
        assert isinstance(comparison, Comparison)
        comparison.plot().save(plot)
    if arguments.json:
        Output().write_now(json.dumps(comparison.as_json(), indent=2) + "\n")
    else:
        comparison.report().print()
    return CommandOutcome(finish_reason="complete")


# --- arguments ------------------------------------------------------------------------------------


def _scenario(values: dict[str, Any]) -> Scenario:
    for role in ("verify", "draft"):
        table, slope = f"{role}_table", f"{role}_slope"
        if table in values:
            if slope in values:
                raise SettingsError(f"{flag(table)} takes the place of {flag(slope)}; give one of the two")
            values[table] = _table(table, values[table])
    return Scenario(**values)


def _sharding(arguments: argparse.Namespace) -> tuple[Sequence[int], Sharding | None]:
    """The numbers of ranks, and the sharding over the first of them; () and None for a target on one machine."""
    given = {name: getattr(arguments, name) for name in _SHARDING if hasattr(arguments, name)}
    if arguments.ranks is None:
        if extra := [*map(flag, given), *([] if arguments.shape is None else ["--shape"])]:
            raise SettingsError(f"{extra[0]} is about a target over several machines; say over how many, by --ranks")
        return (), None
    if arguments.shape is not None:
        if extra := [flag(name) for name in ("layers", "hidden_size") if name in given]:
            raise SettingsError(f"--shape says the layers and the hidden size; leave out {' and '.join(extra)}")
        given["layers"], given["hidden_size"] = SHAPES[arguments.shape]
    needed = [name for name in _SHARDING if attrs.fields_dict(Sharding)[name].default is attrs.NOTHING]
    if missing := [flag(name) for name in needed if name not in given]:
        shape = "; --shape gives the last two" if {"--layers", "--hidden-size"} <= set(missing) else ""
        raise SettingsError(f"--ranks needs {', '.join(missing)}, too{shape}")
    ranks = _numbers("ranks", arguments.ranks, MAX_RANKS)
    return ranks, Sharding(ranks[0], **given)


def _table(name: str, text: str) -> tuple[tuple[int, float], ...]:
    """(width, time) pairs, from "1,0.99,1.13" (widths from 1 on) or "1:1,2:1.05,8:1.3". `Scenario` checks them."""
    parts = [part.strip() for part in text.split(",")]
    if parts == ["none"]:
        return ()
    try:
        if not any(":" in part for part in parts):
            return tuple((width, float(time)) for width, time in enumerate(parts, start=1))
        pairs = [part.split(":") for part in parts]
        return tuple((int(width), float(time)) for width, time in pairs)
    except ValueError as error:
        bound = (
            "times of passes over 1, 2, 3, … tokens, such as 1,0.99,1.13, or WIDTH:TIME pairs, such as 1:1,2:1.05,8:1.3"
        )
        raise must_be(name, bound, text) from error


def _lookaheads(text: str | None, default: Sequence[int]) -> Sequence[int]:
    if text is None:
        return default
    remedy = "plain decoding and the automatic lookahead are always included"
    return sorted(set(_numbers("lookahead", text, MAX_LOOKAHEAD, remedy)))


def _numbers(name: str, text: str, most: int, remedy: str | None = None) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise must_be(name, f"whole numbers between 1 and {most}, separated by commas", text, remedy)
    return [int(part) for part in parts]


COMMAND = Command(
    name="simulate",
    usage="--acceptance A --cost-ratio C [options]",
    help="predict what a draft model would gain on hardware that you describe",
    description="Predict what a draft model would gain on hardware that you describe. The scheduling is the "
    "real one; models and time are simulated. All speeds are relative to plain decoding.",
    epilog="""examples:
  outrider simulate --acceptance 0.8 --cost-ratio 0.1
  outrider simulate --acceptance 0.7 --cost-ratio 0.1 --plot speeds.svg
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --verify-table 1:1,8:1.3
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --streams 8

The same arguments give the same figures on any machine. `outrider doctor` measures the cost ratio, the slopes and \
the times of a pair of models.""",
    common="--acceptance --cost-ratio --contention --verify-table --streams --lookahead --tokens --json --plot",
    add_arguments=_add_arguments,
    run=simulate,
    computes=False,
)
