"""The command `outrider simulate`: the speed that a draft model would bring on a machine described by a few numbers.

It decodes one text in simulated time in each way, and compares the speeds. Nothing here imports mlx before the
arguments are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.reprs import shown, shown_path
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integer
from runtime.simulation.comparison import LOOKAHEADS, NUM_TOKENS, Comparison, compare, described
from runtime.simulation.scenario import Scenario
from runtime.terminal.display import Display, Output, printing, warnings_at_the_end
from runtime.terminal.tables import TableRow, TextTable, show_table

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
    "overhead": ("time added to each forward pass, in T_v(1), >= 0 (default: 0)", float, "T"),
    "second_choice": (
        "probability that the draft's second choice is right where its first is wrong, in [0, 1] (default: 0.45)",
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

The same arguments give the same figures on any machine. `outrider doctor` measures the cost ratio and the slopes of a \
pair of models.""",
    )
    parser.set_defaults(command=simulate)
    scenario = parser.add_argument_group("scenario")
    for name, (text, kind, metavar) in _SCENARIO.items():
        required = name in ("acceptance", "cost_ratio")
        scenario.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=metavar,
            type=kind,
            # `Scenario` has the defaults, and checks the bounds.
            default=argparse.SUPPRESS,
            required=required,
            help=text,
        )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=NUM_TOKENS,
        help="length of the text in tokens (default: %(default)s)",
    )
    run.add_argument(
        "--lookahead",
        metavar="LIST",
        default=",".join(map(str, LOOKAHEADS)),
        help="fixed lookaheads to compare, separated by commas (default: %(default)s)",
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
    num_tokens = _num_tokens(arguments.tokens)
    lookaheads = _lookaheads(arguments.lookahead)
    plot = None if arguments.plot is None else _plot_file(arguments.plot)
    scenario = Scenario(**{name: value for name, value in vars(arguments).items() if name in _SCENARIO})
    with warnings_at_the_end(), Display() as display:
        comparison = compare(scenario, num_tokens, lookaheads, on_progress=display.show_activity)
    if plot is not None:
        from runtime.simulation.plot import draw

        draw(comparison, plot)
    if arguments.json:
        Output().write_now(json.dumps(comparison.as_json(), indent=2) + "\n")
    else:
        _print(comparison)
    return 0


# --- arguments ------------------------------------------------------------------------------------


def _num_tokens(value: int) -> int:
    check_integer("tokens", value, 1)
    return value


def _lookaheads(text: str) -> list[int]:
    """The lookaheads in a list such as "1,2,4", sorted, without repeats."""
    values = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_LOOKAHEAD:
            raise SettingsError(
                f"lookahead must be whole numbers between 1 and {MAX_LOOKAHEAD}, separated by commas, "
                f"got {shown(text)}; plain decoding and the automatic lookahead are always included"
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


# --- output ----------------------------------------------------------------------------------------


_HEADINGS = (
    "decoding",
    "lookahead",
    "speed",
    "tokens\na round",
    "accepted",
    "hits",
    "target\nbusy",
    "draft\nbusy",
    "",
)


def _print(comparison: Comparison) -> None:
    best = comparison.best_sequential
    rows = []
    for contender in comparison.contenders:
        counts, is_drafted = contender.result.statistics, contender.decoding != "plain"
        cells = (
            contender.decoding,
            str(contender.lookahead) if is_drafted else "–",
            f"{contender.speed:.2f}×",
            f"{counts.tokens_per_round:.2f}",
            "–" if counts.acceptance_rate is None else f"{counts.acceptance_rate:.0%}",
            f"{contender.hit_rate:.0%}" if is_drafted else "–",
            f"{counts.target_busy:.0%}",
            f"{counts.draft_busy:.0%}" if is_drafted else "–",
            "best" if contender is best else "",
        )
        rows.append(TableRow(cells, "bold" if contender.decoding == "tree" or contender is best else ""))
    with printing() as console:
        console.print(
            f"{described(comparison.scenario)}; {comparison.num_tokens:,} tokens, seed {comparison.scenario.seed}",
            style="dim",
        )
        show_table(console, TextTable(_HEADINGS, tuple(rows), num_labels=2))
        console.print(
            f"the tree is {comparison.gain:.2f} times as fast as the best sequential decoding, "
            f"lookahead {best.lookahead}"
        )
