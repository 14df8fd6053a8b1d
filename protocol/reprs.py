"""Short representations of values, for error messages and for `__repr__`."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

MAX_CHARACTERS = 200  # the most characters of a `__repr__`, and of a user's value in an error message


class _Bounded(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.fillvalue = "…"
        self.maxstring = self.maxother = self.maxlong = 120

    def repr1(self, x: Any, level: int) -> str:
        # reprlib dispatches on a type's name, and treats any `array` as one of the standard library's.
        return super().repr1(x, level) if type(x).__module__ == "builtins" else self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        # Python raises ValueError when it converts an int of more than 4300 digits to decimal.
        return super().repr_int(x, level) if x.bit_length() <= 1000 else f"<a whole number of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        # The representations of models and arrays have many lines.
        return " ".join(super().repr_instance(x, level).split())


_bounded = _Bounded()


def shown(value: Any) -> str:
    """`repr` of any value, cut with "…" to about 120 characters, and never more than 200."""
    return _cut(_bounded.repr(value), MAX_CHARACTERS)


def excerpt(text: str, max_characters: int = 40) -> str:
    """`repr` of a text, cut with "…" to at most `max_characters` between the quotes."""
    piece = text[:max_characters]
    while len(repr(piece)) - 2 > max_characters:  # a character that cannot be printed takes several
        piece = piece[:-1]
    return repr(piece if piece == text else piece[:-1] + "…")


def shown_path(path: str) -> str:
    """`repr` of a path or a hub id, in full up to 1000 characters."""
    return excerpt(path, 1000)


def listed(names: Collection[str], most: int) -> str:
    """Names, of which `most` at the most are said: "a, b and 3 more"."""
    return ", ".join([*names][:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def size_in_words(num_bytes: float) -> str:
    """A number of bytes, such as "1.50 GB"."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.1f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} bytes"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def brief(name: str, values: dict[str, Any]) -> str:
    """A representation in the form of a call, `Name(field=value, …)`, of at most 200 characters."""
    said = ", ".join(
        f"{field}={excerpt(value) if isinstance(value, str) else shown(value)}" for field, value in values.items()
    )
    return f"{name}({_cut(said, MAX_CHARACTERS - len(name) - 2)})"


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"
