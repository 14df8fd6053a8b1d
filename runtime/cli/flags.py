"""Translates the library's argument names and error messages into the flags of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from protocol.argument_aliases import ALIASES, meant
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings

_OPTIONS = options_of(OpenOptions) | options_of(Settings)
_NO_FLAGS = {name for name, option in _OPTIONS.items() if option.form is None}
_OF_BENCH = {"dtype", "lookaheads", "num_draft_tokens", "repeats", "streams"}
_OF_SIMULATE = {"contention", "cost_ratio", "draft_slope", "overconfidence", "overhead", "second_choice", "tokens"}
_OF_SIMULATE |= {"draft_table", "spread", "verify_slope", "verify_table"}
_OF_SIMULATE |= {"all_reduce", "hidden_size", "layers", "link_bandwidth", "link_latency", "pass_time", "ranks"}
_OF_DISTILL = {"continuations", "data", "draft_vocab_size", "init", "intermediate_size", "learning_rate", "max_minutes"}
_OF_DISTILL |= {"out", "window", "batch_tokens"}
_OF_MODEL = {"adapter_path", "model_config", "quantize", "revision", "tokenizer_config", "trust_remote_code"}
_NAMES = {*_OPTIONS, "thinking"} | _OF_MODEL | _OF_BENCH | _OF_SIMULATE | _OF_DISTILL

# Names that are also words ("stop", "lookahead") mean the argument only at the start of a message, or before "=".
_ALWAYS_WORDS = {"target", "draft", "defaults", "trace"}
_WITH_UNDERSCORE = sorted((name for name in _NAMES - _NO_FLAGS if "_" in name), key=len, reverse=True)

# Phrases about Python, and what they are on the command line.
_PHRASES = (
    ("a path, a hub id or a pair (model, tokenizer)", "a path or a hub id"),
    ("leave it None", "leave it out"),
    ("leave it False", "leave it out"),
    ("give a file of Conversation.save", "give a file that /save has written"),
    ("a file that Conversation.save has written", "a file that /save has written"),
    ("or begin anew with reset", "or begin anew with /reset"),
    ("a conversation is text; use stream() with token ids", "a conversation is text; give a model with a tokenizer"),
    (
        "are functions and not in the file; give logits_processors=[...] again, or [] to go on without",
        "are functions of a program and not in the file; go on with it there",
    ),
)


_ONE_DEVICE = "both models compute on one device: use --device"
# Flags of mlx-lm and of earlier versions, which Outrider replaces by something else.
_REPLACEMENTS = {
    "--extra-eos-token": "--stop ends a text at a string",
    "--image": "models read text alone",
    "--prompt-cache-file": "`outrider generate` continues such a file, and `outrider chat` has /save and /load",
    "--target-device": _ONE_DEVICE,
    "--draft-device": _ONE_DEVICE,
}


def hint_for(given: str, known: Sequence[str], *, by_request: bool = False) -> str | None:
    """A hint about an unknown flag.

    Args:
        given: the flag as typed, without a value.
        known: the flags of the command.
        by_request: whether the command is a server, whose requests have the settings as fields.

    Returns: the hint; None if there is none.
    """
    if given in _REPLACEMENTS:
        return _REPLACEMENTS[given]
    names = {flag.removeprefix("--").replace("-", "_"): flag for flag in known}
    name = given.lstrip("-").replace("-", "_")
    setting = ALIASES.get(name, name)
    if (option := options_of(Settings).get(setting)) is not None and setting not in names:
        # A flag with a similar spelling means something else.
        return f'each request sets this, by its field "{setting}"' if by_request and option.in_requests else None
    near = meant(name, names)
    return None if near is None else f"did you mean {names[near]}?"


def flag(name: str) -> str:
    """The flag of an argument."""
    return "--lookahead" if name == "lookaheads" else f"--{name.replace('_', '-')}"


def in_flags(message: str) -> str:
    """An error message with flags in place of argument names, and values as they are typed.

    Quoted parts, such as paths, stay as they are.
    """
    for python, here in _PHRASES:
        message = message.replace(python, here)
    begins, _, rest = message.partition(" ")
    if begins in _NAMES - _NO_FLAGS - _ALWAYS_WORDS:
        message = f"{flag(begins)} {rest}".strip()
    # An apostrophe inside a word is not a quote.
    pieces = re.split(r"((?<!\w)'(?:[^'\\]|\\.)*'(?!\w))", message)
    return "".join(piece if i % 2 else _with_flags(piece) for i, piece in enumerate(pieces))


def _with_flags(text: str) -> str:
    """An unquoted part of a message."""
    text = re.sub(r"(?<![-\w/.])([a-z_]+)=(\w+|\"[^\"]*\")", _flag_with_value, text)
    text = re.sub(rf"(?<![-\w/.])({'|'.join(_WITH_UNDERSCORE)})\b", lambda found: flag(found[1]), text)
    return re.sub(r"(?<![\w\"'/.-])None\b(?![/\w])", '"none"', text)


def _flag_with_value(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip('"')
    if name not in _NAMES - _NO_FLAGS:
        return found[0]
    if value == "True":
        return flag(name)
    if value == "False":
        return f"--no-{name.replace('_', '-')}"
    return f"{flag(name)} {value.lower() if value == 'None' else value}"
