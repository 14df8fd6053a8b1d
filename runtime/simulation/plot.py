"""The plot of `outrider simulate`. matplotlib is an extra, and is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.reprs import shown_path
from runtime.simulation.comparison import Comparison, Decoding, described
from runtime.terminal.display import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that colour-blind readers can tell apart (Okabe and Ito).
_COLOURS: dict[Decoding, str] = {
    "plain": "#666666",
    "sequential": "#0072B2",
    "single chain": "#D55E00",
    "tree": "#009E73",
}
_STYLES: dict[Decoding, str] = {"plain": ":", "single chain": "--", "tree": "-"}

# Smallest distance between two labels, as a fraction of the axis.
_MIN_LABEL_DISTANCE = 0.055


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
        try:
            figure.savefig(path, format=path.suffix[1:].lower(), metadata={"Date": None} if is_svg else {})
        except OSError as error:
            raise OutputError(f"cannot write the plot to {shown_path(str(path))}: {error.strerror}") from error


def _draw_on(axes: Axes, comparison: Comparison) -> None:
    sequential, best = comparison.of("sequential"), comparison.best_sequential
    top = 1.1 * max(contender.speed for contender in comparison.contenders)
    # Evenly spaced, whatever the lookaheads, since the plot is about where the maximum is.
    positions = list(range(len(sequential)))
    axes.set_xticks(positions, [str(contender.lookahead) for contender in sequential])
    axes.set_xlim(-0.4, positions[-1] + 0.4)
    axes.set_ylim(0, top)
    axes.set_xlabel("lookahead of sequential decoding (most tokens in one proposal)")
    axes.set_ylabel("tokens per second (plain decoding = 1)")
    axes.set_title(
        f"{described(comparison.scenario)}\n{comparison.num_tokens:,} tokens, seed {comparison.scenario.seed}",
        fontsize=9,
        color="#444444",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)

    # Broken lines are drawn over the solid one, so that equal speeds stay visible.
    for contender in reversed(comparison.contenders):
        if contender.decoding != "sequential":
            colour = _COLOURS[contender.decoding]
            axes.axhline(contender.speed, color=colour, linestyle=_STYLES[contender.decoding], linewidth=1.8)
    blue = _COLOURS["sequential"]
    axes.plot(positions, [contender.speed for contender in sequential], marker="o", color=blue, zorder=3)
    maximum = positions[sequential.index(best)]
    axes.plot(maximum, best.speed, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=blue, zorder=4)
    # Leads from the maximum to its label, since the curve ends elsewhere.
    axes.hlines(best.speed, maximum, positions[-1] + 0.4, color=blue, linestyle=":", linewidth=0.8)
    for at, text, colour in _spread(labels(comparison), _MIN_LABEL_DISTANCE * top):
        axes.text(1.02, at, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def labels(comparison: Comparison) -> list[tuple[float, str, str]]:
    """The labels beside the plot: (speed, text, colour)."""
    best = comparison.best_sequential
    found = [(best.speed, f"sequential, best: {best.speed:.2f}×", _COLOURS["sequential"])]
    for contender in comparison.contenders:
        if contender.decoding != "sequential":
            name = contender.decoding if contender.lookahead == 0 else f"{contender.decoding}, {contender.lookahead}"
            found.append((contender.speed, f"{name}: {contender.speed:.2f}×", _COLOURS[contender.decoding]))
    return found


def _spread(labels: list[tuple[float, str, str]], min_distance: float) -> list[tuple[float, str, str]]:
    """Labels that do not overlap: each at its height, or as little above it as needed."""
    placed, lowest = [], 0.0
    for height, text, colour in sorted(labels):
        at = max(height, lowest)
        lowest = at + min_distance
        placed.append((at, text, colour))
    return placed
