"""What the command line writes: text and tables to stdout; progress, warnings and statistics to stderr."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import attrs
import trio

from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown, shown_path, size_in_words
from protocol.trace import Event, Span
from runtime.terminal.tables import UNBOUNDED, Section, show_pairs, show_sections
from runtime.terminal.word_wrap import WordWrap

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from protocol.statistics import Statistics


# Seconds between two lines about what a command is doing, where stderr is no terminal.
LOG_INTERVAL_S = 30.0

# Exit status of a process that a signal ended, less the signal's number, as shells have it.
SIGNAL_STATUS_BASE = 128


@attrs.define
class CommandOutcome:
    """How a command ended: why its work was complete, or what ended it."""

    finish_reason: str | None = None
    failure: OutriderError | None = None
    signal: int | None = None  # its number


class UnfinishedError(OutriderError):
    """The work of a command came to its end with faults or gaps; the message says which."""


def exit_status(outcome: CommandOutcome) -> int:
    """The exit status for an outcome. Raises: OutriderError: its failure."""
    if outcome.signal is not None:
        return SIGNAL_STATUS_BASE + outcome.signal
    if outcome.failure is None:
        return 0
    raise outcome.failure


def print_message(message: str) -> None:
    """Print a message on stderr, after the program's name, as one line; a terminal wraps it at words."""
    line = "outrider: " + re.sub(r"\s*\n\s*", " ", message.strip())
    if _is_terminal():
        wrap, columns = WordWrap(), _columns(sys.stderr.fileno())
        line = wrap.add(line, columns) + wrap.flush(columns)
    print(line, file=sys.stderr)


def _columns(fd: int) -> int:
    """Width of a terminal as it is now; 0 if it is not known."""
    try:
        return os.get_terminal_size(fd).columns
    except OSError:
        return 0


def cut_message(statistics: Statistics, context_length: int | None, *, in_chat: bool = False) -> str:
    """Why a text whose finish reason is "length" was cut off, and how to have more of it, `in_chat` by its commands."""
    text, num_tokens = "answer" if in_chat else "text", statistics.generated_tokens
    if context_length is not None and statistics.prompt_tokens + num_tokens >= context_length:
        remedy = "/reset begins a new conversation" if in_chat else "shorten the prompt"
        return f"the {text} was cut off, since the model's context of {context_length:,} tokens is full; {remedy}"
    remedy = "/more continues it, and --max-tokens sets the limit" if in_chat else "raise --max-tokens for more"
    return f"the {text} was cut off after {num_tokens:,} token{'' if num_tokens == 1 else 's'}; {remedy}"


def print_stderr(text: str, end: str = "\n") -> None:
    """Print a text on stderr as it is."""
    print(text, end=end, file=sys.stderr, flush=True)


# --- stdout ---------------------------------------------------------------------------------------


class OutputError(OutriderError):
    """Stdout or a file cannot be written; the operating system's error is the cause."""


