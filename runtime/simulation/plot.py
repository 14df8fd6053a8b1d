"""The plots of `outrider simulate`. matplotlib is an extra, and is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.measuring.reports import save_plot
from runtime.simulation.comparison import Comparison, StreamsComparison
from runtime.simulation.scenario import described

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that colour-blind readers can tell apart (Okabe and Ito): that of the curve, and those of the lines, with
# their styles.
_BLUE = "#0072B2"
_LINES = (("#666666", ":"), ("#D55E00", "--"), ("#009E73", "-"))

# Smallest distance between two labels, as a fraction of the axis.
_MIN_LABEL_DISTANCE = 0.055


def speeds_of(comparison: Comparison) -> tuple[dict[int, float], dict[str, float]]:
    """The speeds by fixed lookahead, which are a curve; and those of the other ways, lines, the most important last."""
    curve, lines = {}, {}
    for row in comparison.rows:
        if row.decoding == comparison.fixed and row.lookahead != "auto":
            curve[row.lookahead] = getattr(row, comparison.speed)
        else:
            lines[row.decoding if row.lookahead == 0 else f"{row.decoding}, auto"] = getattr(row, comparison.speed)
    return curve, lines


def labels_of(comparison: Comparison) -> list[tuple[float, str, str]]:
    """The labels beside the plot: (speed, text, colour)."""
    curve, lines = speeds_of(comparison)
    named = [*lines.items(), (f"{comparison.fixed}, best", max(curve.values()))]
    colours = [*(colour for colour, _ in _LINES), _BLUE]
    return [(speed, f"{name}: {speed:.2f}×", colour) for (name, speed), colour in zip(named, colours, strict=True)]


def draw(comparison: Comparison, path: Path) -> None:
    """Write a plot of speed over lookahead, as SVG or PNG according to the file's suffix.

    The same comparison gives the same file.

    Raises: OutputError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and its ids are the same each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 10}):
        figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
        _draw_on(figure.add_subplot(), comparison)
        is_svg = path.suffix.lower() == ".svg"
        save_plot(figure, path, metadata={"Date": None} if is_svg else {})


def _draw_on(axes: Axes, comparison: Comparison) -> None:
    curve, lines = speeds_of(comparison)
    best = max(curve, key=lambda lookahead: curve[lookahead])
    top = 1.1 * max(*curve.values(), *lines.values())
    each = f"streams: {comparison.num_streams}, each of " if isinstance(comparison, StreamsComparison) else ""
    length = f"{each}{comparison.num_tokens:,} tokens, seed {comparison.scenario.seed}"
    # Evenly spaced, whatever the lookaheads, since the plot is about where the maximum is.
    positions = list(range(len(curve)))
    axes.set_xticks(positions, [str(lookahead) for lookahead in curve])
    axes.set_xlim(-0.4, positions[-1] + 0.4)
    axes.set_ylim(0, top)
    axes.set_xlabel(comparison.x_label)
    axes.set_ylabel(comparison.y_label)
    axes.set_title(f"{described(comparison.scenario)}\n{length}", fontsize=9, color="#444444", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)

    # Broken lines are drawn over the solid one, so that equal speeds stay visible.
    for speed, (colour, style) in reversed(list(zip(lines.values(), _LINES, strict=True))):
        axes.axhline(speed, color=colour, linestyle=style, linewidth=1.8)
    axes.plot(positions, list(curve.values()), marker="o", color=_BLUE, zorder=3)
    maximum, best_speed = list(curve).index(best), curve[best]
    axes.plot(maximum, best_speed, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=_BLUE, zorder=4)
    # Leads from the maximum to its label, since the curve ends elsewhere.
    axes.hlines(best_speed, maximum, positions[-1] + 0.4, color=_BLUE, linestyle=":", linewidth=0.8)
    for at, text, colour in _spread(labels_of(comparison), _MIN_LABEL_DISTANCE * top):
        axes.text(1.02, at, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def _spread(labels: list[tuple[float, str, str]], min_distance: float) -> list[tuple[float, str, str]]:
    placed, lowest = [], 0.0
    for height, text, colour in sorted(labels):
        at = max(height, lowest)
        lowest = at + min_distance
        placed.append((at, text, colour))
    return placed
