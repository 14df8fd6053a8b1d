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
import difflib
import importlib.metadata
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.reprs import shown
from protocol.settings import NGRAM
from runtime.cli import bench_command, chat_command, generate_command, serve_command
from runtime.cli.flags import elsewhere, in_flags
from runtime.cli.model_arguments import add_models, models_of
from runtime.cli.settings_arguments import add_settings
from runtime.cli.simulate_command import add_simulate
from runtime.loading import blas
from runtime.terminal.display import BY_SIGNAL, Display, Outcome, print_sections, print_text, say, warnings_at_the_end
from runtime.terminal.signals import quitting

FAILED = 1
MISUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what comes after the program's name; None for the process's own.

    Returns: the exit status.

    Raises: SystemExit: for `--help`, `--version` and what argparse cannot parse.
    """
    try:
        arguments = _parser().parse_args(argv)
        _choose_blas(arguments)
        status: int = arguments.command(arguments)
        return status
    except OutriderError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return BY_SIGNAL + signal.SIGPIPE
        say(f"error: {in_flags(str(error))}")
        return MISUSED if isinstance(error, (SettingsError, PromptError)) else FAILED
    except KeyboardInterrupt:
        # Where no event loop was there to receive the signal: while reading a prompt, while importing.
        return BY_SIGNAL + signal.SIGINT


# --- the commands' arguments ----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose help is written, or fails, as everything else here, and which says what may have been meant."""

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Of a command, too, so that its usage is shown.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed, unknown

    def _hint(self, unknown: list[str]) -> str:
        """What to type in place of flags that there are not, as far as that is known."""
        flags = [
            name
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and action.help != argparse.SUPPRESS
        ]
        by_request = self.get_default("command") is serve
        hints = [
            hint
            for name in unknown
            if name[:1] == "-" and (hint := elsewhere(name.partition("=")[0], flags, by_request=by_request))
        ]
        return "".join(f"; {hint}" for hint in hints)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {shown(value)}; {hint}")
        super()._check_value(action, value)

    def print_help(self, file: Any = None) -> None:
        print_text(self.format_help())


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="outrider",
        description="Speculative decoding on MLX: a small draft model proposes, the target model checks.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_doctor(commands)
    _add_bench(commands)
    add_simulate(commands)
    return parser


class _Formatter(argparse.HelpFormatter):
    """Help as argparse lays it out; indented lines, which are examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith(" ") else fill(line, width, indent) for line in text.split("\n"))


class _Version(argparse.Action):
    """Prints the version; asks for it only then, since that looks through all installed distributions."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            version = importlib.metadata.version("outrider")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: running from a source tree)"
        print_text(f"outrider {version}\n")
        parser.exit()


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        usage="outrider generate PROMPT [options]",
        help="continue a prompt, or answer it",
        description="Continue a prompt, or answer it where the model has a chat template. The text appears on stdout "
        "as it comes; everything else goes to stderr.",
        epilog="""examples:
  outrider generate "def quicksort(items):" -m 120 --stats
  outrider generate "What is a monad?" --target org/model --draft org/small
  outrider generate - --target org/model --draft ngram --raw < file.py

Ctrl-C stops cleanly, statistics included; a second one quits at once.""",
    )
    parser.set_defaults(command=generate)
    generate_command.add_arguments(parser)
    add_settings(parser)
    # A single text has nothing to reuse.
    add_models(parser, without=("prefix_cache_bytes",))
    _add_blas(parser)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        usage="outrider chat [options]",
        help="talk with a model",
        description="Talk with a model, turn by turn: what you type is answered on stdout, as it comes. With a chat "
        "template, a model is asked as it was trained to be; a base model goes on with the text so far. Where stdin is "
        "no terminal, each of its lines is a turn.",
        epilog="""examples:
  outrider chat --target org/model --draft org/small --system "You are brief."
  outrider chat --target org/model --draft ngram -t 0.7 --no-thinking

"/help" lists what else can be typed. Ctrl-C stops an answer and keeps what was said; at the prompt, a second one \
leaves.""",
    )
    parser.set_defaults(command=chat)
    add_models(parser)
    chat_command.add_arguments(parser)
    add_settings(parser)
    _add_blas(parser)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        usage="outrider serve [options]",
        help="answer over HTTP, as OpenAI's clients ask, with a page for browsers",
        description="Answer over HTTP: OpenAI's interface at /v1, a page at /, /health, /metrics for Prometheus, "
        "/openapi.json and /docs. Whoever hangs up cancels what it asked for. Needs the extra serve.",
        epilog="""examples:
  outrider serve --target org/model --draft org/small --port 8080
  OUTRIDER_API_KEY=... outrider serve --host 0.0.0.0 --max-streams 8

Ctrl-C or SIGTERM stops it: answers under way have a while to come to their end; a second one quits at once. Where \
the target fails, it ends with status 1, for a supervisor to start it again.""",
    )
    parser.set_defaults(command=serve)
    add_models(parser)
    serve_command.add_arguments(parser)
    _add_blas(parser)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        usage="outrider doctor [MODEL] [options]",
        help="say what a model or a pair can do on this machine",
        description="Say what a model or a pair can do on this machine: its caches, how they are rewound and what that "
        "costs, whether the vocabularies match, what forward passes take, and what to expect of it all.",
        epilog="""examples:
  outrider doctor org/model --draft org/small
  outrider doctor --target org/model --kv-bits 8
  outrider doctor --blas openblas""",
    )
    parser.set_defaults(command=doctor)
    add_models(
        parser,
        without=("prefix_cache_bytes",),
        draft_help="path or hub id of a draft model",
        target_first=True,
    )
    _add_blas(parser)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="outrider bench [options]",
        help="measure what speculation buys on this machine",
        description="Measure what speculation buys on this machine: mlx-lm's plain and speculative decoding, and this "
        "runtime's, of the same prompts, in turn. It takes some minutes; nothing else should run meanwhile.",
        epilog="""examples:
  outrider bench --target org/model --draft org/small
  outrider bench --target org/model --draft ngram --prompts prompts.txt -m 200
  outrider bench --streams 1,4 --json

Ctrl-C ends it, and shows what was measured until then.""",
    )
    parser.set_defaults(command=bench)
    add_models(
        parser,
        without=("prefix_cache_bytes", "max_kv_size"),
        draft_help='path or hub id of a draft model; "ngram" for prompt lookup',
    )
    bench_command.add_arguments(parser)
    _add_blas(parser)


