"""A command of the command line, declared once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from runtime.terminal.display import CommandOutcome

if TYPE_CHECKING:
    from runtime.cli.arguments.models import Models


@attrs.frozen(kw_only=True)
class Command:
    """A command: what `--help` says of it, its arguments, and what it does.

    Attributes:
        description, epilog: texts above and below the options in its own help.
        run: does the work. It may raise an `OutriderError` for an invalid argument; later errors are in the outcome.
        follow: what ranks other than 0 do meanwhile; None for a command of one machine.
        check_for_ranks: raises a `SettingsError` for arguments that do not go with several ranks.
    """

    name: str
    usage: str  # what follows its name
    help: str  # in the list of commands
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]  # adds its arguments, other than the BLAS
    run: Callable[[argparse.Namespace], CommandOutcome]
    common: str = ""  # the common flags, which `--help` shows; with "" it shows all
    follow: Callable[[argparse.Namespace, Models], None] | None = None
    check_for_ranks: Callable[[argparse.Namespace], None] = lambda _: None
