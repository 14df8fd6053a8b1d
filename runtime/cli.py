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
from pathlib import Path
from typing import Any

import trio

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.settings import NGRAM
from runtime import bench_command, blas, chat_command, generate_command, serve_command
from runtime.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.settings_arguments import add_settings, in_options
from runtime.simulate_command import add_simulate
from runtime.terminal import BY_SIGNAL, Display, Outcome, print_sections, print_text, say, warnings_at_the_end

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
        say(f"error: {in_options(str(error)) if isinstance(error, SettingsError) else error}")
        return MISUSED if isinstance(error, (SettingsError, PromptError)) else FAILED
    except KeyboardInterrupt:
        # Where no event loop was there to receive the signal: while reading a prompt, while importing.
        return BY_SIGNAL + signal.SIGINT


# --- the commands' arguments ----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose help is written, or fails, as everything else here, and which says what may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Of a command, too, so that its usage is shown.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed, unknown

    def _hint(self, unknown: list[str]) -> str:
        known = list(self._option_string_actions)
        found = (difflib.get_close_matches(name.partition("=")[0], known, n=1) for name in unknown if name[:1] == "-")
        meant = [near[0] for near in found if near]
        return f"; did you mean {' '.join(meant)}?" if meant else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {hint}")
        super()._check_value(action, value)

    def print_help(self, file: Any = None) -> None:
        print_text(self.format_help())


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="outrider",
        description="Speculative decoding on MLX: a small draft model proposes, the target model checks.",
        allow_abbrev=False,
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
        help="continue a prompt",
        description="Continue a prompt. The text appears on stdout as it comes; everything else goes to stderr.",
        epilog="Ctrl-C stops cleanly, statistics included; a second one quits at once.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=generate)
    _add_models(parser)
    add_settings(parser)
    _add_blas(parser)
    generate_command.add_arguments(parser)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, turn by turn: what you type is answered on stdout, as it comes. With a chat "
        "template, a model is asked as it was trained to be; a base model goes on with the text so far. Where stdin is "
        "no terminal, each of its lines is a turn.",
        epilog='"/help" lists what else can be typed. Ctrl-C stops an answer and keeps what was said; at the prompt, a '
        "second one leaves.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=chat)
    _add_models(parser)
    chat_command.add_arguments(parser)
    add_settings(parser)
    _add_blas(parser)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI's clients ask, with a page for browsers",
        description="Answer over HTTP: OpenAI's interface at /v1, a page at /, /health, /metrics for Prometheus, "
        "/openapi.json and /docs. Whoever hangs up cancels what it asked for. Needs the extra serve.",
        epilog="Ctrl-C or SIGTERM stops it: answers under way have a while to come to their end; a second one quits "
        "at once. Where the target fails, it ends with status 1, for a supervisor to start it again.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=serve)
    _add_models(parser)
    serve_command.add_arguments(parser)
    _add_blas(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="path or hub id (default: the bundled demo pair)")
    models.add_argument(
        "--draft",
        metavar="MODEL",
        help='path or hub id; "ngram" looks up what came after the same words before, without a model; '
        '"none" decodes plainly (default: the demo drafter with the demo target, else none)',
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what a model or a pair can do on this machine",
        description="Say what a model or a pair can do on this machine: its caches, how they are rewound and what that "
        "costs, whether the vocabularies match, and what forward passes take.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=doctor)
    parser.add_argument("target", metavar="MODEL", nargs="?", help="path or hub id (default: the bundled demo pair)")
    parser.add_argument("--draft", metavar="MODEL", help="path or hub id of a draft model")
    _add_blas(parser)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure what speculation buys on this machine",
        description="Measure what speculation buys on this machine: mlx-lm's plain and speculative decoding, and this "
        "runtime's, of the same prompts, in turn. It takes some minutes; nothing else should run meanwhile.",
        epilog="Ctrl-C ends it, and shows what was measured until then.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=bench)
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="path or hub id (default: the bundled demo pair)")
    models.add_argument(
        "--draft",
        metavar="MODEL",
        help='path or hub id of a draft model; "ngram" for prompt lookup',
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
        is_alone = _models(arguments)[1] in (None, NGRAM)
        blas.put_in_front(arguments.blas, num_workers=1 if is_alone else blas.WORKERS)


def _models(arguments: argparse.Namespace) -> tuple[str | Path, str | Path | None]:
    """The target and the drafter that were asked for."""
    if arguments.draft == "none":
        draft = None
    elif arguments.draft is None:
        draft = DEMO_DRAFT if arguments.target is None else None
    else:
        draft = arguments.draft
    return DEMO_TARGET if arguments.target is None else arguments.target, draft


# --- the commands ---------------------------------------------------------------------------------


def generate(arguments: argparse.Namespace) -> int:
    """The command `generate`: continue a prompt.

    Returns: the exit status.

    Raises: OutriderError: it failed; what there was to show until then has been shown.
    """
    return _status(generate_command.generate(arguments, *_models(arguments)))


def chat(arguments: argparse.Namespace) -> int:
    """The command `chat`: talk with a model.

    Returns: the exit status.

    Raises: OutriderError: it failed.
    """
    return _status(chat_command.chat(arguments, *_models(arguments)))


def serve(arguments: argparse.Namespace) -> int:
    """The command `serve`: answer over HTTP.

    Returns: the exit status; 0 where a signal has stopped it.

    Raises: OutriderError: it failed.
    """
    return _status(serve_command.serve(arguments, *_models(arguments)))


def doctor(arguments: argparse.Namespace) -> int:
    """The command `doctor`: examine a model or a pair.

    Returns: the exit status.

    Raises: OutriderError: a model cannot be loaded.
    """
    from runtime.doctor import examine, report

    target, draft = _models(arguments)
    with warnings_at_the_end(), Display() as display:
        diagnosis = trio.run(partial(examine, target, draft, on_progress=display.doing))
    print_sections(report(diagnosis))
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """The command `bench`: measure what speculation buys.

    Returns: the exit status.

    Raises: OutriderError: it failed; what was measured until then has been shown.
    """
    return _status(bench_command.bench(arguments, *_models(arguments)))


def _status(outcome: Outcome) -> int:
    """The exit status of a command that ended so.

    Raises: OutriderError: it failed.
    """
    if outcome.signal is not None:
        return BY_SIGNAL + outcome.signal
    if outcome.failure is None:
        return 0
    raise outcome.failure
