"""The command line: `outrider generate PROMPT`, also as `python -m runtime generate PROMPT`.

Stdout has the generated text and nothing else (with `--json`, one JSON object), so it can be piped. Everything else
goes to stderr; animation and colour go to a terminal only. If stdout is a terminal, the text follows the dimmed prompt,
and a line break is added if the text does not end with one. A pipe or a file gets the text byte for byte.

Exit statuses: 0 the work is complete; 1 an error; 2 the command line, a setting or the prompt is wrong; 130 and 143
interrupted by SIGINT (Ctrl-C) and SIGTERM; 141 the reader of stdout has gone.

Everything that needs no model is checked before one is loaded.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import signal
from collections.abc import Sequence
from typing import Any

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.reprs import shown
from runtime.cli import bench_command, chat_command, distill_command, doctor_command, generate_command, serve_command
from runtime.cli.arguments.models import models_of
from runtime.cli.batch import command as batch_command
from runtime.cli.command import Command, follow, join_if_several
from runtime.cli.flags import hint_for, in_flags
from runtime.loading import blas
from runtime.terminal.display import (
    SIGNAL_STATUS_BASE,
    exit_status,
    print_message,
    print_stderr,
    print_text,
    printing_choices,
)

FAILED = 1
MISUSED = 2

_MODULES = (
    *(generate_command, chat_command, serve_command, batch_command),
    *(doctor_command, bench_command, distill_command),
)
COMMANDS: dict[str, Command] = {module.COMMAND.name: module.COMMAND for module in _MODULES}

# Commands that earlier versions had, and what takes their place.
REMOVED = {"simulate": "outrider bench measures a pair on this machine", "selftest": "use `outrider doctor --check`"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process if none are given. Returns: the exit status.

    Raises: SystemExit: for `--help`, `--version` and arguments that argparse cannot parse.
    """
    try:
        parser = _parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            print_stderr(parser.format_help(), end="")
            return MISUSED
        blas.check_environment()
        if arguments.blas is not None:
            blas.load_before_mlx(arguments.blas)
        if join_if_several(arguments):
            follow(arguments, models_of(arguments))
            return 0
        with printing_choices():
            return exit_status(arguments.command.run(arguments))
    except OutriderError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return SIGNAL_STATUS_BASE + signal.SIGPIPE
        print_message(f"error: {in_flags(error)}")
        return MISUSED if isinstance(error, (SettingsError, PromptError)) else FAILED
    except KeyboardInterrupt:
        # No signal handler of a command was installed yet: a prompt was read, or a module imported.
        return SIGNAL_STATUS_BASE + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="outrider",
        description="Speculative decoding on MLX: a small draft model proposes, the target model checks.",
    )
    parser.add_argument("--version", action=_Print, const=_version, help="show the version and exit", **_NO_VALUE)
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS.values():
        of_command = commands.add_parser(
            command.name,
            usage=f"outrider {command.name} {command.usage}",
            help=command.help,
            description=command.description,
            epilog=command.epilog,
        )
        of_command.set_defaults(command=command)
        command.add_arguments(of_command)
        of_command.add_argument(
            "--blas",
            metavar="BLAS",
            help='BLAS to use on Linux in place of MLX\'s own: "openblas" or the path of a library '
            f"(default: {blas.VARIABLE}, else MLX's own)",
        )
    return parser


class _Parser(argparse.ArgumentParser):
    """An argparse parser that prints help like all other output, and suggests flags and commands for unknown ones."""

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **keywords)
        command = COMMANDS.get(self.prog.rpartition(" ")[2])
        self._common = [] if command is None else command.common.split()
        if self._common:
            whole = argparse.ArgumentParser.format_help
            self.add_argument("--help-all", action=_Print, const=whole, help="show all options and exit", **_NO_VALUE)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # Checked by the parser of each command, so that the usage of the command is shown.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed, unknown

    def _hint(self, unknown: list[str]) -> str:
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        names = (name.partition("=")[0] for name in unknown if name[:1] == "-")
        hints = (hint_for(name, flags, by_request=self.prog.endswith(" serve")) for name in names)
        return "".join(f"; {hint}" for hint in hints if hint)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            if value in REMOVED:
                raise argparse.ArgumentError(None, f"outrider {value} was removed; {REMOVED[value]}")
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {shown(value)}; {hint}")
        super()._check_value(action, value)

    def print_help(self, file: Any = None) -> None:
        shown_always = {"--help", "--help-all", *self._common}
        helps = [action.help for action in self._actions]
        for action in self._actions if self._common else ():
            if action.option_strings and not shown_always.intersection(action.option_strings):
                action.help = argparse.SUPPRESS
        text = self.format_help()
        for action, help in zip(self._actions, helps, strict=True):
            action.help = help
        print_text(text)


class _Formatter(argparse.HelpFormatter):
    """Leaves indented lines, which are examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(line if line.startswith(" ") else fill(line, width, indent) for line in text.split("\n"))


class _Print(argparse.Action):
    """Prints the text that `const` makes for the parser, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert callable(self.const)
        print_text(self.const(parser))
        parser.exit()


_NO_VALUE: dict[str, Any] = {"nargs": 0, "dest": argparse.SUPPRESS}


def _version(_: argparse.ArgumentParser) -> str:
    # Looked up only when needed, since that searches all installed distributions.
    try:
        version = importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed: running from a source tree)"
    return f"outrider {version}\n"
