"""Reports for an issue: one JSON file and one page of Markdown, with nothing private in them."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.measuring.machine import versions
from runtime.terminal.display import check_place, write_file
from runtime.terminal.tables import Section, Table

FORMAT = 2
CONTENTS = (
    "This report has figures, the names of processor, system and packages with their versions, variables of MLX and "
    "Outrider without keys and hosts, and the names of models on the hub. It has no paths, no names of users or "
    "machines, no prompts and no texts."
)

# What looks like an absolute path in another library's message, and the file in a line of a traceback.
_PATH = re.compile(r"(?<![\w.<>])(?:~|\.\.?)?(?:/[^\s/'\":,()]+){2,}/?")
_REST_OF_PATH = r"(?:/[^\s'\":,()]*)?"
_FILE_OF_TRACEBACK = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_PACKAGE = Path(__file__).resolve().parents[2]


def write_report(
    path: Path,
    kind: str,
    machine: Mapping[str, str],
    results: Mapping[str, Any],
    sections: Sequence[Section],
    tables: Sequence[tuple[str, Table]],
    *,
    price_tables: Sequence[Mapping[str, Any]] = (),
    secrets: Sequence[str] = (),
) -> None:
    """Write the report of a command, `kind`, with the suffixes .json and .md.

    Args:
        price_tables: times of passes, in the form of `tests/protocol/device_prices/`.
        secrets: texts that neither file may have, such as the paths of models.

    Raises: OutputError: a file cannot be written.
    """
    report = {
        "kind": kind,
        "machine": dict(machine),
        "results": results,
        "price_tables": price_tables,
        "versions": versions(),
        "contents": CONTENTS,
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
    }
    page = _page(f"outrider {kind}", sections, tables)
    write_file(path.with_suffix(".json"), json.dumps(_without_private(report, secrets), indent=2) + "\n")
    write_file(path.with_suffix(".md"), _without_private(page, secrets))


def check_report(file: str | None) -> Path | None:
    """The path of a report, whose suffix does not matter. Raises: SettingsError: nothing can be written there."""
    return None if file is None else check_place("--report", Path(file).expanduser())


def local_paths(*sources: object) -> tuple[str, ...]:
    """The paths among sources of models, in every form that may occur in messages."""
    paths = [Path(str(source)) for source in sources if Path(str(source)).exists()]
    return tuple(str(form) for path in paths for form in (path, path.absolute(), path.resolve()))


def _page(title: str, sections: Sequence[Section], tables: Sequence[tuple[str, Table]]) -> str:
    parts = [f"## {title}", CONTENTS]
    for heading, rows in sections:
        parts += [f"### {heading}", "\n".join(f"- {name}: {value}" if name else f"- {value}" for name, value in rows)]
    for heading, table in tables:
        lines = [table.headings, ["---"] * len(table.headings), *table.rows]
        parts += [f"### {heading}", "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _without_private(value: Any, secrets: Sequence[str]) -> Any:
    """A JSON value without the paths in its texts, and without other secrets."""
    places = (os.path.expanduser("~"), os.getcwd(), sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(_PACKAGE))
    known = {*secrets, *places, *map(os.path.realpath, places)} - {"", "/", ".", "~"}
    # The longest first: a path may be part of another one.
    return _without(value, sorted(known, key=len, reverse=True))


def _without(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, str):
        value = _FILE_OF_TRACEBACK.sub(r'File "\1"', value)
        for path in known:
            value = re.sub(re.escape(path) + _REST_OF_PATH, "<path>", value)
        return _PATH.sub("<path>", value)
    if isinstance(value, dict):
        return {_without(key, known): _without(each, known) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(each, known) for each in value]
    return value
