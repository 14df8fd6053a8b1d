"""Short representations of values, for error messages and for `__repr__`."""

from __future__ import annotations

import reprlib
from typing import Any

# Most characters of a `__repr__`, and of a value of a user's in an error message.
MOST_CHARACTERS = 200


class _Bounded(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.fillvalue = "…"
        self.maxstring = self.maxother = self.maxlong = 120

    def repr1(self, x: Any, level: int) -> str:
        # reprlib goes by a type's name, and takes any `array` for one of the standard library's.
        return super().repr1(x, level) if type(x).__module__ == "builtins" else self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write a number of more than 4300 digits in decimal.
        return super().repr_int(x, level) if x.bit_length() <= 1000 else f"<a whole number of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        # Models and arrays are represented in many lines.
        return " ".join(super().repr_instance(x, level).split())


_bounded = _Bounded()


def shown(value: Any) -> str:
    """`repr` of any value, cut with "…" to about 120 characters and never more than 200."""
    return _cut(_bounded.repr(value), MOST_CHARACTERS)


def excerpt(text: str, most: int = 40) -> str:
    """`repr` of a text, of at most so many characters between the quotes; where the text goes on, "…" ends it."""
    piece = text[:most]
    while len(repr(piece)) - 2 > most:  # a character that cannot be printed takes several
        piece = piece[:-1]
    return repr(piece if piece == text else piece[:-1] + "…")


def shown_path(path: str) -> str:
    """`repr` of a path or a hub id: whole, unless it is longer than 1000 characters and hardly one."""
    return excerpt(path, 1000)


def brief(name: str, values: dict[str, Any]) -> str:
    """A representation as a call, `Name(field=value, …)`, of at most 200 characters.

    Args:
        name: of the class.
        values: by field; those that say something.
    """
    said = ", ".join(
        f"{field}={excerpt(value) if isinstance(value, str) else shown(value)}" for field, value in values.items()
    )
    return f"{name}({_cut(said, MOST_CHARACTERS - len(name) - 2)})"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
