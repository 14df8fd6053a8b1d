"""The plot of `outrider simulate`; the only module that knows matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.reprs import shown_path
from runtime.simulation.comparison import Comparison, Decoding, described
from runtime.terminal.display import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that are told apart also by those who see few (Okabe and Ito).
_COLOURS: dict[Decoding, str] = {
    "plain": "#666666",
    "sequential": "#0072B2",
    "single chain": "#D55E00",
    "tree": "#009E73",
}
_STYLES: dict[Decoding, str] = {"plain": ":", "single chain": "--", "tree": "-"}

# The least distance between two labels, as a part of the axis.
_APART = 0.055


def draw(comparison: Comparison, path: Path) -> None:
    """Write a plot of speed against lookahead; the file's ending says whether it is an SVG or a PNG.

    The same comparison gives the same file.

    Raises: OutputError: it cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in an SVG; and its ids, and with them the file, are the same each time.
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
    # Evenly spaced, whatever the lookaheads: what counts is where the summit is.
    places = list(range(len(sequential)))
    axes.set_xticks(places, [str(contender.lookahead) for contender in sequential])
    axes.set_xlim(-0.4, places[-1] + 0.4)
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

    # Where lines fall together, broken ones on top of the solid one show that they do.
    for contender in reversed(comparison.contenders):
        if contender.decoding != "sequential":
            colour = _COLOURS[contender.decoding]
            axes.axhline(contender.speed, color=colour, linestyle=_STYLES[contender.decoding], linewidth=1.8)
    blue = _COLOURS["sequential"]
    axes.plot(places, [contender.speed for contender in sequential], marker="o", color=blue, zorder=3)
    summit = places[sequential.index(best)]
    axes.plot(summit, best.speed, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=blue, zorder=4)
    # Leads from the summit to its label, since the line itself ends elsewhere.
    axes.hlines(best.speed, summit, places[-1] + 0.4, color=blue, linestyle=":", linewidth=0.8)
    for at, text, colour in _spread(labels(comparison), _APART * top):
        axes.text(1.02, at, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def labels(comparison: Comparison) -> list[tuple[float, str, str]]:
    """What is written beside the plot: the speed at which it belongs, its text, and its colour."""
    best = comparison.best_sequential
    found = [(best.speed, f"sequential, best: {best.speed:.2f}×", _COLOURS["sequential"])]
    for contender in comparison.contenders:
        if contender.decoding != "sequential":
            name = contender.decoding if contender.lookahead == 0 else f"{contender.decoding}, {contender.lookahead}"
            found.append((contender.speed, f"{name}: {contender.speed:.2f}×", _COLOURS[contender.decoding]))
    return found


def _spread(labels: list[tuple[float, str, str]], apart: float) -> list[tuple[float, str, str]]:
    """Labels, of which none covers another: each at its height, or as little above that as it takes."""
    placed, lowest = [], 0.0
    for height, text, colour in sorted(labels):
        at = max(height, lowest)
        lowest = at + apart
        placed.append((at, text, colour))
    return placed
