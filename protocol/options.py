"""Options that are declared once, as fields of an attrs class: `protocol.settings.Settings` and `OpenOptions`.

A field has the option's name, type, default and check, and in its metadata its flag and its other names in requests;
the class's docstring says what it is. Commands and fields of requests are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from inspect import cleandoc

import attrs


@attrs.frozen
class Option:
    """An option, apart from its field."""

    form: str | None = None  # of its flag's value, such as "N"; "" for a flag without one; None for no flag
    group: str = ""  # the heading of its flag in a command's help; "" where commands add the flag themselves
    short: str = ""  # a second spelling of the flag, of one letter, or ""
    in_requests: bool = True  # whether a request to a server can set it
    fields: Sequence[str] = ()  # further names of its field in a request
    about: str = ""  # what it is, in one sentence: the first that the class's docstring has about it


def option(
    form: str | None = None, group: str = "", *, short: str = "", in_requests: bool = True, fields: Sequence[str] = ()
) -> dict[str, Option]:
    """The metadata of an option's field; see `Option`."""
    return {"option": Option(form, group, short, in_requests, fields)}


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
