"""A command of the command line, declared once, and what the ranks that `mlx.launch` starts do in it."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable

import attrs

from protocol.errors import SettingsError
from runtime.cli.arguments.models import Models
from runtime.terminal.display import CommandOutcome


@attrs.frozen(kw_only=True)
class Command:
    """A command: what `--help` says of it, its arguments, and what it does."""

    name: str
    usage: str  # what follows its name
    help: str  # in the list of commands
    description: str  # above the options in its own help
    epilog: str  # below them
    add_arguments: Callable[[argparse.ArgumentParser], None]  # adds its arguments, other than the BLAS
    # It may raise an `OutriderError` for an invalid argument; later errors are in the outcome.
    run: Callable[[argparse.Namespace], CommandOutcome]
    common: str = ""  # the common flags, which `--help` shows; with "" it shows all
    # What ranks other than 0 do meanwhile; None for a command of one machine.
    follow: Callable[[argparse.Namespace, Models], None] | None = None
    # Raises a `SettingsError` for arguments that do not go with several ranks.
    check_for_ranks: Callable[[argparse.Namespace], None] = lambda _: None


def join_if_several(arguments: argparse.Namespace) -> bool:
    """Join the other ranks if this process is one of several. Returns: whether this is a rank that follows.

    The group is left in the arguments, where `models_of` finds it.
    """
    from actors.distributed.rank_address import rank_address

    if rank_address() is None:
        return False
    command: Command = arguments.command
    if command.follow is None:
        raise SettingsError(f"{command.name} runs on one machine, got several ranks; run it without mlx.launch")
    command.check_for_ranks(arguments)
    from actors.distributed.joining import join_ranks

    arguments.group = join_ranks()
    return bool(arguments.group.rank > 0)


def follow(arguments: argparse.Namespace, models: Models) -> None:
    """Follow rank 0 until it closes the target, or has examined the ranks.

    Ctrl-C in a terminal, and a supervisor's SIGTERM, reach all ranks on the machine. Only rank 0 acts on them, and may
    finish the answers that it has begun; the others end with it. A second SIGTERM ends this rank, and so all of them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    models.use_device()
    arguments.command.follow(arguments, models)


def follow_target(_: argparse.Namespace, models: Models) -> None:
    """Follow a command that opens one runtime."""
    from runtime.ranks.following import follow

    wire_memory = models.options.get("wire_memory", True)
    follow(models.target, models.options["group"], models.draft, wire_memory=wire_memory)
