"""The command line: `outrider generate PROMPT`, also as `python -m runtime generate PROMPT`.

What goes where: stdout has the generated text and nothing else (under `--json`, one JSON object), so that
it can be piped on. Everything else, from progress bars to errors, goes to stderr, and what moves or has
colour only to a terminal. Where stdout is a terminal, the text comes after the prompt, dimmed, and a text
that ends in mid-line gets a newline; a pipe or a file gets the text byte for byte.

Exit statuses: 0 the text is whole; 1 something failed; 2 the command line, a setting or the prompt is
wrong; 130 and 143 interrupted by SIGINT (Ctrl-C) and SIGTERM; 141 the reader of stdout has gone.

Whatever can be checked without a model is checked before one is loaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.settings import Settings, settings_from
from protocol.statistics import Statistics
from protocol.trace import Event, Span
from runtime.demo import DEMO_DRAFT, DEMO_TARGET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

FAILED = 1
MISUSED = 2
BY_SIGNAL = 128  # plus the signal's number, as a shell has it

# Seconds within which a second signal is taken for an echo of the first: timeout(1) and its like send
# theirs to the process, and again to the group that the process is in.
ECHO_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what comes after the program's name; None for the process's own.

    Returns: the exit status.

    Raises: SystemExit: for `--help`, `--version` and what argparse cannot parse.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except OutriderError as error:
        _say(f"error: {error}")
        return MISUSED if isinstance(error, (SettingsError, PromptError)) else FAILED
    except KeyboardInterrupt:
        # Where no event loop was there to receive the signal: while reading a prompt, while importing.
        return BY_SIGNAL + signal.SIGINT
    return status


def _say(message: str) -> None:
    """One line on stderr, whatever a library below has put into a message."""
    print("outrider:", re.sub(r"\s*\n\s*", " ", message.strip()), file=sys.stderr)


# --- the commands' arguments ----------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding on MLX: a small draft model proposes, the target model checks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version; asks for it only then, since that looks through all installed distributions."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            version = importlib.metadata.version("outrider")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: running from a source tree)"
        print("outrider", version)
        parser.exit()


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The text appears on stdout as it comes; everything else goes to stderr.",
        epilog="Ctrl-C stops cleanly, statistics included; a second one quits at once.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=generate)
    parser.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads it from stdin, as it is')
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="path or hub id (default: the bundled demo pair)")
    models.add_argument(
        "--draft",
        metavar="MODEL",
        help='path or hub id; "none" decodes plainly (default: the demo drafter with the demo target, else none)',
    )
    settings = parser.add_argument_group("settings")
    for name, metavar, text in (
        ("max_tokens", "N", 'most tokens to generate; "none" for no limit'),
        ("temperature", "T", "0 is greedy"),
        ("seed", "N", "makes a text at a temperature repeatable"),
        ("lookahead", "N", 'most tokens in one proposal; "auto"; 0 decodes plainly'),
        ("acceptance", "RULE", '"match", "rejection", or "auto": match at temperature 0 or with a seed'),
    ):
        default = getattr(attrs.fields(Settings), name).default
        settings.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=metavar,
            # Left to the library, which has the bounds and the remedies in its messages.
            type=_value,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {'a fresh one' if default is None else default})",
        )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object at the end instead of text as it comes")
    output.add_argument("--stats", action="store_true", help="end with a table of statistics on stderr")


def _value(text: str) -> int | float | str | None:
    """What a setting's text would be in Python; the text itself where it is neither a number nor "none"."""
    if text.lower() == "none":
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given.

    Raises: SettingsError: one is out of its range.
    """
    names = [field.name for field in attrs.fields(Settings)]
    settings = {name: value for name, value in vars(arguments).items() if name in names}
    settings_from(settings)
    return settings


def _models(arguments: argparse.Namespace) -> tuple[str | Path, str | Path | None]:
    """The target and the drafter that were asked for."""
    if arguments.draft == "none":
        draft = None
    elif arguments.draft is None:
        draft = DEMO_DRAFT if arguments.target is None else None
    else:
        draft = arguments.draft
    return DEMO_TARGET if arguments.target is None else arguments.target, draft


def _prompt(argument: str) -> str:
    """The prompt that an argument stands for.

    Raises: PromptError: it is not text.
    """
    try:
        if argument == "-":
            if sys.stdin is None:
                raise PromptError('the prompt "-" is to be read from stdin, and stdin is closed')
            argument = sys.stdin.read()
        # Arguments that are no text come with lone surrogates in place of what could not be decoded.
        argument.encode()
    except UnicodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; give it as {sys.getfilesystemencoding()}") from error
    return argument


# --- generate -------------------------------------------------------------------------------------


@attrs.define
class _Generated:
    """What has come of a generation so far.

    Attributes:
        pieces: its text.
        ids: its tokens.
        finish_reason: None unless the text is whole, and written.
        statistics: None where it never began.
        failure: why it ended, where something failed.
        signal: which one interrupted it, if one did.
    """

    pieces: list[str] = attrs.field(factory=list)
    ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    statistics: Statistics | None = None
    failure: OutriderError | None = None
    signal: int | None = None

    def as_json(self) -> str:
        return json.dumps(
            {
                "text": "".join(self.pieces),
                "tokens": self.ids,
                "finish_reason": self.finish_reason,
                "interrupted": self.signal is not None,
                "statistics": None if self.statistics is None else attrs.asdict(self.statistics),
            }
        )


def generate(arguments: argparse.Namespace) -> int:
    """The command `generate`: continue a prompt.

    Returns: the exit status.

    Raises: OutriderError: it failed; what there was to show until then has been shown.
    """
    settings = _settings(arguments)
    target, draft = _models(arguments)
    prompt = _prompt(arguments.prompt)
    output = _Output()
    generated = _Generated()
    with _warnings_at_the_end():
        with _Display() as display:
            work = partial(
                _stream_text, prompt, target, draft, settings, generated, display, None if arguments.json else output
            )
            trio.run(_until_signal, work, generated, display)
        try:
            if not arguments.json:
                output.end_line()
            elif generated.failure is None:
                output.write_now(generated.as_json() + "\n")
        except _OutputError as error:
            generated.failure = generated.failure or error
    if arguments.stats and generated.statistics is not None:
        _print_statistics(generated.statistics)
    return _status(generated)


def _status(generated: _Generated) -> int:
    """The exit status after a generation.

    Raises: OutriderError: it failed.
    """
    if generated.signal is not None:
        return BY_SIGNAL + generated.signal
    if generated.failure is None:
        return 0
    if isinstance(generated.failure.__cause__, BrokenPipeError):
        return BY_SIGNAL + signal.SIGPIPE
    raise generated.failure


async def _until_signal(
    work: Callable[[], Awaitable[None]],
    generated: _Generated,
    display: _Display,
    quit_now: Callable[[int], object] = os._exit,
) -> None:
    """Do the work; SIGINT or SIGTERM cancels it, and another one ends the process.

    Args:
        work: what to do.
        generated: where a failure of the work, or the signal that cancelled it, is noted.
        display: told of a cancellation.
        quit_now: ends the process with a status.
    """
    scope = trio.CancelScope()

    async def cancel_on_signal() -> None:
        cancelled_at = trio.current_time()
        async for number in signals:
            if generated.signal is None:
                generated.signal, cancelled_at = number, trio.current_time()
                display.stopping()
                scope.cancel()
            elif trio.current_time() - cancelled_at > ECHO_S:
                # A load cannot be interrupted, and is waited for; here comes somebody who will not wait.
                display.clear()
                quit_now(BY_SIGNAL + number)

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_signal)
            with scope:
                # Kept, not let through: the nursery would wrap it in a group.
                try:
                    await work()
                except OutriderError as error:
                    generated.failure = error
            nursery.cancel_scope.cancel()
    if generated.finish_reason is not None:
        generated.signal = None  # it came too late to interrupt anything
    if generated.signal is not None:
        generated.failure = None  # nobody waits any more for what failed


async def _stream_text(
    prompt: str,
    target: str | Path,
    draft: str | Path | None,
    settings: dict[str, Any],
    generated: _Generated,
    display: _Display,
    output: _Output | None,
) -> None:
    """Load the models, generate, and write the text to `output` if there is one.

    Raises: OutriderError.

    Cancellation: as `runtime.open` and `TokenStream`. What was generated is in `generated` in any case.
    """
    display.loading([model for model in (target, draft) if model is not None])
    from runtime.engine import open as open_runtime

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        # It warns of long prompts, which the runtime refuses in words of its own.
        logging.getLogger("transformers").setLevel(logging.ERROR)
    async with open_runtime(target, draft, trace=display.on_event) as runtime:
        stream = runtime.stream(prompt, **settings)
        display.reading(stream.statistics().prompt_tokens, settings_from(settings).prefill_step_size)
        try:
            async with stream:
                async for token in stream:
                    generated.pieces.append(token.text)
                    generated.ids.append(token.id)
                    display.clear()
                    if output is not None:
                        if token.index == 0:
                            output.echo(prompt)
                        await output.write(token.text)
                    generated.finish_reason = token.finish_reason
        finally:
            generated.statistics = stream.statistics()


# --- stdout ---------------------------------------------------------------------------------------


class _OutputError(OutriderError):
    """Stdout does not take what is written; the operating system's error is the cause."""


