"""Reports of measurements for the commands: printed with a table, written as JSON or drawn as a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown_path
from protocol.validation import must_be
from runtime.terminal.display import OutputError, check_place, printing
from runtime.terminal.tables import TextTable, show_sections, show_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def check_plot(file: str | None, formats: Sequence[str]) -> Path | None:
    """The path of a plot, checked before anything is measured.

    Raises: SettingsError: a plot cannot be written there.
    """
    if file is None:
        return None
    path = Path(file).expanduser()
    if path.suffix.lower() not in formats:
        raise must_be("plot", f"a file that ends in {', '.join(formats)}", file)
    check_place("plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError.of('{plot} needs matplotlib, which is not installed; pip install "outrider[plot]"')
    return path


def save_plot(figure: Figure, path: Path, *, error_type: type[OutriderError] = OutputError, **options: Any) -> None:
    """Write a plot, in the format that the file's suffix names.

    Raises: OutriderError: the file cannot be written; of the type that is given.
    """
    try:
        figure.savefig(path, format=path.suffix[1:].lower(), **options)
    except OSError as error:
        raise error_type(f"cannot write the plot to {shown_path(str(path))}: {error.strerror}") from error
