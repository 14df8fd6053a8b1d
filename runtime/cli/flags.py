"""Names and messages of the library, in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from protocol.settings import Settings
from protocol.synonyms import OPEN_ARGUMENTS, SYNONYMS, meant

_SETTINGS = {field.name for field in attrs.fields(Settings)}
_NO_FLAGS = {"logits_processors", "reuse_prefix", "sampler"}
# Settings that no request to a server has a field for.
_NO_FIELDS = _NO_FLAGS | {"min_tokens_to_keep", "prefill_step_size", "xtc_special_tokens"}
_OF_BENCH = {"dtype", "lookaheads", "num_draft_tokens", "repeats", "streams"}
_OF_SIMULATE = {"contention", "cost_ratio", "draft_slope", "overconfidence", "overhead", "second_choice", "tokens"}
_OF_SIMULATE |= {"spread", "verify_slope"}
_NAMES = _SETTINGS | {*OPEN_ARGUMENTS, "thinking"} | _OF_BENCH | _OF_SIMULATE

# Names that are words as well ("stop", "lookahead") mean the argument only where they begin a message, or with "=".
_ALWAYS_WORDS = {"target", "draft", "defaults", "trace"}
_WITH_UNDERSCORE = sorted((name for name in _NAMES - _NO_FLAGS if "_" in name), key=len, reverse=True)

# What can be done in Python and has another form here.
_PHRASES = (
    ("a path, a hub id or a pair (model, tokenizer)", "a path or a hub id"),
    (", an mlx Device or None", ""),
    ("leave it None", "leave it out"),
    ("leave it False", "leave it out"),
    ("use None for its default", "leave it out for MLX's default"),
    ("give a file of Conversation.save", "give a file that /save has written"),
    ("a file that Conversation.save has written", "a file that /save has written"),
    ("or begin anew with reset", "or begin anew with /reset"),
    ("a conversation is text; use stream() with token ids", "a conversation is text; give a model with a tokenizer"),
    (
        "are functions and not in the file; give logits_processors=[...] again, or [] to go on without",
        "are functions of a program and not in the file; go on with it there",
    ),
)


# Flags of mlx-lm for what is done otherwise here.
_ELSEWHERE = {
    "--adapter-path": "an adapter is fused into its model first, by mlx_lm.fuse",
    "--chat-template-config": "`outrider chat` has --thinking and --no-thinking",
    "--extra-eos-token": "--stop ends a text before another one",
    "--prompt-cache-file": "`outrider chat` has /save and /load",
    "--verbose": "--stats prints statistics",
}


def elsewhere(given: str, known: Sequence[str], *, by_request: bool = False) -> str | None:
    """What to do in place of a flag that there is not.

    Args:
        given: as it was typed, without a value.
        known: flags that there are.
        by_request: whether the command is a server, whose requests have the settings for fields.

    Returns: a hint; None where nothing comes to mind.
    """
    if given in _ELSEWHERE:
        return _ELSEWHERE[given]
    names = {flag.removeprefix("--").replace("-", "_"): flag for flag in known}
    name = given.lstrip("-").replace("-", "_")
    setting = SYNONYMS.get(name, name)
    if setting in _SETTINGS and setting not in names:
        # Whatever flag is spelt alike is for something else.
        has_field = by_request and setting not in _NO_FIELDS
        return f'each request sets this, by its field "{setting}"' if has_field else None
    near = meant(name, names)
    return None if near is None else f"did you mean {names[near]}?"


def flag(name: str) -> str:
    """An argument as it is typed."""
    return "--lookahead" if name == "lookaheads" else f"--{name.replace('_', '-')}"


def in_flags(message: str) -> str:
    """An error's message with the names and values that arguments have on the command line.

    What is quoted, such as a path, stays as it is.
    """
    for python, here in _PHRASES:
        message = message.replace(python, here)
    begins, _, rest = message.partition(" ")
    if begins in _NAMES - _NO_FLAGS - _ALWAYS_WORDS:
        message = f"{flag(begins)} {rest}".strip()
    # An apostrophe within a word is no quote.
    pieces = re.split(r"((?<!\w)'(?:[^'\\]|\\.)*'(?!\w))", message)
    return "".join(piece if i % 2 else _spelled(piece) for i, piece in enumerate(pieces))


def _spelled(text: str) -> str:
    """What is not quoted of a message."""
    text = re.sub(r"(?<![-\w/.])([a-z_]+)=(\w+|\"[^\"]*\")", _assigned, text)
    text = re.sub(rf"(?<![-\w/.])({'|'.join(_WITH_UNDERSCORE)})\b", lambda found: flag(found[1]), text)
    return re.sub(r"(?<![\w\"'/.-])None\b(?![/\w])", '"none"', text)


def _assigned(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip('"')
    if name not in _NAMES - _NO_FLAGS:
        return found[0]
    if value == "True":
        return flag(name)
    if value == "False":
        return f"--no-{name.replace('_', '-')}"
    return f"{flag(name)} {value.lower() if value == 'None' else value}"
