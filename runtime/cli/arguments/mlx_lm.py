"""Flags of `mlx_lm.generate`, `mlx_lm.chat` and `mlx_lm.server` that have no effect here: accepted, with a hint."""

from __future__ import annotations

import argparse
from typing import Any

from runtime.cli.arguments.settings import parse_size
from runtime.terminal.display import print_message

_ONE_MACHINE = "the models run on one machine"
_OWN_TEMPLATE = "a tokenizer without a chat template has no default one any more; --chat-template gives one"

# By command: the flag, how many values it takes, and the hint.
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, int, str], ...]] = {
    "generate": (
        ("--verbose", 1, "stdout has the text alone; --stats prints statistics on stderr"),
        ("--use-default-chat-template", 0, _OWN_TEMPLATE),
    ),
    "chat": (("--pipeline", 0, _ONE_MACHINE),),
    "serve": (
        ("--log-level", 1, "requests are logged in one line each; --no-access-log turns that off"),
        ("--pipeline", 0, _ONE_MACHINE),
        ("--prompt-cache-size", 1, "the prefix cache is bounded in bytes, by --prefix-cache-bytes"),
        ("--prompt-concurrency", 1, "prompts are read in turns of one pass each; --prefill-step-size bounds a pass"),
        ("--use-default-chat-template", 0, _OWN_TEMPLATE),
    ),
}


def add_flags_without_effect(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the flags of mlx-lm's corresponding command that have no effect here."""
    for flag, num_values, hint in _WITHOUT_EFFECT[command]:
        parser.add_argument(
            flag,
            action=_Hint,
            nargs=num_values,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            const=hint,
        )


def add_flags_of_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `mlx_lm.server` that have another name in `outrider serve`, or no effect there."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--allowed-origins", dest="allow_origin", type=_origins, **hidden)
    parser.add_argument("--decode-concurrency", dest="max_streams", type=int, **hidden)
    parser.add_argument("--prompt-cache-bytes", dest="prefix_cache_bytes", type=parse_size, **hidden)
    add_flags_without_effect(parser, "serve")


class _Hint(argparse.Action):
    """Prints the hint about a flag, in `const`, on stderr."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        print_message(f"{option_string} has no effect: {self.const}")


def _origins(text: str) -> list[str]:
    """The origins in a value of `--allowed-origins`, which mlx-lm separates by commas."""
    return [origin.strip() for origin in text.split(",") if origin.strip()]
