"""Commands under `mlx.launch`: rank 0 runs the command, the others follow. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import signal

from protocol.errors import SettingsError
from runtime.cli import bench_command, doctor_command
from runtime.cli.arguments.models import Models
from runtime.terminal.display import CommandOutcome

# The commands that open one runtime, which the other ranks can follow.
COMMANDS = ("generate", "chat", "serve", "doctor", "bench")


def is_one_of_several() -> bool:
    """Whether this process was started as one of several ranks.

    Raises: SettingsError: the environment says so, and is unreadable.
    """
    from actors.distributed.rank_address import rank_address

    return rank_address() is not None


def join(arguments: argparse.Namespace) -> None:
    """Join the other ranks, and leave the group in the arguments, where `models_of` finds it.

    Raises:
        SettingsError: this command cannot run on several ranks.
        RankError: some rank is missing, or differs.
    """
    name = arguments.command.__name__
    if name not in COMMANDS:
        raise SettingsError(f"{name} runs on one machine, got several ranks; run it without mlx.launch")
    if name == "doctor" and not arguments.distributed:
        raise SettingsError("doctor examines models on one machine, got several ranks; give --distributed")
    if name == "bench":
        bench_command.check_for_ranks(arguments)
    if getattr(arguments, "config", None) is not None:
        raise SettingsError("--config names several models, and ranks share one target; give it by --target")
    from actors.distributed.joining import join_ranks

    arguments.group = join_ranks()


def follow(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Follow rank 0 until it closes the target, or has examined the ranks.

    Ctrl-C in a terminal, and a supervisor's SIGTERM, reach all ranks on the machine. Only rank 0 acts on them, and may
    give the answers that it has begun; the others end with it. A second SIGTERM ends this rank, and with it all.

    Raises: OutriderError: see `runtime.follow`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    models.use_device()
    if arguments.command.__name__ == "doctor":
        doctor_command.take_part(arguments, models)
    else:
        from runtime.ranks.following import follow as follow_target

        follow_target(models.target, models.options["group"], models.draft)
    return CommandOutcome(finish_reason="complete")
