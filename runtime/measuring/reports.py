"""Reports of measurements for the commands, printed with a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from runtime.terminal.display import printing
from runtime.terminal.tables import TextTable, show_sections, show_table

Section = tuple[str, Sequence[tuple[str, str]]]


@attrs.frozen
class Report:
    """What a command prints of its measurements: heading, titled lists of (name, value), table, paragraphs, lists."""

    table: TextTable
    heading: str = ""
    about: Sequence[Section] = ()
    notes: Iterable[str] = ()
    details: Sequence[Section] = ()

    def print(self) -> None:
        """Print it on stdout.

        Raises: OutputError: it cannot be written.
        """
        with printing() as console:
            if self.heading:
                console.print(self.heading, style="dim")
            if self.about:
                show_sections(console, self.about)
                console.print()
            show_table(console, self.table)
            for number, note in enumerate(self.notes):
                if number == 0 and self.about:
                    console.print()
                console.print(note, markup=False)
            if self.details:
                console.print()
                show_sections(console, self.details)
