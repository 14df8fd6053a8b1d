"""The arguments that name the models of a command, and the options of `runtime.open`."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown
from protocol.settings import NGRAM
from runtime.cli.flags import flag
from runtime.cli.settings_arguments import Option, parse_value
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.loading.device import use_device

# The library checks bounds, and its messages have the remedies.
OPTIONS: tuple[Option, ...] = (
    ("kv_bits", "N", parse_value, "quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits (default: none)"),
    ("kv_group_size", "N", parse_value, "quantisation group: 32, 64 or 128 (default: 64)"),
    ("quantized_kv_start", "N", parse_value, "number of tokens in a cache from which it is quantised (default: 5000)"),
    ("max_kv_size", "N", parse_value, "most tokens in a cache; older ones are dropped (default: no limit)"),
    ("prefix_cache_bytes", "N", parse_value, "size limit of a model's prefix cache in bytes; 0 turns it off"),
    ("rewind", "HOW", str, 'how caches drop rejected tokens: "trim", "checkpoint", "none" or "auto" (default: auto)'),
)


@attrs.frozen
class Models:
    """The models of a command.

    Attributes:
        target: a path or hub id.
        draft: a path or hub id, "ngram" for prompt lookup, or None for plain decoding.
        options: the options of `runtime.open` that were given.
        device: on which both compute, "cpu" or "gpu"; None for MLX's default.
    """

    target: str | Path
    draft: str | Path | None
    options: dict[str, Any] = attrs.field(factory=dict)
    device: str | None = None

    @property
    def loaded(self) -> list[str | Path]:
        """The models that have to be loaded."""
        return [model for model in (self.target, self.draft) if model is not None and model != NGRAM]

    def use_device(self) -> None:
        """Make `device` the default of MLX, and so of this process. Imports mlx.

        Raises: SettingsError: the device is not available.
        """
        use_device(self.device)


def add_models(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    draft_help: str | None = None,
    target_first: bool = False,
) -> None:
    """Add the models and their options to a command's arguments; `models_of` reads them.

    Args:
        parser: the command's parser.
        without: options that the command does not have.
        draft_help: help of `--draft`, if the command does not accept all its values.
        target_first: whether the target may also be given without a flag.
    """
    group = parser.add_argument_group("models")
    target = group.add_mutually_exclusive_group()
    if target_first:
        target.add_argument("target_here", metavar="MODEL", nargs="?", help="the same as --target")
    target.add_argument("--target", metavar="MODEL", help="path or hub id (default: the bundled demo pair)")
    target.add_argument("--model", dest="target", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group.add_argument(
        "--draft",
        metavar="MODEL",
        help=draft_help
        or 'path or hub id; "ngram" drafts by prompt lookup, without a model; "none" decodes plainly '
        "(default: the demo draft model with the demo target, else none)",
    )
    # The flag of mlx-lm.
    group.add_argument("--draft-model", dest="draft", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group = parser.add_argument_group("caches and devices")
    for name, metavar, read, text in OPTIONS:
        if name not in without:
            group.add_argument(flag(name), metavar=metavar, type=read, default=argparse.SUPPRESS, help=text)
    group.add_argument("--device", metavar="DEVICE", help='device of both models: "cpu" or "gpu" (default: MLX\'s)')


def models_of(arguments: argparse.Namespace) -> Models:
    """The models that the arguments name.

    Raises: SettingsError: there is no such device.
    """
    if arguments.device not in (None, "cpu", "gpu"):
        raise SettingsError(f'--device must be "cpu" or "gpu", got {shown(arguments.device)}')
    names = [name for name, *_ in OPTIONS]
    options = {name: given for name, given in vars(arguments).items() if name in names}
    first: str | None = getattr(arguments, "target_here", None)
    target: str | None = arguments.target if first is None else first
    draft: str | Path | None
    if arguments.draft == "none":
        draft = None
    elif arguments.draft is None:
        draft = DEMO_DRAFT if target is None else None
    else:
        draft = arguments.draft
    return Models(DEMO_TARGET if target is None else target, draft, options, arguments.device)
