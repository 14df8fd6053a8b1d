"""Which models a command works with, and the options of `runtime.open`, as arguments of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.settings import NGRAM
from runtime.cli.flags import flag
from runtime.cli.settings_arguments import Option, value
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET

# Bounds and remedies are the library's, which has them in its messages.
OPTIONS: tuple[Option, ...] = (
    ("kv_bits", "N", value, "quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits (default: none)"),
    ("kv_group_size", "N", value, "quantisation group: 32, 64 or 128 (default: 64)"),
    ("quantized_kv_start", "N", value, "quantise once a cache holds so many tokens (default: 5000)"),
    ("max_kv_size", "N", value, "most tokens that a cache keeps; older ones are forgotten (default: none)"),
    ("prefix_cache_bytes", "N", value, "most memory a model keeps of texts that are over; 0 keeps nothing"),
    ("rewind", "HOW", str, '"trim", "checkpoint" or "none" insists on one way to undo (default: auto)'),
    ("target_device", "DEVICE", str, '"cpu" or "gpu" (default: MLX\'s)'),
    ("draft_device", "DEVICE", str, '"cpu" or "gpu" (default: MLX\'s)'),
)


@attrs.frozen
class Models:
    """What a command works with.

    Attributes:
        target: a path or hub id.
        draft: likewise, or "ngram", or None for plain decoding.
        options: of `runtime.open`, those that were given.
    """

    target: str | Path
    draft: str | Path | None
    options: dict[str, Any] = attrs.field(factory=dict)

    @property
    def loaded(self) -> list[str | Path]:
        """What there is to be loaded."""
        return [model for model in (self.target, self.draft) if model is not None and model != NGRAM]


def add_models(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    draft_help: str | None = None,
    target_first: bool = False,
) -> None:
    """Give a command the models and their options as arguments; `models_of` reads them.

    Args:
        parser: of the command.
        without: options that make no sense for it.
        draft_help: what `--draft` may be, where it is less than elsewhere.
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
        or 'path or hub id; "ngram" looks up what came after the same words before, without a model; '
        '"none" decodes plainly (default: the demo drafter with the demo target, else none)',
    )
    # As mlx-lm has it.
    group.add_argument("--draft-model", dest="draft", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group = parser.add_argument_group("caches and devices")
    for name, metavar, read, text in OPTIONS:
        if name not in without:
            group.add_argument(flag(name), metavar=metavar, type=read, default=argparse.SUPPRESS, help=text)


def models_of(arguments: argparse.Namespace) -> Models:
    """The models that were asked for.

    Raises: SettingsError: there is no such thing as what they are asked to do.
    """
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
    if "draft_device" in options and (draft is None or draft == NGRAM):
        raise SettingsError("draft_device is for a draft model, and there is none; give one with --draft")
    return Models(DEMO_TARGET if target is None else target, draft, options)
