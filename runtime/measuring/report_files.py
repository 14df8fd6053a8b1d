"""Reports for an issue: what was measured as one JSON file and one page of Markdown, with nothing private in them."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import attrs

from protocol.reprs import shown_path
from runtime.measuring.machine import versions
from runtime.measuring.reports import Section
from runtime.terminal.display import OutputError, check_place
from runtime.terminal.tables import TableRow, TextTable

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


@attrs.frozen
class PriceTable:
    """Median times of forward passes, in the form of `tests/protocol/device_prices/`.

    Attributes:
        seconds: by model ("target", "draft") and text length, one for each width.
    """

    device: str  # its name, and the number format of the weights
    source: str  # where the figures come from, and of which model
    widths: Sequence[int]  # numbers of tokens, or of texts of one token each
    text_lengths: Sequence[int]  # tokens in the cache of each text
    seconds: Mapping[str, Mapping[str, Sequence[float]]]

    def table(self) -> TextTable:
        """Milliseconds, with a column for each width."""
        rows = [
            TableRow((f"{model}, {length} tokens of text", *(f"{each * 1e3:.2f}" for each in times)))
            for model, by_length in self.seconds.items()
            for length, times in by_length.items()
        ]
        return TextTable(("ms", *map(str, self.widths)), tuple(rows))


@attrs.frozen
class DeviceReport:
    """The content of a report's JSON. `results` has the command's findings, by name."""

    kind: Literal["selftest", "bench"]
    machine: Mapping[str, str]
    results: Mapping[str, Any]
    price_tables: Sequence[PriceTable] = ()
    versions: Mapping[str, str] = attrs.field(factory=versions)
    contents: str = CONTENTS
    format: int = FORMAT
    date: str = attrs.field(factory=lambda: datetime.now(UTC).date().isoformat())

    def as_json(self, secrets: Sequence[str] = ()) -> dict[str, Any]:
        """The report as a JSON object; see `without_private`."""
        report: dict[str, Any] = without_private(attrs.asdict(self), secrets)
        return report

    def write(
        self,
        path: Path,
        title: str,
        sections: Sequence[Section],
        tables: Sequence[tuple[str, TextTable]],
        secrets: Sequence[str] = (),
    ) -> None:
        """Write `path` with the suffixes .json and .md: a page of sections, lists of (name, value), and of tables.

        Raises: OutputError: a file cannot be written.
        """
        priced = [(f"Passes: {table.source}, {table.device}", table.table()) for table in self.price_tables]
        page = _page(title, sections, [*tables, *priced])
        written = {
            ".json": json.dumps(self.as_json(secrets), indent=2) + "\n",
            ".md": without_private(page, secrets),
        }
        for file, text in ((path.with_suffix(suffix), text) for suffix, text in written.items()):
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise OutputError(f"cannot write {shown_path(str(file))}: {error.strerror}") from error


def check_report(file: str | None) -> Path | None:
    """The path of a report, checked before anything is measured; its suffix does not matter.

    Raises: SettingsError: nothing can be written there.
    """
    return None if file is None else check_place("--report", Path(file).expanduser())


def local_paths(*sources: object) -> tuple[str, ...]:
    """The paths among sources of models, in every form that may occur in messages."""
    paths = [Path(str(source)) for source in sources if Path(str(source)).exists()]
    return tuple(str(form) for path in paths for form in (path, path.absolute(), path.resolve()))


def _page(title: str, sections: Sequence[Section], tables: Sequence[tuple[str, TextTable]]) -> str:
    parts = [f"## {title}", CONTENTS]
    for heading, rows in sections:
        parts += [f"### {heading}", "\n".join(f"- {name}: {value}" if name else f"- {value}" for name, value in rows)]
    for heading, table in tables:
        lines = [table.headings, ("---",) * len(table.headings)]
        lines += [tuple(table.cell(row, column) for column in range(len(table.headings))) for row in table.rows]
        parts += [f"### {heading}", "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def without_private(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A JSON value without the paths in its texts, and without other secrets, such as the paths of models."""
    home = os.path.expanduser("~")
    places = (home, os.getcwd(), sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(_PACKAGE))
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
