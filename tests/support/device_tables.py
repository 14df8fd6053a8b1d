"""Times of forward passes on real devices, for scenarios; see `tests/protocol/test_auto_grid.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scenario import Scenario

ACCEPTANCES = (0.3, 0.6, 0.9)
COST_RATIOS = (0.05, 0.2)

FILES = sorted((Path(__file__).parents[1] / "protocol" / "device_prices").glob("*.json"))

Table = tuple[tuple[int, float], ...]


def tables(path: Path) -> dict[str, Table]:
    """The first tables of a file by model, "target" or "draft": pairs (width, time), for the shortest text measured."""
    return all_tables(path)[0]


def all_tables(path: Path) -> list[dict[str, Table]]:
    """All that a file has: one price table, or a report of `outrider doctor --report` with several."""
    found: dict[str, Any] = json.loads(path.read_text())
    return [_by_model(prices) for prices in found.get("price_tables", [found])]


def _by_model(prices: dict[str, Any]) -> dict[str, Table]:
    length = str(prices["text_lengths"][0])
    return {role: tuple(zip(prices["widths"], times[length], strict=True)) for role, times in prices["seconds"].items()}


def with_more_rows(table: Table) -> Table:
    """A table whose last plateau ends where the measurements do; beyond, times rise in proportion to the rows."""
    (_, time_before), (width, time) = table[-2:]
    return table if time > time_before else (*table, (2 * width, 2 * time))


def scenarios(path: Path) -> Iterator[Scenario]:
    """Scenarios with the times of one file."""
    for table in all_tables(path):
        target, draft = table["target"], table.get("draft", ())
        for cost_ratio in (draft[0][1] / target[0][1],) if draft else COST_RATIOS:
            for acceptance in ACCEPTANCES:
                yield Scenario(
                    acceptance, cost_ratio, contention=0.3, draft_slope=0.1, verify_table=target, draft_table=draft
                )
