"""Options that are declared once, as fields of an attrs class: `protocol.settings.Settings` and `OpenOptions`.

A field has the option's name, type, default and check, and in its metadata its flag and its names elsewhere; the
class's docstring says what it is. Commands and hints are made from it, and tests compare the guides with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from inspect import cleandoc
from typing import TypeVar

import attrs

from protocol.argument_aliases import ALIASES

T = TypeVar("T", bound=type[attrs.AttrsInstance])


@attrs.frozen
class Option:
    """What there is to know of an option beside its field.

    Attributes:
        form: the form of its flag's value, such as "N"; "" for a flag without one; None if it has no flag.
        group: the heading of its flag in a command's help; "" where commands add the flag themselves.
        flags: further spellings of the flag. Those of one letter are shown, the others only accepted.
        aliases: its names in mlx-lm, vLLM, transformers, llama.cpp and their command lines.
        in_requests: whether a request to a server can set it.
        fields: those of its aliases that are accepted as names of the field of a request, too.
        about: what it is, in one sentence: the first that the class's docstring has about it.
    """

    form: str | None = None
    group: str = ""
    flags: Sequence[str] = ()
    aliases: Sequence[str] = ()
    in_requests: bool = True
    fields: Sequence[str] = ()
    about: str = ""


def option(
    form: str | None = None,
    group: str = "",
    *,
    flags: str = "",
    aliases: str = "",
    in_requests: bool = True,
    fields: str = "",
) -> dict[str, Option]:
    """The metadata of an option's field; see `Option`. Flags, aliases and fields are separated by spaces."""
    return {"option": Option(form, group, flags.split(), aliases.split(), in_requests, fields.split())}


def declared(declaration: T) -> T:
    """Decorate an attrs class of options: makes their aliases known."""
    for field in attrs.fields(declaration):
        ALIASES.update(dict.fromkeys(field.metadata["option"].aliases, field.name))
    return declaration


@cache
def options_of(declaration: type[attrs.AttrsInstance]) -> dict[str, Option]:
    """The options that a class declares, by name."""
    text = cleandoc(declaration.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    abouts = {
        name: " ".join(about.split()).partition(". ")[0].removesuffix(".")
        for names, about in re.findall(r"^    (\w+(?:, \w+)*): ((?:.|\n     )*)", text, re.MULTILINE)
        for name in names.split(", ")
    }
    return {
        field.name: attrs.evolve(field.metadata["option"], about=abouts.get(field.name, ""))
        for field in attrs.fields(declaration)
        if "option" in field.metadata
    }