class Output:
    """Stdout without Python's buffers, which would be flushed again at exit, to a reader that may have gone.

    Its methods raise `OutputError` if stdout cannot be written.
    """

    def __init__(self) -> None:
        # Python has None for a stdout that was closed when the process started.
        self._fd = -1 if sys.stdout is None else sys.stdout.fileno()
        self._encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
        self.is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._is_in_line = False

    @property
    def columns(self) -> int:
        """Width of the terminal as it is now; 0 if there is none, or it is not known."""
        return _columns(self._fd) if self.is_terminal else 0

    def echo(self, prompt: str) -> None:
        """Write the prompt, dimmed, if stdout is a terminal."""
        if self.is_terminal:
            from rich.console import Console
            from rich.text import Text

            Console(file=sys.stdout).print(Text(prompt, style="dim"), end="", soft_wrap=True)
            self._is_in_line = True

    async def write(self, text: str, *, dimmed: bool = False) -> None:
        """Write a piece of the text, perhaps dimmed if stdout is a terminal and NO_COLOR is not set.

        Cancellation: returns at once; the piece may or may not be written.
        """
        if text:
            self._is_in_line = False
            shown = f"\x1b[2m{text}\x1b[22m" if dimmed and self.is_terminal and "NO_COLOR" not in os.environ else text
            # On a thread, so that a reader that has stopped reading does not block the handling of signals.
            try:
                await trio.to_thread.run_sync(self.write_now, shown, abandon_on_cancel=True)
            except trio.Cancelled:
                self._is_in_line = self.is_terminal  # how much was written is not known
                raise
            self._is_in_line = not text.endswith("\n")

    def write_now(self, text: str) -> None:
        """Write a text, and block until it is written."""
        write_all(self._fd, text.encode(self._encoding, "replace"), "stdout")

    def end_line(self) -> None:
        """End an open line, if stdout is a terminal, or goes where stderr goes, which would continue the line."""
        is_shown_with_stderr = self.is_terminal
        if not self.is_terminal and self._fd != -1 and sys.stderr is not None:
            is_shown_with_stderr = os.path.samestat(os.fstat(self._fd), os.fstat(sys.stderr.fileno()))
        if self._is_in_line and is_shown_with_stderr:
            self.write_now("\n")

    def end_answer(self, rest: str = "") -> None:
        """Write the rest of an answer and end its line, whether stdout is a terminal or not."""
        if self._is_in_line or rest:
            self.write_now(rest + "\n")
            self._is_in_line = False


def write_all(fd: int, data: bytes, named: str) -> None:
    """Write without buffers. Raises: OutputError."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        raise OutputError(f"cannot write to {named}: {error.strerror}") from error


def write_file(path: Path, text: str) -> None:
    """Write a whole file. Raises: OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {shown_path(str(path))}: {error.strerror}") from error


def check_place(name: str, path: Path) -> Path:
    """The path of a file to write. Raises: SettingsError: it is a directory, or in no directory that exists."""
    if path.is_dir():
        raise SettingsError(f"{name} {shown_path(str(path))} is a directory; name a file in it")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"{name} {shown_path(str(path))} is in no directory that exists; make {path.parent} first")
    return path


@contextmanager
def printing() -> Iterator[Console]:
    """A console for the block; what is printed to it is written to stdout at the end of the block.

    If stdout is no terminal, nothing is wrapped or split, unless the environment variable COLUMNS sets a width.

    Raises: OutputError: it cannot be written. (A plain rich console would end the process.)
    """
    # A buffer: rich would write to stdout, and fail, even with nothing to write.
    printed = io.StringIO()
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = _console(printed, is_terminal, force_terminal=is_terminal or None)
    yield console
    text = printed.getvalue()
    if not console.is_terminal:
        # Tables pad their lines with blanks.
        text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    print_text(text)


def _console(file: IO[str] | None, is_terminal: bool, *, force_terminal: bool | None) -> Console:
    from rich.console import Console

    # `Console.is_terminal` does not tell: FORCE_COLOR and TTY_COMPATIBLE make it true for a pipe, which has no width.
    width = None if is_terminal or os.environ.get("COLUMNS", "").isdigit() else UNBOUNDED
    return Console(file=file, stderr=file is None, highlight=False, force_terminal=force_terminal, width=width)