def _add_blas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blas",
        metavar="BLAS",
        help='Linux: compute with another BLAS than MLX\'s own: "openblas", or the path of a library '
        f"(default: what {blas.VARIABLE} says, else MLX's own)",
    )


def _choose_blas(arguments: argparse.Namespace) -> None:
    """Put the BLAS in front that the command line, or the environment, asks for.

    Raises: SettingsError: that is not possible.
    """
    if not hasattr(arguments, "blas"):
        return  # a command that computes nothing
    blas.check()
    if arguments.blas is not None:
        # A lookup computes nothing.
        is_alone = models_of(arguments).draft in (None, NGRAM)
        blas.put_in_front(arguments.blas, num_workers=1 if is_alone else blas.WORKERS)


# --- the commands ---------------------------------------------------------------------------------


def generate(arguments: argparse.Namespace) -> int:
    """The command `generate`: continue a prompt.

    Returns: the exit status.

    Raises: OutriderError: it failed; what there was to show until then has been shown.
    """
    return _status(generate_command.generate(arguments, models_of(arguments)))


def chat(arguments: argparse.Namespace) -> int:
    """The command `chat`: talk with a model.

    Returns: the exit status.

    Raises: OutriderError: it failed.
    """
    return _status(chat_command.chat(arguments, models_of(arguments)))


def serve(arguments: argparse.Namespace) -> int:
    """The command `serve`: answer over HTTP.

    Returns: the exit status; 0 where a signal has stopped it.

    Raises: OutriderError: it failed.
    """
    return _status(serve_command.serve(arguments, models_of(arguments)))


def doctor(arguments: argparse.Namespace) -> int:
    """The command `doctor`: examine a model or a pair.

    Returns: the exit status.

    Raises: OutriderError: a model cannot be loaded.
    """
    models = models_of(arguments)
    with warnings_at_the_end(), Display() as display, quitting(display):
        from runtime.doctor.report import examine, report

        diagnosis = trio.run(partial(examine, models.target, models.draft, on_progress=display.doing, **models.options))
    print_sections(report(diagnosis))
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """The command `bench`: measure what speculation buys.

    Returns: the exit status.

    Raises: OutriderError: it failed; what was measured until then has been shown.
    """
    return _status(bench_command.bench(arguments, models_of(arguments)))


def _status(outcome: Outcome) -> int:
    """The exit status of a command that ended so.

    Raises: OutriderError: it failed.
    """
    if outcome.signal is not None:
        return BY_SIGNAL + outcome.signal
    if outcome.failure is None:
        return 0
    raise outcome.failure
