"""What is on the screen: from what there is to show to rows, and from two screens to what makes one the other.

From top to bottom: the page, or as much of it as there is room for; a rule that says what is going on; the line that
is being typed.
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
    """What there is to say about an answer.

    Attributes:
        activity: in a word or two.
        acceptance: accepted drafted tokens by those that were judged, in [0, 1]; None where none were.
        tokens_per_second: None before there is a rate.
        num_tokens: of the answer; None without one.
        max_tokens: when it is full; None where it may go on.
    """

    activity: str
    acceptance: float | None = None
    tokens_per_second: float | None = None
    num_tokens: int | None = None
    max_tokens: int | None = None


@attrs.frozen
class View:
    """All that there is to show.

    Attributes:
        width, height: of the screen, in cells, >= 1.
        page: rows of that width.
        num_below: rows of the page that are hidden below, because somebody has scrolled; 0 shows its end.
        status: for the rule.
        line: as it is being typed.
        hint: stands in an empty line.
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
    """A screen.

    Attributes:
        rows: as many as the screen has; none wider than it.
        cursor: row and column, from 0.
        width: of the screen.
    """

    rows: tuple[Row, ...]
    cursor: tuple[int, int]
    width: int


# --- what goes where ------------------------------------------------------------------------------


def page_height(view: View) -> int:
    """How many rows there are for the page."""
    return max(0, view.height - 1 - len(_shown_input(view)[0]))


def draw(view: View) -> Frame:
    """The screen that shows all this."""
    below, (row, column) = _shown_input(view)
    height = page_height(view)
    end = max(0, len(view.page) - view.num_below)
    above = list(view.page[max(0, end - height) : end]) if height else []
    above += [()] * (height - len(above))
    if view.height > len(below):
        above.append(rule(view.status, view.num_below, view.width))
    return Frame((*above, *below), (len(above) + row, column), view.width)


def _shown_input(view: View) -> tuple[list[Row], tuple[int, int]]:
    """The rows of the line that are shown, and where among them the cursor is."""
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
    """A typed text cut into rows just where they are full, and the row and column of its cursor."""
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
    # At the end of a row that a newline ends there may be no cell left for the cursor.
    return rows, (cursor[0], min(cursor[1], width - 1))


def rule(status: Status, num_below: int, width: int) -> Row:
    """A row that says what is going on, as fully as there is room for."""
    for parts in _wordings(status, num_below):
        needed = sum(_width(run.text) for part in parts for run in part) + 3 * (len(parts) - 1) + 4
        if needed <= width:
            runs = [Run("─ ", "note")]
            for number, part in enumerate(parts):
                runs += [Run(" ─ ", "note")] * (number > 0) + part
            return _row(*runs, Run(" ─" + "─" * (width - needed), "note"))
    return _row(Run(_clipped(status.activity, width), "note"))


def _wordings(status: Status, num_below: int) -> list[list[list[Run]]]:
    """What can be said, from the fullest wording to the shortest: parts, each of some runs.

    Numbers keep their places while they grow, so that nothing dances.
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
    return [
        [*begin, *fuller, *long],
        [*begin, *fuller, *short],
        [*begin, *full, *short],
        [*begin, *full],
        begin[-1:],
    ]


def _fullness(status: Status) -> tuple[list[Run], list[Run]]:
    """How many tokens there are, in words and as a gauge."""
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
    """As much of a text as fits."""
    end = used = 0
    for cluster in clusters(text):
        used += cluster.width
        if used > width:
            break
        end = cluster.end
    return text[:end]


# --- how it gets there ----------------------------------------------------------------------------

# The other screen, which leaves what was on this one.
ENTER = "\x1b[?1049h"
# Pastes marked as such; and no wrapping by the terminal itself: where it thinks otherwise of a character's width than
# we do, one row is wrong then, and not the screen.
SET_UP = "\x1b[?2004h\x1b[?7l\x1b[2J"
LEAVE = "\x1b[?2026l\x1b[0m\x1b[?7h\x1b[?2004l\x1b[?25h\x1b[?1049l"
# Where a terminal knows it, it shows all that is between these two at once.
_TOGETHER, _AND_NOW = "\x1b[?2026h\x1b[?25l", "\x1b[?25h\x1b[?2026l"

Palette = Mapping[Style, str]
COLOURS: Palette = {
    "plain": "", "drafted": "36", "thinking": "2", "drafted thinking": "2;36", "prompt": "1", "note": "2", "error": "31"
}  # fmt: skip
# For those who have asked for no colour.
NO_COLOURS: Palette = {
    "plain": "", "drafted": "4", "thinking": "2", "drafted thinking": "2;4", "prompt": "1", "note": "2", "error": "1"
}  # fmt: skip


def paint(before: Frame | None, after: Frame, palette: Palette) -> str:
    """What to send so that a screen that shows one frame shows another; nothing where they are the same.

    Args:
        before: None where it is not known what the screen shows.
        after: what it is to show.
        palette: what each style looks like (the parameters of SGR).
    """
    if before == after:
        return ""
    parts = [_TOGETHER]
    for number, row in enumerate(after.rows):
        if before is None or before.width != after.width or before.rows[number : number + 1] != (row,):
            parts.append(f"\x1b[{number + 1};1H{styled(row, palette)}")
            # Behind a row that is full there is nothing to erase, and the cursor is still on its last cell.
            if _width("".join(run.text for run in row)) < after.width:
                parts.append("\x1b[K")
    row_number, column = after.cursor
    parts += [f"\x1b[{row_number + 1};{column + 1}H", _AND_NOW]
    return "".join(parts)


def styled(row: Row, palette: Palette) -> str:
    """A row's text with what makes the terminal show it in its styles."""
    return "".join(f"\x1b[{palette[run.style]}m{run.text}\x1b[0m" if palette[run.style] else run.text for run in row)
