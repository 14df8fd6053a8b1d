"""Times of forward passes on real devices, for scenarios; see `tests/protocol/test_device_prices.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILES = sorted((Path(__file__).parents[1] / "protocol" / "device_prices").glob("*.json"))

Table = tuple[tuple[int, float], ...]


def tables(path: Path) -> dict[str, Table]:
    """The first tables of a file by model, "target" or "draft": pairs (width, time), for the shortest text measured."""
    return all_tables(path)[0]


def all_tables(path: Path) -> list[dict[str, Table]]:
    """All that a file has: one price table, or a report of `outrider selftest --report` with several."""
    found: dict[str, Any] = json.loads(path.read_text())
    return [_by_model(prices) for prices in found.get("price_tables", [found])]


def _by_model(prices: dict[str, Any]) -> dict[str, Table]:
    length = str(prices["text_lengths"][0])
    return {role: tuple(zip(prices["widths"], times[length], strict=True)) for role, times in prices["seconds"].items()}


def with_more_rows(table: Table) -> Table:
    """A table whose last plateau ends where the measurements do.

    A shared pass has more rows than were measured. From there on times rise in proportion to the rows: a device that
    computes so many rows at once needs twice the time for twice as many.
    """
    (_, time_before), (width, time) = table[-2:]
    return table if time > time_before else (*table, (2 * width, 2 * time))
