"""The command `outrider simulate`: the speed that a draft model would bring on a machine described by a few numbers.

It decodes one text, or several at once, in simulated time in each way, and compares the speeds. Nothing here imports
mlx before the arguments are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown, shown_path
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integer, must_be
from runtime.cli.flags import flag
from runtime.simulation.comparison import LOOKAHEADS, NUM_TOKENS, Comparison, compare
from runtime.simulation.ranks_comparison import RanksComparison, compare_ranks
from runtime.simulation.scenario import Scenario
from runtime.simulation.sharding import ALL_REDUCES, MAX_RANKS, SHAPES, Sharding
from runtime.simulation.streams_comparison import (
    MAX_STREAMS,
    STREAM_LOOKAHEADS,
    STREAM_TOKENS,
    StreamsComparison,
    compare_streams,
)
from runtime.simulation.tables import print_comparison, print_ranks_comparison, print_streams_comparison
from runtime.terminal.display import Display, Output, warnings_at_the_end

PLOT_SUFFIXES = (".svg", ".png")

# Options that are fields of a `Scenario`: help text, type and placeholder of each.
_SCENARIO: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "acceptance": ("probability that the draft's first choice is the target's token, in [0, 1]", float, "A"),
    "cost_ratio": ("time of a draft step over time of a decoding step of the target, T_d / T_v(1), > 0", float, "C"),
    "contention": (
        "share of a draft step's time by which it delays the target when both run, in [0, 1]; 0 for separate hardware "
        "(default: 0)",
        float,
        "K",
    ),
    "verify_slope": ("verifying m tokens takes T_v(1)·(1 + S·(m − 1)), >= 0 (default: 0.06)", float, "S"),
    "draft_slope": (
        "the same for a draft pass over m tokens, in draft steps (default: that of --verify-slope)",
        float,
        "S",
    ),
    "verify_table": (
        "instead of a slope, measured times of a target pass over 1, 2, 3, … tokens, in any unit, such as "
        "12.1,12.3,13.8; or WIDTH:TIME pairs, such as 1:12.1,2:12.3,8:20.5. With --streams, a width is all rows of a "
        "pass",
        str,
        "TIMES",
    ),
    "draft_table": ("the same for a draft pass", str, "TIMES"),
    "overhead": ("time added to each forward pass, in T_v(1), >= 0 (default: 0)", float, "T"),
    "second_choice": (
        "probability that the draft's second choice is right where its first is wrong, in [0, 1] (default: 0.45)",
        float,
        "P",
    ),
    "stale_acceptance": (
        "for a drafter that was trained for the target: what the acceptance comes down to, in [0, A], as more and more "
        "of the hidden states that it reads are its own, because the target has not given them yet (default: a draft "
        "model, which reads none)",
        float,
        "P",
    ),
    "spread": (
        "concentration of the Beta distribution of the draft's confidence, > 0; small for a draft that knows when it "
        "is right (default: 1.3)",
        float,
        "B",
    ),
    "overconfidence": (
        "how far the draft overstates its confidence, >= 0; 0 is calibrated (default: 0)",
        float,
        "O",
    ),
    "seed": ("seed of the text and of the drafts (default: 0)", int, "N"),
}

# Options that are fields of a `Sharding`, but for the ranks.
_SHARDING: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "pass_time": ("milliseconds in which one machine decodes a token, or would: T_v(1)", float, "MS"),
    "link_latency": ("microseconds that a small message takes from one rank to the next", float, "US"),
    "link_bandwidth": ("gigabits per second of a link, in each direction", float, "GBIT"),
    "all_reduce": (f"how parts are added up: {', '.join(ALL_REDUCES)} (default: ring)", str, "KIND"),
    "layers": ("layers of the target", int, "N"),
    "hidden_size": ("numbers in its hidden state", int, "N"),
}
_NEEDED = ("pass_time", "link_latency", "link_bandwidth", "layers", "hidden_size")


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "simulate",
        usage="outrider simulate --acceptance A --cost-ratio C [options]",
        help="predict what a draft model brings on hardware that you describe",
        description="Predict the speed that a draft model brings on hardware that you describe. The scheduling is the "
        "real one; models and time are simulated. All speeds are relative to plain decoding.",
        epilog="""examples:
  outrider simulate --acceptance 0.8 --cost-ratio 0.1
  outrider simulate --acceptance 0.7 --cost-ratio 0.1 --plot speeds.svg
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --verify-table 1,0.99,1.13
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --verify-table 1:1,8:1.3
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --streams 8
  outrider simulate --acceptance 0.8 --cost-ratio 0.1 --ranks 1,2,4,8 \\
      --shape llama-70b --pass-time 170 --link-latency 50 --link-bandwidth 10

