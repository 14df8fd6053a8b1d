"""Limits of the server: arguments of `serve` whose values are whole numbers."""

from __future__ import annotations

import argparse

import attrs

from protocol.open_options import AUTO_STREAMS, AUTO_TURNS, MAX_BATCH
from protocol.validation import check_integer
from runtime.cli.flags import flag


@attrs.frozen
class LimitOption:
    """A limit of the server: an option whose value is a whole number.

    Attributes:
        name: its name, with underscores.
        low: its smallest value.
        default: its default; None for no limit.
        help: its help text.
    """

    name: str
    low: int
    default: int | None
    help: str


_LIMITS = (
    LimitOption(
        "max_streams",
        1,
        None,
        f"most texts that a model works on at once (default: {AUTO_STREAMS} if they share passes, else {AUTO_TURNS})",
    ),
    LimitOption("max_batch", 1, MAX_BATCH, "most requests that share one forward pass of the target"),
    LimitOption("max_waiting", 0, 256, "most requests that wait beside those; further ones get status 429"),
    LimitOption("max_tokens", 1, 512, "most tokens of an answer if the request does not set them"),
    LimitOption("max_tokens_limit", 1, None, "most tokens that a request may set (default: the model's context)"),
    LimitOption("max_prompt_tokens", 1, None, "most tokens of a prompt (default: the model's context)"),
    LimitOption(
        "prefill_step_size",
        1,
        None,
        "prompt tokens per prefill pass, during which all other answers wait (default: as many as are cheap, in 0.2 s "
        "at most)",
    ),
    LimitOption("max_body_bytes", 1, 2 * 2**20, "most bytes of a request body"),
    LimitOption(
        "max_connections",
        1,
        None,
        "most connections at once; for a further one, the longest idle one is closed (default: 1000, or as many as the "
        "limit of open files allows)",
    ),
    LimitOption("stalled_seconds", 1, 60, "seconds that a client may leave 64 KiB of a response unread"),
    LimitOption(
        "grace_seconds",
        0,
        5,
        "seconds that current answers have to end when the server is stopped; meanwhile it refuses new requests, and "
        "/health says that it is draining",
    ),
)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits to the arguments of `serve`."""
    limits = parser.add_argument_group("limits")
    for option in _LIMITS:
        default = "" if option.default is None else " (default: %(default)s)"
        limits.add_argument(
            flag(option.name), metavar="N", type=int, default=option.default, help=option.help + default
        )


def check_limits(arguments: argparse.Namespace) -> None:
    """Raises: SettingsError: a limit is out of bounds."""
    for option in _LIMITS:
        value = getattr(arguments, option.name)
        if value is not None:
            check_integer(option.name, value, option.low)
