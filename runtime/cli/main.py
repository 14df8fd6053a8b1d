"""The command line: `outrider generate PROMPT`, also as `python -m runtime generate PROMPT`.

Stdout has the generated text and nothing else (with `--json`, one JSON object), so it can be piped. Everything else
goes to stderr; animation and colour go to a terminal only. If stdout is a terminal, the text follows the dimmed prompt,
and a line break is added if the text does not end with one. A pipe or a file gets the text byte for byte.

Exit statuses: 0 the work is complete; 1 an error; 2 the command line, a setting or the prompt is wrong; 130 and 143
interrupted by SIGINT (Ctrl-C) and SIGTERM; 141 the reader of stdout has gone.

Everything that needs no model is checked before one is loaded. A new command has a module of its own beside this one,
and an `_add_…` function here.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import signal
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.reprs import shown
from runtime.cli import bench_command, chat_command, doctor_command, generate_command, ranks, serve_command
from runtime.cli.arguments.models import DRAFTER_ELSEWHERE, PREFIX_CACHE, Models, add_models, models_of
from runtime.cli.arguments.settings import add_settings
from runtime.cli.distill_command import add_distill, distill
from runtime.cli.flags import hint_for, in_flags
from runtime.cli.selftest_command import add_selftest
from runtime.cli.simulate_command import add_simulate
from runtime.loading import blas
from runtime.terminal.display import (
    SIGNAL_STATUS_BASE,
    CommandOutcome,
    exit_status,
    print_message,
    print_text,
    printing_choices,
)

FAILED = 1
MISUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None for those of the process.

    Returns: the exit status.

    Raises: SystemExit: for `--help`, `--version` and arguments that argparse cannot parse.
    """
    try:
        arguments = _parser().parse_args(argv)
        _choose_blas(arguments)
        if ranks.is_one_of_several():
            ranks.join(arguments)
            if arguments.group.rank > 0:
                return exit_status(ranks.follow(arguments, models_of(arguments)))
        status: int = arguments.command(arguments)
        return status
    except OutriderError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return SIGNAL_STATUS_BASE + signal.SIGPIPE
        print_message(f"error: {in_flags(error)}")
        return MISUSED if isinstance(error, (SettingsError, PromptError)) else FAILED
    except KeyboardInterrupt:
        # No signal handler of a command was installed yet: a prompt was read, or a module imported.
        return SIGNAL_STATUS_BASE + signal.SIGINT


# The options that people use, by command: what `--help` shows. Those of other commands are few.
_COMMON = {
    "generate": "--target --draft --max-tokens --temperature --seed --stop --lookahead --system --json --stats",
    "chat": "--target --draft --max-tokens --temperature --seed --stop --lookahead --system --no-thinking --stats",
    "serve": "--target --draft --host --port --api-key --config --memory-limit --max-streams --max-tokens --lookahead",
    "doctor": "--target --draft --device --kv-bits --max-kv-size --rewind --distributed --blas",
    "bench": "--target --draft --shape --prompt --max-tokens --temperature --lookahead --streams --json --plot",
    "simulate": "--acceptance --cost-ratio --contention --streams --ranks --shape --lookahead --tokens --json --plot",
}


# --- the commands' arguments ----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argparse parser that prints help like all other output, and suggests flags and commands for unknown ones."""

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **keywords)
        self._common = _COMMON.get(self.prog.rpartition(" ")[2], "").split()
        if self._common:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Checked by the parser of each command, so that the usage of the command is shown.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed, unknown

    def _hint(self, unknown: list[str]) -> str:
        """Suggestions for unknown flags; "" if there are none."""
        flags = [
            name
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and action.help != argparse.SUPPRESS
        ]
        by_request = self.prog.endswith(" serve")
        hints = [
            hint
            for name in unknown
            if name[:1] == "-" and (hint := hint_for(name.partition("=")[0], flags, by_request=by_request))
        ]
        return "".join(f"; {hint}" for hint in hints)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {shown(value)}; {hint}")
        super()._check_value(action, value)

    def print_help(self, file: Any = None) -> None:
        hidden = [action for action in self._actions if self._common and not self._is_common(action)]
        helps = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = self.format_help()
        for action, said in zip(hidden, helps, strict=True):
            action.help = said
        print_text(text)

    def _is_common(self, action: argparse.Action) -> bool:
        names = action.option_strings
        return not names or bool({"--help", "--help-all", *self._common} & set(names))


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
    _add_distill(commands)
    add_selftest(commands)
    add_simulate(commands)
    return parser


class _Formatter(argparse.HelpFormatter):
    """Lays out help like argparse, but leaves indented lines, which are examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith(" ") else fill(line, width, indent) for line in text.split("\n"))


class _HelpAll(argparse.Action):
    """Prints the help of all options."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print_text(parser.format_help())
        parser.exit()


