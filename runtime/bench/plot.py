"""Plots of a benchmark's speeds. matplotlib is an extra, and is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from runtime.measuring.figures import Record

_COLOURS = {"mlx-lm": "#9aa0a6", "outrider": "#2563eb"}


def draw(result: Record) -> Figure:
    """A bar for each contender: median, slowest and fastest repeat, and the limit of free drafting."""
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.median is not None][::-1]
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        axes.barh(position, row.median, color=_COLOURS[row.engine], height=0.7)
        axes.errorbar(
            row.median, position, xerr=[[row.median - row.low], [row.high - row.median]], color="black", capsize=3, lw=1
        )
        if row.limit is not None and row.lookahead != 0:
            axes.plot([row.limit] * 2, [position - 0.35, position + 0.35], color="#f59e0b", lw=2)
        axes.annotate(
            f"{row.median:.1f}" if row.vs_plain is None else f"{row.median:.1f}  ({row.vs_plain:.2f}×)",
            (max(row.high, row.limit or 0.0 if row.lookahead != 0 else 0.0), position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    plain = result.rows[0].median
    if plain is not None:
        axes.axvline(plain, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("tokens per second: median, slowest and fastest repeat; orange: if drafting were free")
    axes.set_title(_title(result))
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_streams(result: Record) -> Figure:
    """Tokens per second over the number of streams: one line a contender, with its slowest and fastest repeat."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.name for row in result.rows):
        rows = [row for row in result.rows if row.name == name and row.median is not None]
        if not rows:
            continue
        axes.errorbar(
            [row.streams for row in rows],
            [row.median for row in rows],
            yerr=[[row.median - row.low for row in rows], [row.high - row.median for row in rows]],
            label=name,
            color=_COLOURS["mlx-lm" if rows[0].kind == "batched" else "outrider"],
            linestyle={"one after another": "--", "in turns": ":"}.get(rows[0].kind, "-"),
            marker="o",
            capsize=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(result.streams, [str(number) for number in result.streams])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens of all streams per second")
    axes.set_title(_title(result))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _title(result: Record) -> str:
    return f"{Path(result.target).name} with {Path(result.draft).name}, {result.machine.get('processor', '')}"
