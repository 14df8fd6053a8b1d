"""The settings of a generation as arguments of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown
from protocol.settings import Settings, settings_from
from runtime.cli.flags import flag

Value = int | float | str | None


def parse_value(text: str) -> Value:
    """The Python value of a setting's text: a number, None for "none", else the text itself."""
    if text.lower() == "none":
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse_size(text: str) -> int | str:
    """The number of bytes in a text such as "2GB", as mlx-lm reads it; the text itself if it is none."""
    number = text.strip().upper().removesuffix("B")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:], 1)
    try:
        return int(float(number[:-1] if factor > 1 else number) * factor)
    except (ValueError, OverflowError):
        return text


def parse_values(text: str) -> tuple[Value, ...]:
    """The values in a list such as "1,2"; `Settings` rejects those that are not numbers."""
    return tuple(parse_value(part.strip()) for part in text.split(",")) if text.strip() else ()


def parse_pairs(text: str) -> dict[Value, Value] | str:
    """The mapping in a text such as "12=-1.5,7=-inf"; the text itself if it is not one."""
    found = [part.partition("=") for part in text.split(",")] if text.strip() else []
    if not all(equals for _, equals, _ in found):
        return text
    return {parse_value(key.strip()): parse_value(number.strip()) for key, _, number in found}


# Name, placeholder, parser of the text, help. The library checks bounds, and its messages have the remedies.
Option = tuple[str, str, Callable[[str], Any], str]
BASIC: tuple[Option, ...] = (
    ("max_tokens", "N", parse_value, 'most tokens to generate; "none" for no limit'),
    ("temperature", "T", parse_value, "sampling temperature; 0 is greedy"),
    (
        "draft_temperature",
        "T",
        parse_value,
        'temperature of the drafter if --temperature is above 0; "none" for the same',
    ),
    ("seed", "N", parse_value, "seed that makes sampled text repeatable"),
    ("lookahead", "N", parse_value, 'most tokens in one proposal, or "auto"; 0 decodes plainly'),
    (
        "acceptance",
        "RULE",
        parse_value,
        'rule for drafted tokens: "match", "rejection", or "auto", which is match at temperature 0 or with a seed',
    ),
    (
        "prefill_step_size",
        "N",
        parse_value,
        'prompt tokens per prefill pass; "auto" takes as many as are cheap, in 0.2 s at most',
    ),
)
FILTERS: tuple[Option, ...] = (
    ("top_p", "P", parse_value, "keep the likeliest tokens that together have this probability; 0 and 1 keep all"),
    ("min_p", "P", parse_value, "keep tokens with at least this share of the likeliest token's probability"),
    ("min_tokens_to_keep", "N", parse_value, "tokens that --min-p always keeps"),
    ("top_k", "K", parse_value, "keep this many of the likeliest tokens; 0 keeps all"),
    ("xtc_probability", "P", parse_value, "probability of removing the top tokens (XTC)"),
    ("xtc_threshold", "P", parse_value, "probability above which a token is a top token for XTC"),
    ("xtc_special_tokens", "IDS", parse_values, "ids of tokens that XTC never removes, such as 1,2"),
)
PENALTIES: tuple[Option, ...] = (
    ("logit_bias", "ID=B,...", parse_pairs, "values to add to logits, by token id, such as 12=-1.5,7=-inf"),
    ("repetition_penalty", "X", parse_value, "factor that makes recent tokens less likely"),
    ("repetition_context_size", "N", parse_value, 'number of recent tokens that count; "none" for the whole text'),
    ("presence_penalty", "X", parse_value, "value subtracted from the logits of recent tokens"),
    ("presence_context_size", "N", parse_value, 'number of recent tokens that count; "none" for the whole text'),
    ("frequency_penalty", "X", parse_value, "value subtracted for each occurrence among recent tokens"),
    ("frequency_context_size", "N", parse_value, 'number of recent tokens that count; "none" for the whole text'),
)
ENDS: tuple[Option, ...] = (("stop_tokens", "IDS", parse_values, "ids of tokens that end the text, such as 1,2"),)


