"""The settings of a generation as arguments of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from protocol.errors import PromptError
from protocol.options import Option, options_of
from protocol.settings import MAX_ANSWER_TOKENS, Settings, settings_from
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


def _size(text: str) -> int | str | None:
    """The number of bytes in a text such as "2GB", as mlx-lm reads it, or None for "none"; else the text itself."""
    if text.lower() == "none":
        return None
    number = text.strip().upper().removesuffix("B")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:], 1)
    try:
        return int(float(number[:-1] if factor > 1 else number) * factor)
    except (ValueError, OverflowError):
        return text


def _values(text: str) -> tuple[Value, ...]:
    """The values in a list such as "1,2"; `Settings` rejects those that are not numbers."""
    return tuple(parse_value(part.strip()) for part in text.split(",")) if text.strip() else ()


def _pairs(text: str) -> dict[Value, Value] | str:
    """The mapping in a text such as "12=-1.5,7=-inf"; the text itself if it is not one."""
    found = [part.partition("=") for part in text.split(",")] if text.strip() else []
    if not all(equals for _, equals, _ in found):
        return text
    return {parse_value(key.strip()): parse_value(number.strip()) for key, _, number in found}


# How values are parsed, by an option's form; all other forms are numbers or words.
_READERS: dict[str | None, Callable[[str], Any]] = {
    **dict.fromkeys(("DIR", "HOW", "JSON", "KIND", "TIMES"), str),
    **{"IDS": _values, "ID=B,...": _pairs, "SIZE": _size},
}


def add_option(group: argparse._ArgumentGroup, name: str, option: Option, default: object) -> None:
    """Add the flag of a declared option. The library checks bounds, and its messages have the remedies."""
    shape: dict[str, Any] = {"metavar": option.form, "type": _READERS.get(option.form, parse_value)}
    about = option.about
    if option.form == "":
        shape = {"action": "store_false" if default is True else "store_true"}
        if default is True:
            about = f"not: {about}"
    elif option.form == "TEXT":
        shape = {"metavar": "TEXT", "action": "append"}
    about = re.sub(r"`(\w+)`", lambda name: flag(name[1]), about).replace("`", "")
    about = re.sub(r"\bNone\b", '"none"', about).replace("%", "%%")
    names = [option.short, flag(name)] if option.short else [flag(name)]
    group.add_argument(*names, dest=name, default=argparse.SUPPRESS, help=about + _default(option, default), **shape)


def add_options(
    group: argparse._ArgumentGroup,
    declaration: type[attrs.AttrsInstance],
    of_group: str = "",
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add the options of a group that a class declares; `defaults` are the command's own, for the help."""
    for name, option in options_of(declaration).items():
        if option.group == of_group:
            default: Any = attrs.fields_dict(declaration)[name].default
            made = None if hasattr(default, "factory") else default  # factories make empty ones
            made = (defaults or {}).get(name, made)
            add_option(group, name, option, made)


def add_flags(group: argparse._ActionsContainer, *flags: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> None:
    """Add flags, each given as help shows it, with its help and further keywords for argparse.

    A flag looks like "--stats", "-p --prompt TEXT", or "--allow-host NAME ..." if it may be given more than once.
    """
    for shown_as, text, *more in flags:
        names = [word for word in shown_as.split() if word.startswith("-")]
        form = shown_as.partition(names[-1])[2].strip()
        shape: dict[str, Any] = {"metavar": form} if form else {"action": "store_true"}
        if form.endswith(" ..."):
            shape = {"metavar": form.removesuffix(" ..."), "action": "append", "default": []}
        for keywords in more:
            shape |= keywords
        group.add_argument(*names, help=text, **shape)


def _default(option: Option, default: object) -> str:
    if option.form == "" or default is attrs.NOTHING:
        return ""
    if option.form == "SIZE" and isinstance(default, int):
        return f" (default: {default // 2**30} GiB)"
    if isinstance(default, float):
        return f" (default: {default:g})"
    return f" (default: {'none' if default in (None, (), {}) else default})"


# A text that is continued without a chat template rarely ends by itself.
_OWN_DEFAULTS = {"max_tokens": f"{MAX_ANSWER_TOKENS} for an answer, {Settings().max_tokens} for a continued text"}


def limit_of(tokenizer: Any, *, is_raw: bool = False) -> dict[str, Any]:
    """The command line's limit of an answer, as a setting; none for a text that is continued, without a template."""
    is_answer = not is_raw and tokenizer is not None and tokenizer.has_chat_template
    return {"max_tokens": MAX_ANSWER_TOKENS} if is_answer else {}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings to a command's arguments; `settings_of` reads them."""
    for title in dict.fromkeys(option.group for option in options_of(Settings).values() if option.group):
        add_options(parser.add_argument_group(title), Settings, title, _OWN_DEFAULTS)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, checked."""
    settings = {name: given for name, given in vars(arguments).items() if name in options_of(Settings)}
    settings_from(settings)
    return settings


# Settings for which a server has defaults, for requests that do not set them.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "lookahead")


def add_defaults(parser: argparse.ArgumentParser) -> None:
    """Add the flags of these defaults; `defaults_of` reads them."""
    group, defaults = parser.add_argument_group("defaults for requests that do not set them"), Settings()
    for name in _DEFAULTS:
        add_option(group, name, options_of(Settings)[name], getattr(defaults, name))


def defaults_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The defaults that were given; `open` checks them."""
    return {name: given for name, given in vars(arguments).items() if name in _DEFAULTS}


def completed(settings: dict[str, Any], arguments: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The settings, once the target is loaded. Unless they say what XTC spares, it is what it is in mlx-lm's commands:
    line breaks and ends of text.

    Raises: PromptError: a flag was given that needs a chat template, and the target's tokenizer has none.
    """
    if tokenizer is None or not tokenizer.has_chat_template:
        for name in ("chat", "system", "prefill_response"):
            if getattr(arguments, name, None) not in (None, False):
                needs = f"{flag(name)} needs a chat template, and the target's tokenizer has none"
                raise PromptError(f"{needs}; leave it out")
    if not settings.get("xtc_probability") or "xtc_special_tokens" in settings or tokenizer is None:
        return settings
    return {**settings, "xtc_special_tokens": (*tokenizer.encode("\n"), *sorted(tokenizer.eos_token_ids))}
