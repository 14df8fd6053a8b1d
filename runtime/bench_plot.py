"""The speeds of a benchmark as a picture. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import SettingsError

if TYPE_CHECKING:
    from runtime.bench import Benchmark

_COLOURS = {"mlx-lm": "#9aa0a6", "outrider": "#2563eb"}


def draw(result: Benchmark, path: Path) -> None:
    """Draw a bar for each contender: median, slowest and fastest repeat, and the limit of free drafting.

    Args:
        result: at least one repeat of it measured.
        path: its suffix says which format.

    Raises: SettingsError: the file cannot be written.
    """
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.median is not None][::-1]
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        assert row.median is not None
        assert row.low is not None
        assert row.high is not None
        axes.barh(place, row.median, color=_COLOURS[row.engine], height=0.7)
        axes.errorbar(
            row.median, place, xerr=[[row.median - row.low], [row.high - row.median]], color="black", capsize=3, lw=1
        )
        if row.limit is not None and row.lookahead != 0:
            axes.plot([row.limit] * 2, [place - 0.35, place + 0.35], color="#f59e0b", lw=2)
        axes.annotate(
            f"{row.median:.1f}" if row.vs_plain is None else f"{row.median:.1f}  ({row.vs_plain:.2f}×)",
            (max(row.high, row.limit or 0.0 if row.lookahead != 0 else 0.0), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    plain = result.rows[0].median
    if plain is not None:
        axes.axvline(plain, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("tokens per second: median, slowest and fastest repeat; orange: were drafting free")
    axes.set_title(f"{Path(result.target).name} with {Path(result.draft).name}, {result.machine.get('processor', '')}")
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise SettingsError(f"cannot write the plot to {path}: {error.strerror}") from error