# Short flags of the most common settings, the same as in mlx-lm.
SHORT = {"max_tokens": ("-m",), "temperature": ("-t",)}

# Names of mlx-lm and others, which are accepted but not shown in `--help`.
ALIASES = {
    "--temp": "temperature",
    "--num-draft-tokens": "lookahead",
    "--max-new-tokens": "max_tokens",
    "--repeat-penalty": "repetition_penalty",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings to a command's arguments; `settings_of` reads them."""
    for title, options in (
        ("settings", BASIC),
        ("where the text ends", ENDS),
        ("filters, at a temperature", FILTERS),
        ("penalties", PENALTIES),
    ):
        group = parser.add_argument_group(title)
        for name, metavar, read, text in options:
            group.add_argument(
                *SHORT.get(name, ()),
                flag(name),
                metavar=metavar,
                type=read,
                default=argparse.SUPPRESS,
                help=f"{text} (default: {_default(name)})",
            )
            for alias in (alias for alias, meant in ALIASES.items() if meant == name):
                group.add_argument(alias, dest=name, type=read, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if options is ENDS:
            group.add_argument(
                "--stop",
                metavar="TEXT",
                action="append",
                default=argparse.SUPPRESS,
                help="string that ends the text, and is left out; may be given more than once",
            )
            group.add_argument(
                "--ignore-eos",
                action="store_true",
                default=argparse.SUPPRESS,
                help="continue after the model's end-of-text token",
            )


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given.

    Raises: SettingsError: one is out of its range.
    """
    names = [field.name for field in attrs.fields(Settings)]
    settings = {name: given for name, given in vars(arguments).items() if name in names}
    settings_from(settings)
    return settings


# Settings that a server has for requests which do not set them, and what mlx-lm calls them.
_DEFAULTS = {
    "temperature": ("--temp",),
    "top_p": (),
    "top_k": (),
    "min_p": (),
    "lookahead": ("--num-draft-tokens",),
}


def add_defaults(parser: argparse.ArgumentParser) -> None:
    """Add the settings of requests that do not set them; `defaults_of` reads them."""
    group = parser.add_argument_group("settings of requests that do not set them")
    for name, metavar, read, text in (option for option in (*BASIC, *FILTERS) if option[0] in _DEFAULTS):
        default = f"{text} (default: {_default(name)})"
        group.add_argument(flag(name), metavar=metavar, type=read, default=argparse.SUPPRESS, help=default)
        for alias in _DEFAULTS[name]:
            group.add_argument(alias, dest=name, type=read, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def defaults_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of requests that do not set them; `open` checks them."""
    return {name: given for name, given in vars(arguments).items() if name in _DEFAULTS}


def with_tokens_of(tokenizer: Any, settings: dict[str, Any], extra_eos_tokens: Sequence[str] = ()) -> dict[str, Any]:
    """The settings, completed by ids of the tokenizer, as mlx-lm's commands do.

    Args:
        tokenizer: mlx-lm's wrapper, or None.
        settings: that were given. XTC spares line breaks and ends of text, if they do not say what it spares.
        extra_eos_tokens: of `--extra-eos-token`: tokens or ids that end the text, beside `stop_tokens`.

    Raises: SettingsError: a token is not in the vocabulary.
    """
    completed = dict(settings)
    if settings.get("xtc_probability") and "xtc_special_tokens" not in settings and tokenizer is not None:
        completed["xtc_special_tokens"] = (*tokenizer.encode("\n"), *sorted(tokenizer.eos_token_ids))
    for token in extra_eos_tokens:
        id = parse_value(token)
        if not isinstance(id, int):
            id = None if tokenizer is None else tokenizer.get_vocab().get(token)
        if id is None:
            raise SettingsError(f"--extra-eos-token {shown(token)} is not a token of the target; --stop takes any text")
        completed["stop_tokens"] = (*completed.get("stop_tokens", ()), id)
    return completed


def _default(name: str) -> str:
    default = getattr(Settings(), name)
    if default is None and name == "seed":
        return "a fresh one"
    return "none" if default is None or default == () or default == {} else str(default)
