"""Plots: a bar for each row, and the same file for the same figures."""

from __future__ import annotations

from pathlib import Path

import attrs
from plot_texts import texts_of
from sweeps import sweep

from runtime.measuring.plots import Bar, Plot

PLOT = Plot(
    r"a target named $\frac$ with a drafter",
    "tokens per second",
    [
        Bar("plain", 50.0, 48.0, 51.0, "50.0 (1.00×)", stands_out=False),
        Bar("auto", 75.0, 70.0, 80.0, "75.0 (1.50×)", stands_out=True),
        # Another row of the same name is another bar.
        Bar("auto", 60.0, 60.0, 60.0, "60.0 (1.20×)", stands_out=True),
    ],
)


def test_a_plot_has_a_bar_for_each_row(tmp_path: Path) -> None:
    PLOT.save(tmp_path / "plot.svg")
    texts = texts_of(tmp_path / "plot.svg")
    named = {part for bar in PLOT.bars for part in (bar.label, bar.text)}
    assert [text for text in texts if text in named] == [
        "plain",
        "auto",
        "auto",
        "50.0 (1.00×)",
        "75.0 (1.50×)",
        "60.0 (1.20×)",
    ]
    assert {PLOT.title, PLOT.x_label} < set(texts)


@sweep(("suffix", "begins"), [("svg", b"<?xml"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_same_plot_gives_the_same_bytes(tmp_path: Path, suffix: str, begins: bytes) -> None:
    first, second, other = (tmp_path / f"{name}.{suffix}" for name in ("first", "second", "other"))
    PLOT.save(first)
    PLOT.save(second)
    attrs.evolve(PLOT, bars=PLOT.bars[:1]).save(other)
    assert first.read_bytes().startswith(begins)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
