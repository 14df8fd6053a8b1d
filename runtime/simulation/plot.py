"""The plots of `outrider simulate`. matplotlib is an extra, and is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

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


@attrs.frozen
class Chart:
    """What a plot shows: speed by fixed lookahead as a curve, and lines for the others, the most important last."""

    title: str
    x_label: str
    y_label: str
    curve_name: str
    curve: Mapping[int, float]
    lines: Mapping[str, float]

    @property
    def labels(self) -> list[tuple[float, str, str]]:
        """The labels beside the plot: (speed, text, colour)."""
        best = max(self.curve.values())
        lines = zip(self.lines.items(), _LINES, strict=True)
        return [
            (best, f"{self.curve_name}, best: {best:.2f}×", _BLUE),
            *((speed, f"{name}: {speed:.2f}×", colour) for (name, speed), (colour, _) in lines),
        ]


def chart_of(comparison: Comparison) -> Chart:
    """The chart of a comparison."""
    about = f"{described(comparison.scenario)}\n"
    length = f"{comparison.num_tokens:,} tokens, seed {comparison.scenario.seed}"
    speeds = {(row.decoding, row.lookahead): getattr(row, comparison.speed) for row in comparison.rows}
    lookaheads = [row.lookahead for row in comparison.of(comparison.fixed) if row.lookahead != "auto"]
    fixed = {lookahead: speeds.pop((comparison.fixed, lookahead)) for lookahead in lookaheads}
    lines = {
        decoding if lookahead == 0 else f"{decoding}, auto": speed for (decoding, lookahead), speed in speeds.items()
    }
    of_streams = f"streams: {comparison.num_streams}, each of " if isinstance(comparison, StreamsComparison) else ""
    return Chart(f"{about}{of_streams}{length}", comparison.x_label, comparison.y_label, comparison.fixed, fixed, lines)


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
        _draw_on(figure.add_subplot(), chart_of(comparison))
        is_svg = path.suffix.lower() == ".svg"
        save_plot(figure, path, metadata={"Date": None} if is_svg else {})


def _draw_on(axes: Axes, chart: Chart) -> None:
    best = max(chart.curve, key=lambda lookahead: chart.curve[lookahead])
    top = 1.1 * max(*chart.curve.values(), *chart.lines.values())
    # Evenly spaced, whatever the lookaheads, since the plot is about where the maximum is.
    positions = list(range(len(chart.curve)))
    axes.set_xticks(positions, [str(lookahead) for lookahead in chart.curve])
    axes.set_xlim(-0.4, positions[-1] + 0.4)
    axes.set_ylim(0, top)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(chart.title, fontsize=9, color="#444444", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)

    # Broken lines are drawn over the solid one, so that equal speeds stay visible.
    for speed, (colour, style) in reversed(list(zip(chart.lines.values(), _LINES, strict=True))):
        axes.axhline(speed, color=colour, linestyle=style, linewidth=1.8)
    axes.plot(positions, list(chart.curve.values()), marker="o", color=_BLUE, zorder=3)
    maximum, best_speed = list(chart.curve).index(best), chart.curve[best]
    axes.plot(maximum, best_speed, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=_BLUE, zorder=4)
    # Leads from the maximum to its label, since the curve ends elsewhere.
    axes.hlines(best_speed, maximum, positions[-1] + 0.4, color=_BLUE, linestyle=":", linewidth=0.8)
    for at, text, colour in _spread(chart.labels, _MIN_LABEL_DISTANCE * top):
        axes.text(1.02, at, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def _spread(labels: list[tuple[float, str, str]], min_distance: float) -> list[tuple[float, str, str]]:
    placed, lowest = [], 0.0
    for height, text, colour in sorted(labels):
        at = max(height, lowest)
        lowest = at + min_distance
        placed.append((at, text, colour))
    return placed