def print_text(text: str) -> None:
    """Print a text on stdout; characters that its encoding lacks are replaced. Raises: OutputError."""
    if sys.stdout is None:
        raise OutputError("cannot write to stdout: it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # At exit Python would write the rest again, and complain.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(f"cannot write to stdout: {error.strerror}") from error


# --- stderr ---------------------------------------------------------------------------------------


def stderr_console() -> Console:
    """A console on stderr; without colour if stderr is no terminal, whatever the environment says."""
    is_terminal = _is_terminal()
    return _console(None, is_terminal, force_terminal=None if is_terminal else False)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Display:
    """Progress on stderr: a spinner while models load, a bar during prefill.

    Nothing stays on the screen. If stderr is no terminal, long activities are logged to it, a line now and then.
    """

    def __init__(self) -> None:
        self._logged_at = time.monotonic()
        self._progress: Progress | None = None
        self._stops_when = ""  # when the current activity can be stopped
        self._shows_text = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show_activity(self, what: str) -> None:
        """Show the current activity, without animation: it may be timed, and drawing would take time from it."""
        self._stops_when = f"once this is over: {what}"
        self.clear()
        if _is_terminal():
            self._show(what, None, moves=False)
        else:
            self._log(what)

    def show_share(self, what: str, num_done: int, total: int) -> None:
        """Show how many of a number of things are done, and on a terminal how long the others will take."""
        self._stops_when = "after the forward pass that is running"
        if _is_terminal():
            if self._progress is None or self._progress.tasks[0].total != total:
                self.clear()
                self._show(what, total, "", is_long=True)
            assert self._progress is not None
            self._progress.update(self._progress.task_ids[0], completed=num_done, refresh=True)
        else:
            self._log(f"{what} {num_done:,} of {total:,}")

    def _log(self, message: str) -> None:
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            print_message(message)

    def show_loading(self, models: Sequence[object]) -> None:
        """Show that models are being loaded, each named by its `str`."""
        self._stops_when = "once the models are loaded"
        # A model that is not on disk is downloaded, and downloads show bars of their own.
        if _is_terminal() and all(os.path.exists(Path(str(model)).expanduser()) for model in models):
            self._show(f"loading {' and '.join(Path(str(model)).name for model in models)}", None)

    def show_prefill(self, prompt_tokens: int, step_size: int | Literal["auto"]) -> None:
        """Show that prefill is running, with a bar if it takes more than one pass."""
        self._stops_when = "after the forward pass that is running"
        self._shows_text = False
        self.clear()
        if _is_terminal():
            # The last prompt token belongs to the first decoding pass. If one pass takes all others, nothing advances.
            from protocol.prefill_chunks import MIN_CHUNK_TOKENS

            pass_tokens = MIN_CHUNK_TOKENS if step_size == "auto" else step_size
            self._show("reading the prompt", prompt_tokens - 1 if prompt_tokens - 1 > pass_tokens else None)

    def clear_for_text(self) -> None:
        """Clear the screen before a piece of the text."""
        self._shows_text = True
        self.clear()

    def on_event(self, event: Event) -> None:
        """Advance the bar, if an event is a prefill pass of the target."""
        if self._progress is None or not isinstance(event, Span):
            return
        if (event.actor, event.kind) == ("target", "prefill"):
            self._progress.update(self._progress.task_ids[0], advance=event.num_read, refresh=True)

    def show_stopping(self, and_then: str = "; Ctrl-C again quits at once") -> None:
        """Print what a cancellation waits for."""
        if self._stops_when and _is_terminal():
            self.clear()
            if self._shows_text and sys.stdout is not None and sys.stdout.isatty():
                print_stderr("")  # the cursor is most likely in the middle of a line
            print_message(f"stopping {self._stops_when}{and_then}")

    def clear(self) -> None:
        """Remove everything from the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(
        self, description: str, total: int | None, unit: str = " tokens", *, moves: bool = True, is_long: bool = False
    ) -> None:
        from rich import progress
        from rich.table import Column

        columns: list[progress.ProgressColumn] = [progress.SpinnerColumn()] if moves else []
        # Folded in a narrow terminal: otherwise the remaining time would be cut off.
        wrapped = Column(overflow="fold")
        columns.append(progress.TextColumn("{task.description}", markup=False, table_column=wrapped))
        if total is not None:
            count = progress.TextColumn(f"{{task.completed:,}} of {{task.total:,}}{unit}")
            columns += [progress.BarColumn(), count, progress.TimeElapsedColumn()]
        if is_long:
            columns += [progress.TextColumn("left:"), progress.TimeRemainingColumn()]
        self._progress = progress.Progress(
            *columns, console=stderr_console(), auto_refresh=moves, transient=True, redirect_stdout=False
        )
        self._progress.add_task(description, total=total)
        self._progress.start()


@contextmanager
def warnings_at_the_end() -> Iterator[None]:
    """Hold back the runtime's warnings until the end of the block, and print them without tracebacks."""
    messages: list[str] = []
    try:
        with _records_of("outrider", logging.WARNING, messages.append):
            yield
    finally:
        for message in messages:
            print_message(f"warning: {message}")


@contextmanager
def printing_choices() -> Iterator[None]:
    """Inside the block, print which drafter "auto" takes, once that is known."""
    logger = logging.getLogger("outrider.auto_draft")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with _records_of(logger.name, logging.INFO, print_message):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _records_of(name: str, level: int, take: Callable[[str], None]) -> Iterator[None]:
    logger, taker = logging.getLogger(name), logging.Handler(level)
    taker.emit = lambda record: take(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(taker)
    try:
        yield
    finally:
        logger.removeHandler(taker)


def print_sections(sections: Sequence[Section]) -> None:
    """Print titled lists of (name, value) on stdout. Raises: OutputError."""
    with printing() as console:
        show_sections(console, sections)


# --- statistics -------------------------------------------------------------------------------------


def print_statistics(statistics: Statistics, ending: str | None = None) -> None:
    """Print a table of statistics on stderr, and how the text ended; see `ending_of`."""
    console = stderr_console()
    if console.is_terminal:
        console.print()
    show_pairs(console, [*([] if ending is None else [("end", ending)]), *rows_of(statistics)])


def ending_of(finish_reason: str | None, stop_reason: str | int | None) -> str:
    """How a text ended, by the last token's reasons."""
    if finish_reason is None:
        return "early, before the text was over"
    if finish_reason == "length":
        return "cut off, by --max-tokens or the context"
    if stop_reason is None:
        return "by the model"
    return f"at the stop {'string' if isinstance(stop_reason, str) else 'token'} {shown(stop_reason)}"


def rows_of(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Names and values of the table."""
    s = statistics
    cached = f", of which {s.cached_tokens:,} were cached" if s.cached_tokens else ""
    yield "tokens", f"{s.generated_tokens:,} after a prompt of {s.prompt_tokens:,}{cached}"
    yield "speed", "not known after a single round" if s.generation_tps is None else f"{s.generation_tps:.1f} tokens/s"
    yield "first token", "none came" if s.time_to_first_token is None else f"after {_duration(s.time_to_first_token)}"
    if s.acceptance_rate is not None:
        copied, forced = s.accepted_copied + s.rejected_copied, s.accepted_grammar + s.rejected_grammar
        if s.model_acceptance is not None:
            accepted = s.accepted - s.accepted_copied - s.accepted_grammar
            yield "acceptance", f"{s.model_acceptance:.1%} ({accepted:,} of {s.proposed - copied - forced:,} proposed)"
        if s.copy_acceptance is not None:
            yield "copies", f"{s.copy_acceptance:.1%} ({s.accepted_copied:,} of {copied:,} proposed)"
        if s.grammar_acceptance is not None:
            yield "forced", f"{s.grammar_acceptance:.1%} ({s.accepted_grammar:,} of {forced:,} proposed)"
        if s.stale_acceptance is not None:
            fresh = "–" if s.fresh_acceptance is None else f"{s.fresh_acceptance:.1%}"
            yield "fresh and stale", f"{fresh} and {s.stale_acceptance:.1%} of the drafts"
    else:
        yield "acceptance", "nothing was proposed"
    yield "tokens per round", f"{s.tokens_per_round:.2f} in {_rounds(s.rounds)}"
    if s.rows_per_pass is not None and s.rows_per_pass > 1:
        waits = f"a round waited {_duration(s.wait_seconds / s.pass_rows)}, at most {_duration(s.longest_wait_seconds)}"
        yield "shared passes", f"{s.rows_per_pass:.2f} streams a pass; {waits}"
    if s.resting_rounds:
        yield "undrafted", f"{_rounds(s.resting_rounds)}, decoded by the target alone"
    for name, number in ("late drafter", s.draft_timeouts), ("failed drafter", s.draft_failures):
        if number:
            yield name, f"{number:,} times, and the target went on without it"
    yield "lookahead", f"{s.lookahead_hits:,} hits, {s.lookahead_misses:,} misses"
    yield "busy", f"target {s.target_busy:.0%}, draft {s.draft_busy:.0%}"
    yield "peak memory", size_in_words(s.peak_memory)
    for sentence in s.advice:
        yield "advice", sentence


def _rounds(number: int) -> str:
    return f"{number:,} round{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