class _Version(argparse.Action):
    """Prints the version. Looked up only when needed, since that searches all installed distributions."""

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
        help="continue or answer a prompt",
        description="Continue a prompt, or answer it if the model has a chat template. The text streams to stdout; "
        "everything else goes to stderr.",
        epilog="""examples:
  outrider generate "def quicksort(items):" -m 120 --stats
  outrider generate "What is a monad?" --target org/model --draft org/small
  outrider generate - --target org/model --draft ngram --raw < file.py

Ctrl-C stops the generation and still prints statistics; a second Ctrl-C exits at once.""",
    )
    parser.set_defaults(command=_with_models(generate_command.generate))
    generate_command.add_arguments(parser)
    add_settings(parser)
    # A single text never reuses a prefix.
    add_models(parser, without=PREFIX_CACHE)
    _add_blas(parser)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        usage="outrider chat [options]",
        help="chat with a model",
        description="Chat with a model, turn by turn. Answers stream to stdout. Turns go through the model's chat "
        "template; a model without one continues the text so far. If stdin is no terminal, each of its lines is a "
        "turn.",
        epilog="""examples:
  outrider chat --target org/model --draft org/small --system "You are brief."
  outrider chat --target org/model --draft ngram -t 0.7 --no-thinking

"/help" lists the commands of the chat. Ctrl-C stops an answer, which stays in the conversation; pressed twice at the \
prompt, it leaves the chat.""",
    )
    parser.set_defaults(command=_with_models(chat_command.chat))
    add_models(parser)
    chat_command.add_arguments(parser)
    add_settings(parser)
    _add_blas(parser)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        usage="outrider serve [options]",
        help="serve an OpenAI-compatible HTTP API and a web page",
        description="Serve models over HTTP: an OpenAI-compatible API at /v1, a web page at /, /health, /metrics for "
        "Prometheus, /openapi.json and /docs. A client that disconnects cancels its request. Needs the extra serve.",
        epilog="""examples:
  outrider serve --target org/model --draft org/small --port 8080
  OUTRIDER_API_KEY=... outrider serve --host 0.0.0.0 --max-streams 8
  outrider serve --config models.toml --memory-limit 24GB

Ctrl-C or SIGTERM stops the server; current answers have --grace-seconds to end. A second one exits at once. If the \
target model fails, the server exits with status 1, so that a supervisor can restart it. One of several models is \
loaded again for its next request.""",
    )
    parser.set_defaults(command=_with_models(serve_command.serve))
    add_models(parser)
    serve_command.add_arguments(parser)
    _add_blas(parser)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        usage="outrider doctor [MODEL] [options]",
        help="examine a model or a pair on this machine",
        description="Examine a model or a pair on this machine: its caches and how they rewind, whether the "
        "vocabularies match, how long forward passes take, and what speed to expect. With --distributed, examine the "
        "ranks of a target that is sharded over several machines.",
        epilog="""examples:
  outrider doctor org/model --draft org/small
  outrider doctor --target org/model --kv-bits 8
  mlx.launch --hostfile hosts.json -- outrider doctor --distributed
  outrider doctor --blas openblas""",
    )
    parser.set_defaults(command=_with_models(doctor_command.doctor))
    add_models(
        parser,
        without=(*PREFIX_CACHE, "chat_template_args", *DRAFTER_ELSEWHERE),
        draft_help='path or hub id of a drafter; "auto" takes what is on this disk and fits',
        target_first=True,
    )
    doctor_command.add_arguments(parser)
    _add_blas(parser)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="outrider bench [options]",
        help="measure the speed-up of speculation on this machine",
        description="Measure the speed-up of speculation on this machine: mlx-lm's plain and speculative decoding and "
        "this runtime's decode the same prompts in turn. This takes some minutes, in which nothing else should run.",
        epilog="""examples:
  outrider bench --target org/model --draft org/small
  outrider bench --target org/model --draft ngram --prompts prompts.txt -m 200
  outrider bench --target org/model --draft org/small --draft ngram
  outrider bench --streams 1,4 --json

Ctrl-C stops the benchmark and shows the figures so far.""",
    )
    parser.set_defaults(command=_with_models(bench_command.bench))
    add_models(
        parser,
        without=(*PREFIX_CACHE, "max_kv_size", "chat_template_args", *DRAFTER_ELSEWHERE),
        draft_help='path or hub id of a drafter; "auto" takes what is on this disk and fits; "ngram" is prompt lookup; '
        "may be given more than once",
        several_drafts=True,
    )
    bench_command.add_arguments(parser)
    _add_blas(parser)


def _add_distill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_distill(commands)
    # One model computes at a time, as where nothing is drafted.
    parser.set_defaults(command=distill, draft=None)
    _add_blas(parser)


def _add_blas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blas",
        metavar="BLAS",
        help='BLAS to use on Linux in place of MLX\'s own: "openblas" or the path of a library '
        f"(default: {blas.VARIABLE}, else MLX's own)",
    )


def _choose_blas(arguments: argparse.Namespace) -> None:
    """Load the BLAS that the command line names, or check the one that the environment names.

    Raises: SettingsError: it cannot be used.
    """
    if not hasattr(arguments, "blas"):
        return  # a command that computes nothing
    blas.check_environment()
    if arguments.blas is not None:
        blas.load_before_mlx(arguments.blas)


def _with_models(run: Callable[[argparse.Namespace, Models], CommandOutcome]) -> Callable[[argparse.Namespace], int]:
    """A command that has models. It returns the exit status, and raises the error with which it failed."""

    @wraps(run)
    def command(arguments: argparse.Namespace) -> int:
        with printing_choices():
            return exit_status(run(arguments, models_of(arguments)))

    return command
