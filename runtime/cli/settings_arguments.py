"""The settings of a generation, as options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import attrs

from protocol.settings import Settings, settings_from
from runtime.cli.flags import flag

Value = int | float | str | None


def value(text: str) -> Value:
    """What a setting's text would be in Python; the text itself where it is neither a number nor "none"."""
    if text.lower() == "none":
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def values(text: str) -> tuple[Value, ...]:
    """Of "1,2" the numbers; what is no number is left to the settings to refuse."""
    return tuple(value(part.strip()) for part in text.split(",")) if text.strip() else ()


def pairs(text: str) -> dict[Value, Value] | str:
    """Of "12=-1.5,7=-inf" the mapping; the text itself where it is none."""
    found = [part.partition("=") for part in text.split(",")] if text.strip() else []
    if not all(equals for _, equals, _ in found):
        return text
    return {value(key.strip()): value(number.strip()) for key, _, number in found}


# Name, placeholder, how the text is read, help. Bounds and remedies are the library's, which has them in its messages.
Option = tuple[str, str, Callable[[str], Any], str]
BASIC: tuple[Option, ...] = (
    ("max_tokens", "N", value, 'most tokens to generate; "none" for no limit'),
    ("temperature", "T", value, "0 is greedy"),
    ("draft_temperature", "T", value, 'the drafter\'s own, at a temperature; "none" takes that'),
    ("seed", "N", value, "makes a text at a temperature repeatable"),
    ("lookahead", "N", value, 'most tokens in one proposal; "auto"; 0 decodes plainly'),
    ("acceptance", "RULE", value, '"match", "rejection", or "auto": match at temperature 0 or with a seed'),
    ("prefill_step_size", "N", value, 'prompt tokens per forward pass; "auto": as many as are cheap, in 0.2 s at most'),
)
FILTERS: tuple[Option, ...] = (
    ("top_p", "P", value, "keep the likeliest tokens that together have this probability; 0 and 1 keep all"),
    ("min_p", "P", value, "keep tokens at least so likely, as a part of the likeliest's probability"),
    ("min_tokens_to_keep", "N", value, "tokens that --min-p always keeps"),
    ("top_k", "K", value, "keep so many of the likeliest tokens; 0 keeps all"),
    ("xtc_probability", "P", value, "how often to leave out the top choices (XTC)"),
    ("xtc_threshold", "P", value, "what is above it is a top choice for XTC"),
    ("xtc_special_tokens", "IDS", values, "tokens that XTC never leaves out, such as 1,2"),
)
PENALTIES: tuple[Option, ...] = (
    ("logit_bias", "ID=B,...", pairs, "what to add to the logits of tokens, such as 12=-1.5,7=-inf"),
    ("repetition_penalty", "X", value, "makes what was said lately less likely, by this factor"),
    ("repetition_context_size", "N", value, 'tokens that it looks back; "none" for the whole text'),
    ("presence_penalty", "X", value, "subtracted from the logits of what was said lately"),
    ("presence_context_size", "N", value, 'tokens that it looks back; "none" for the whole text'),
    ("frequency_penalty", "X", value, "likewise, once for each time it was said"),
    ("frequency_context_size", "N", value, 'tokens that it looks back; "none" for the whole text'),
)
ENDS: tuple[Option, ...] = (("stop_tokens", "IDS", values, "tokens that end the text, such as 1,2"),)


# Of what is typed most; mlx-lm has the same letters.
SHORT = {"max_tokens": ("-m",), "temperature": ("-t",)}

# What mlx-lm and others call some of them, which is understood and not shown in `--help`.
ALIASES = {
    "--temp": "temperature",
    "--num-draft-tokens": "lookahead",
    "--max-new-tokens": "max_tokens",
    "--repeat-penalty": "repetition_penalty",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give a command the settings as options; `settings_of` reads them."""
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
                help="end before this text where it appears; may be given more than once",
            )
            group.add_argument(
                "--ignore-eos",
                action="store_true",
                default=argparse.SUPPRESS,
                help="go on where the model would end the text",
            )


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given.

    Raises: SettingsError: one is out of its range.
    """
    names = [field.name for field in attrs.fields(Settings)]
    settings = {name: given for name, given in vars(arguments).items() if name in names}
    settings_from(settings)
    return settings


def _default(name: str) -> str:
    default = getattr(Settings(), name)
    if default is None and name == "seed":
        return "a fresh one"
    return "none" if default is None or default == () or default == {} else str(default)