class _Output:
    """Stdout, past Python's buffers: those would be flushed at exit once more, to a reader that has gone."""

    def __init__(self) -> None:
        # Where a process is started with stdout closed, Python has None for it.
        self._fd = -1 if sys.stdout is None else sys.stdout.fileno()
        self._encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._is_in_line = False

    def echo(self, prompt: str) -> None:
        """Show the prompt, dimmed, if this is a terminal."""
        if self._is_terminal:
            from rich.console import Console
            from rich.text import Text

            Console(file=sys.stdout).print(Text(prompt, style="dim"), end="", soft_wrap=True)
            self._is_in_line = True

    async def write(self, text: str) -> None:
        """Write a piece of the text.

        Raises: _OutputError: it cannot be written.

        Cancellation: returns at once, and the piece may or may not be written.
        """
        if text:
            self._is_in_line = False
            # On a thread, since a reader that has stopped reading must not keep a signal from being heard.
            await trio.to_thread.run_sync(self.write_now, text, abandon_on_cancel=True)
            self._is_in_line = not text.endswith("\n")

    def write_now(self, text: str) -> None:
        """Write, and wait until it is written.

        Raises: _OutputError: it cannot be written.
        """
        data = text.encode(self._encoding, "replace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _OutputError(f"cannot write to stdout: {error.strerror}") from error

    def end_line(self) -> None:
        """End a line that the text has left open, if this is a terminal.

        Raises: _OutputError: it cannot be written.
        """
        if self._is_terminal and self._is_in_line:
            self.write_now("\n")


# --- stderr ---------------------------------------------------------------------------------------


def _console() -> Console:
    """Stderr; without colour where it is no terminal, whatever the environment asks for."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, force_terminal=None if _is_terminal() else False)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Display:
    """What moves on stderr: a spinner while models load, a bar while a prompt is read.

    Nothing is shown where stderr is no terminal, and nothing stays behind where it is one.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._is_loading = False

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def loading(self, models: Sequence[str | Path]) -> None:
        """Say that models are being loaded."""
        self._is_loading = True
        # What is not on disk is downloaded, and downloads show bars of their own.
        if _is_terminal() and all(os.path.exists(Path(model).expanduser()) for model in models):
            self._show(f"loading {' and '.join(Path(model).name for model in models)}", None)

    def reading(self, prompt_tokens: int, step_size: int) -> None:
        """Say that the prompt is being read, and in how many steps it will be."""
        self._is_loading = False
        self.clear()
        if _is_terminal():
            # The last token is read together with the first that is generated. Where all others make one
            # step, there is nothing to measure.
            self._show("reading the prompt", prompt_tokens - 1 if prompt_tokens - 1 > step_size else None)

    def on_event(self, event: Event) -> None:
        """Move the bar, if an event is about the prompt."""
        if (
            self._progress is not None
            and self._task is not None
            and isinstance(event, Span)
            and (event.actor, event.kind) == ("target", "prefill")
        ):
            self._progress.update(self._task, advance=event.num_tokens, refresh=True)

    def stopping(self) -> None:
        """Say what a cancellation waits for, where that may take long."""
        if self._is_loading and _is_terminal():
            self.clear()
            _say("stopping once the models are loaded; Ctrl-C again quits at once")

    def clear(self) -> None:
        """Leave nothing on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, description: str, num_tokens: int | None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
        if num_tokens is not None:
            columns += [BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens"), TimeElapsedColumn()]
        self._progress = Progress(*columns, console=_console(), transient=True, redirect_stdout=False)
        self._task = self._progress.add_task(description, total=num_tokens)
        self._progress.start()


@contextmanager
def _warnings_at_the_end() -> Iterator[None]:
    """Keep the runtime's warnings out of the middle of the text, and their tracebacks out altogether."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, collector = logging.getLogger("outrider"), Collector(logging.WARNING)
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
        for message in messages:
            _say(f"warning: {message}")


def _print_statistics(statistics: Statistics) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for row in _rows(statistics):
        table.add_row(*row)
    console = _console()
    if console.is_terminal:
        console.print()
    console.print(table)


def _rows(statistics: Statistics) -> Iterator[tuple[str, str]]:
    s = statistics
    yield "tokens", f"{s.generated_tokens:,} after a prompt of {s.prompt_tokens:,}"
    yield "speed", f"{s.generation_tps:.1f} tokens/s"
    yield "first token", "none came" if s.time_to_first_token is None else f"after {_duration(s.time_to_first_token)}"
    if s.proposed:
        yield "acceptance", f"{s.acceptance_rate:.1%} ({s.accepted:,} of {s.proposed:,} proposed)"
    else:
        yield "acceptance", "nothing was proposed"
    yield "tokens per round", f"{s.tokens_per_round:.2f} in {s.rounds:,} rounds"
    yield "lookahead", f"{s.lookahead_hits:,} hits, {s.lookahead_misses:,} misses"
    yield "busy", f"target {s.target_busy:.0%}, draft {s.draft_busy:.0%}"
    yield "peak memory", _size(s.peak_memory)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
