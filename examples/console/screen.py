"""The screen: the layout of a frame, and the control sequences that turn one frame into another.

From top to bottom: the visible part of the page, a rule with the status, and the typed line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from console.cells import clusters
from console.editor import Line
from console.page import Row, Run, Style

PROMPT = "> "
LONGEST_INPUT = 8  # rows
GAUGE = 10  # cells


@attrs.frozen
class Status:
    """The status of an answer.

    Attributes:
        activity: one or two words.
        acceptance: accepted / proposed, in [0, 1]; None if nothing was proposed.
        num_tokens, max_tokens: length of the answer so far, None without one; and its limit, None for no limit.
    """

    activity: str
    acceptance: float | None = None
    tokens_per_second: float | None = None
    num_tokens: int | None = None
    max_tokens: int | None = None


@attrs.frozen
class View:
    """All that a frame shows.

    Attributes:
        width, height: size of the screen in cells, >= 1.
        page: rows of that width.
        num_below: number of rows of the page below the visible part; 0 shows its end.
        hint: shown if the typed line is empty.
    """

    width: int
    height: int
    page: Sequence[Row]
    num_below: int
    status: Status
    line: Line
    hint: str


@attrs.frozen
class Frame:
    """The contents of the screen.

    Attributes:
        rows: one for each row of the screen, none wider than it.
        cursor: row and column, from 0.
    """

    rows: tuple[Row, ...]
    cursor: tuple[int, int]
    width: int


# --- layout ---------------------------------------------------------------------------------------


def page_height(view: View) -> int:
    """Number of rows for the page."""
    return max(0, view.height - 1 - len(_shown_input(view)[0]))


def draw(view: View) -> Frame:
    """The frame of a view."""
    below, (row, column) = _shown_input(view)
    height = page_height(view)
    end = max(0, len(view.page) - view.num_below)
    above = list(view.page[max(0, end - height) : end]) if height else []
    above += [()] * (height - len(above))
    if view.height > len(below):
        above.append(rule(view.status, view.num_below, view.width))
    return Frame((*above, *below), (len(above) + row, column), view.width)


def _shown_input(view: View) -> tuple[list[Row], tuple[int, int]]:
    """The visible rows of the typed line, and the cursor in them."""
    prompt = PROMPT if view.width > 3 * len(PROMPT) else ""
    if not view.line.text:
        hint = _clipped(view.hint, view.width - len(prompt) - 1)
        return [_row(Run(prompt, "prompt"), Run(hint, "note"))], (0, len(prompt))
    rows, (cursor_row, column) = _typed_rows(view.line, view.width - len(prompt))
    height = max(1, min(LONGEST_INPUT, view.height // 3, len(rows)))
    first = min(max(0, cursor_row - height + 1), len(rows) - height)
    shown = [
        _row(Run(prompt if number == 0 else " " * len(prompt), "prompt"), Run(text))
        for number, text in enumerate(rows[first : first + height], first)
    ]
    return shown, (cursor_row - first, len(prompt) + column)


def _typed_rows(line: Line, width: int) -> tuple[list[str], tuple[int, int]]:
    """A typed text in rows, cut where they are full, and the row and column of its cursor."""
    rows, used, cursor = [""], 0, (0, 0)
    for cluster in clusters(line.text):
        text = line.text[cluster.begin : cluster.end]
        if cluster.width > width:
            text = "?"
        taken = min(cluster.width, width)
        if used + taken > width:
            rows.append("")
            used = 0
        if cluster.begin == line.cursor:
            cursor = (len(rows) - 1, used)
        if text == "\n":
            rows.append("")
            used = 0
        else:
            rows[-1] += text
            used += taken
    if line.cursor == len(line.text):
        if used == width:
            rows.append("")
            used = 0
        cursor = (len(rows) - 1, used)
    # A full row that ends with a newline has no cell left for the cursor.
    return rows, (cursor[0], min(cursor[1], width - 1))


def rule(status: Status, num_below: int, width: int) -> Row:
    """The rule with the status, in the longest wording that fits."""
    for parts in _wordings(status, num_below):
        needed = sum(_width(run.text) for part in parts for run in part) + 3 * (len(parts) - 1) + 4
        if needed <= width:
            runs = [Run("─ ", "note")]
            for number, part in enumerate(parts):
                runs += [Run(" ─ ", "note")] * (number > 0) + part
            return _row(*runs, Run(" ─" + "─" * (width - needed), "note"))
    return _row(Run(_clipped(status.activity, width), "note"))


def _wordings(status: Status, num_below: int) -> list[list[list[Run]]]:
    """The wordings of a status, from the longest to the shortest: parts, each a list of runs.

    Numbers have fixed widths, so that the parts stay in place while numbers grow.
    """
    begin = [[Run(status.activity)]]
    if num_below:
        begin.append([Run(f"{num_below:,} more below", "prompt")])
    count, gauge = _fullness(status)
    long: list[list[Run]] = []
    short: list[list[Run]] = []
    if status.acceptance is not None:
        long.append([Run("drafted", "drafted"), Run(f" {status.acceptance:4.0%} accepted")])
        short.append([Run(f"{status.acceptance:4.0%}", "drafted")])
    if status.tokens_per_second is not None:
        long.append([Run(f"{status.tokens_per_second:5.1f} tokens/s")])
        short.append([Run(f"{status.tokens_per_second:3.0f}/s")])
    full, fuller = ([count], [gauge + count]) if count else ([], [])
    return [[*begin, *fuller, *long], [*begin, *fuller, *short], [*begin, *full, *short], [*begin, *full], begin[-1:]]


def _fullness(status: Status) -> tuple[list[Run], list[Run]]:
    """The number of tokens as text, and as a gauge."""
    if status.num_tokens is None:
        return [], []
    if status.max_tokens is None:
        return [Run(f"{status.num_tokens:,} tokens")], []
    most = f"{status.max_tokens:,}"
    filled = min(GAUGE, GAUGE * status.num_tokens // status.max_tokens)
    gauge = [Run("█" * filled), Run("░" * (GAUGE - filled), "note"), Run(" ")]
    return [Run(f"{status.num_tokens:>{len(most)},} of {most}")], gauge


def _row(*runs: Run) -> Row:
    return tuple(run for run in runs if run.text)


def _width(text: str) -> int:
    return sum(cluster.width for cluster in clusters(text))


def _clipped(text: str, width: int) -> str:
    """The part of a text that fits a width."""
    end = used = 0
    for cluster in clusters(text):
        used += cluster.width
        if used > width:
            break
        end = cluster.end
    return text[:end]


# --- painting -------------------------------------------------------------------------------------

# The alternate screen, which leaves the normal one as it is.
ENTER = "\x1b[?1049h"
# Bracketed paste on, and automatic wrapping off: if the terminal disagrees about the width of a character, only one row
# is wrong then, not the whole screen.
SET_UP = "\x1b[?2004h\x1b[?7l\x1b[2J"
LEAVE = "\x1b[?2026l\x1b[0m\x1b[?7h\x1b[?2004l\x1b[?25h\x1b[?1049l"
# Synchronized output: a terminal that supports it shows everything between these two at once.
_TOGETHER, _AND_NOW = "\x1b[?2026h\x1b[?25l", "\x1b[?25h\x1b[?2026l"

Palette = Mapping[Style, str]
COLOURS: Palette = {
    "plain": "", "drafted": "36", "thinking": "2", "drafted thinking": "2;36", "prompt": "1", "note": "2", "error": "31"
}  # fmt: skip
# For NO_COLOR.
NO_COLOURS: Palette = {
    "plain": "", "drafted": "4", "thinking": "2", "drafted thinking": "2;4", "prompt": "1", "note": "2", "error": "1"
}  # fmt: skip


def paint(before: Frame | None, after: Frame, palette: Palette) -> str:
    """The control sequences that turn one frame, None if unknown, into another; "" if they are equal.

    The palette has the SGR parameters of each style.
    """
    if before == after:
        return ""
    parts = [_TOGETHER]
    for number, row in enumerate(after.rows):
        if before is None or before.width != after.width or before.rows[number : number + 1] != (row,):
            parts.append(f"\x1b[{number + 1};1H{styled(row, palette)}")
            # A full row has nothing to erase behind it, and the cursor is still on its last cell.
            if _width("".join(run.text for run in row)) < after.width:
                parts.append("\x1b[K")
    row_number, column = after.cursor
    parts += [f"\x1b[{row_number + 1};{column + 1}H", _AND_NOW]
    return "".join(parts)


def styled(row: Row, palette: Palette) -> str:
    """A row's text with the SGR sequences of its styles."""
    return "".join(f"\x1b[{palette[run.style]}m{run.text}\x1b[0m" if palette[run.style] else run.text for run in row)
