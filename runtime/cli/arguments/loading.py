"""How the models of a command are loaded, as flags: adapters, revisions, quantisation and options of mlx-lm."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.reprs import shown
from runtime.cli.arguments.settings import add_flags, parse_value
from runtime.cli.flags import flag
from runtime.loading.model_spec import ModelSpec

# Flags for one model: setting, placeholder, help. Those for the draft model begin with "draft-".
_OF_EACH = (
    ("adapter_path", "DIR", "LoRA adapter, as mlx_lm.lora writes it"),
    ("revision", "NAME", "branch, tag or commit of the hub id"),
    ("quantize", "BITS", "quantise the loaded weights: 4 (bits), 8:32 (bits and group size), or a mode such as mxfp4"),
    ("model_config", "JSON", 'values that replace those of config.json, such as {"rope_theta": 1e6}'),
)
_MODES = ("mxfp4", "nvfp4", "mxfp8")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a command's arguments; `target_of` and `draft_of` read them."""
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


def target_of(arguments: argparse.Namespace, path: str | Path) -> str | Path | ModelSpec:
    """The target, with the loading options that the flags give."""
    tokenizer_config = _json(arguments, "tokenizer_config")
    if arguments.chat_template is not None:
        tokenizer_config["chat_template"] = _text_or_file(arguments.chat_template)
    return _spec(arguments, "", path, tokenizer_config=tokenizer_config, model_config=_json(arguments, "model_config"))


def draft_of(arguments: argparse.Namespace, path: str | Path) -> str | Path | ModelSpec:
    """The draft model, with its loading options."""
    return _spec(
        arguments,
        "draft_",
        path,
        model_config=_json(arguments, "draft_model_config"),
        draft_vocabulary=arguments.draft_vocabulary,
    )


def names_of_draft(arguments: argparse.Namespace) -> list[str]:
    """The flags of the draft model that were given."""
    names = [*(f"draft_{name}" for name, *_ in _OF_EACH), "draft_vocabulary"]
    return [flag(name) for name in names if getattr(arguments, name) is not None]


def _spec(arguments: argparse.Namespace, prefix: str, path: str | Path, **others: Any) -> str | Path | ModelSpec:
    spec = ModelSpec(
        path,
        adapter_path=getattr(arguments, f"{prefix}adapter_path"),
        revision=getattr(arguments, f"{prefix}revision"),
        trust_remote_code=arguments.trust_remote_code,
        quantize=_quantize(getattr(arguments, f"{prefix}quantize")),
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
    given: str | None = getattr(arguments, name)
    return {} if given is None else parse_object(name, given)


def parse_object(name: str, given: str) -> dict[str, Any]:
    """The JSON object in the value of a flag, as a mapping."""
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