The same arguments give the same figures on any machine. `outrider doctor` measures the cost ratio, the slopes and \
the times of a pair of models.""",
    )
    parser.set_defaults(command=simulate)
    scenario = parser.add_argument_group("scenario")
    for name, (text, kind, metavar) in _SCENARIO.items():
        required = name in ("acceptance", "cost_ratio")
        scenario.add_argument(
            flag(name),
            metavar=metavar,
            type=kind,
            # `Scenario` has the defaults, and checks the bounds.
            default=argparse.SUPPRESS,
            required=required,
            help=text,
        )
    sharding = parser.add_argument_group("a target over several machines")
    sharding.add_argument(
        "--ranks",
        metavar="LIST",
        help="machines that the target is sharded over, or several such numbers, separated by commas, to compare; the "
        "draft model runs on one of the machines",
    )
    sharding.add_argument(
        "--shape",
        choices=SHAPES,
        help=f"layers and hidden size of a known model: {', '.join(SHAPES)}",
        metavar="MODEL",
    )
    for name, (text, kind, metavar) in _SHARDING.items():
        sharding.add_argument(flag(name), metavar=metavar, type=kind, default=argparse.SUPPRESS, help=text)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        help=f"length of each text in tokens (default: {NUM_TOKENS}, or {STREAM_TOKENS} with --streams)",
    )
    run.add_argument(
        "--lookahead",
        metavar="LIST",
        help=f"fixed lookaheads to compare, separated by commas (default: {_listed(LOOKAHEADS)}, or "
        f"{_listed(STREAM_LOOKAHEADS)} with --streams)",
    )
    run.add_argument(
        "--streams",
        metavar="N",
        type=int,
        help=f"decode N texts at once, 1 to {MAX_STREAMS}, and compare plain batches, turns and shared passes; a pass "
        "over several texts costs what all its rows do, padding included",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    output.add_argument("--plot", metavar="FILE", help="write a plot, as .svg or .png (needs matplotlib)")


def simulate(arguments: argparse.Namespace) -> int:
    """The command `simulate`.

    Returns: the exit status.

    Raises:
        SettingsError: an argument is out of its range, or a plot cannot be drawn here.
        OutputError: the result cannot be written.
    """
    several = arguments.streams is not None
    num_tokens = _num_tokens(arguments.tokens, STREAM_TOKENS if several else NUM_TOKENS)
    lookaheads = _lookaheads(arguments.lookahead, STREAM_LOOKAHEADS if several else LOOKAHEADS)
    if several:
        check_integer("streams", arguments.streams, 1, MAX_STREAMS)
    plot = None if arguments.plot is None else _plot_file(arguments.plot)
    scenario = _scenario({name: value for name, value in vars(arguments).items() if name in _SCENARIO})
    ranks, sharding = _sharding(arguments)
    scenario = attrs.evolve(scenario, sharding=sharding)
    if len(ranks) > 1 and (several or plot is not None):
        other = "--streams" if several else "--plot"
        raise SettingsError(f"--ranks must be one number with {other}, got {len(ranks)}; run the command for each")
    comparison: Comparison | StreamsComparison | RanksComparison
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
        from runtime.simulation.plot import draw

        assert not isinstance(comparison, RanksComparison)
        draw(comparison, plot)
    if arguments.json:
        Output().write_now(json.dumps(comparison.as_json(), indent=2) + "\n")
    elif isinstance(comparison, StreamsComparison):
        print_streams_comparison(comparison)
    elif isinstance(comparison, RanksComparison):
        print_ranks_comparison(comparison)
    else:
        print_comparison(comparison)
    return 0


# --- arguments ------------------------------------------------------------------------------------


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _scenario(values: dict[str, Any]) -> Scenario:
    """The scenario that the options describe."""
    for role in ("verify", "draft"):
        table, slope = f"{role}_table", f"{role}_slope"
        if table in values:
            if slope in values:
                raise SettingsError(f"{flag(table)} takes the place of {flag(slope)}; give one of the two")
            values[table] = _table(table, values[table])
    return Scenario(**values)


def _sharding(arguments: argparse.Namespace) -> tuple[Sequence[int], Sharding | None]:
    """The numbers of ranks, and the sharding over the first of them; none of both for a target on one machine.

    Raises: SettingsError: something is missing, there is too much, or a value is out of its range.
    """
    given = {name: getattr(arguments, name) for name in _SHARDING if hasattr(arguments, name)}
    if arguments.ranks is None:
        if extra := [*map(flag, given), *([] if arguments.shape is None else ["--shape"])]:
            raise SettingsError(f"{extra[0]} is about a target over several machines; say over how many, by --ranks")
        return (), None
    if arguments.shape is not None:
        if extra := [flag(name) for name in ("layers", "hidden_size") if name in given]:
            raise SettingsError(f"--shape says the layers and the hidden size; leave out {' and '.join(extra)}")
        given["layers"], given["hidden_size"] = SHAPES[arguments.shape]
    if missing := [flag(name) for name in _NEEDED if name not in given]:
        shape = "; --shape gives the last two" if {"--layers", "--hidden-size"} <= set(missing) else ""
        raise SettingsError(f"--ranks needs {', '.join(missing)}, too{shape}")
    ranks = []
    for part in arguments.ranks.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_RANKS:
            raise must_be("ranks", f"whole numbers between 1 and {MAX_RANKS}, separated by commas", arguments.ranks)
        ranks.append(int(part))
    return ranks, Sharding(ranks[0], **given)


def _table(name: str, text: str) -> tuple[tuple[int, float], ...]:
    """A table of times: "1,0.99,1.13" for widths from 1 on, or pairs such as "1:1,2:1.05,8:1.3".

    Args:
        name: what a message calls the table.
        text: what the user gives.

    Returns: pairs (width, time); whether they can be a table is for `Scenario` to check.
    Raises: SettingsError: the text is neither form.
    """
    parts = [part.strip() for part in text.split(",")]
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


def _num_tokens(value: int | None, default: int) -> int:
    if value is None:
        return default
    check_integer("tokens", value, 1)
    return value


def _lookaheads(text: str | None, default: Sequence[int]) -> Sequence[int]:
    """The lookaheads in a list such as "1,2,4", sorted, without repeats."""
    if text is None:
        return default
    values = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_LOOKAHEAD:
            raise must_be(
                "lookahead",
                f"whole numbers between 1 and {MAX_LOOKAHEAD}, separated by commas",
                text,
                "plain decoding and the automatic lookahead are always included",
            )
        values.add(int(part))
    return sorted(values)


def _plot_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise SettingsError(f"plot must name a file that ends in {' or '.join(PLOT_SUFFIXES)}, got {shown(name)}")
    if not path.parent.is_dir():
        raise SettingsError(
            f"plot must name a file in a directory that exists, and {shown_path(str(path.parent))} does not"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("plot needs matplotlib, which is not installed: pip install 'outrider[plot]'")
    return path
