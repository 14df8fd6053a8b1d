"""Plots of figures as bars, for the commands. matplotlib is an extra, and is imported only when something is drawn."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown_path
from protocol.validation import must_be
from runtime.terminal.display import OutputError, check_place

# The formats by suffix, each with the metadata that leaves out the time, so that the same figures give the same file.
_METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
PLOT_FORMATS = tuple(_METADATA)

_COLOURS = {True: "#2563eb", False: "#9aa0a6"}
_MAX_TITLE_LINE = 100


@attrs.frozen
class Bar:
    """A row of a plot: a value with its spread."""

    label: str
    value: float
    low: float
    high: float
    text: str  # beside the bar
    stands_out: bool


@attrs.frozen
class Plot:
    """Horizontal bars, the first at the top."""

    title: str
    x_label: str
    bars: Sequence[Bar]

    def save(self, path: Path) -> None:
        """Write it in the format that the file's suffix names. The same plot gives the same bytes.

        Raises: OutputError: the file cannot be written.
        """
        import matplotlib

        # Without pyplot, which would look for a display.
        from matplotlib.figure import Figure

        bars, positions = self.bars, range(len(self.bars))
        # Text stays text in an SVG, whose ids are the same each time; a "$" in a model's name begins no formula.
        with matplotlib.rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "outrider", "text.parse_math": False, "font.size": 9}
        ):
            figure = Figure(figsize=(8, 1.4 + 0.28 * len(bars)), dpi=150, layout="constrained")
            axes = figure.subplots()
            spreads = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
            drawn = axes.barh(
                positions,
                [bar.value for bar in bars],
                # Without a spread, its ends would be drawn as a second edge of the bar.
                xerr=spreads if any(map(any, spreads)) else None,
                error_kw={"capsize": 3, "lw": 1},
                color=[_COLOURS[bar.stands_out] for bar in bars],
                height=0.7,
            )
            axes.bar_label(drawn, [bar.text for bar in bars], padding=5)
            axes.set_yticks(positions, [bar.label for bar in bars])
            axes.invert_yaxis()
            axes.margins(x=0.2, y=0.02)
            axes.set_xlabel(self.x_label)
            # Of the figure and not of the axes, beside whose labels a long title has no room.
            figure.suptitle(textwrap.fill(self.title, _MAX_TITLE_LINE), x=0.01, ha="left", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            suffix = path.suffix.lower()
            try:
                figure.savefig(path, format=suffix[1:], metadata=_METADATA[suffix])
            except OSError as error:
                raise OutputError(f"cannot write the plot to {shown_path(str(path))}: {error.strerror}") from error


def check_plot(file: str | None) -> Path | None:
    """The path of a plot, checked before anything is measured.

    Raises: SettingsError: a plot cannot be written there.
    """
    if file is None:
        return None
    path = Path(file).expanduser()
    if path.suffix.lower() not in PLOT_FORMATS:
        raise must_be("plot", f"a file that ends in {', '.join(PLOT_FORMATS)}", file)
    check_place("plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError('plot needs matplotlib, which is not installed; pip install "outrider[plot]"')
    return path
