"""Constraints on an answer: a JSON schema, a regular expression, a list of choices, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from protocol.errors import SettingsError
from runtime.generation.grammar import grammar_of_choices, grammar_of_gbnf, grammar_of_regex
from runtime.generation.json_schema import check_is_schema, grammar_of_schema, schema_name

# The schema of any JSON object. All requests share its grammar, which does not grow: its lexer has few states.
ANY_OBJECT: dict[str, Any] = {"type": "object"}


Kind = Literal["json", "regex", "choice", "grammar"]


class ConstraintError(SettingsError):
    """A constraint, in a `field` of a request, is invalid, or cannot be followed to its end."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@attrs.frozen
class Constraint:
    """A constraint on an answer, in a `field` of a request.

    Attributes:
        kind: what `value` is: a JSON schema, or one as JSON; a regular expression; texts, of which the answer is one;
            or a grammar, in llama.cpp's GBNF or in Lark's syntax.
    """

    kind: Kind
    value: Mapping[str, Any] | Sequence[str] | str | bool
    field: str

    @property
    def name(self) -> str:
        """Its name in messages."""
        return schema_name(self.value) if self.kind == "json" else self.field

    @property
    def schema(self) -> Mapping[str, Any] | bool:
        """The JSON schema, for the kind "json". Raises: ConstraintError: it is not JSON, or no schema."""
        value: Any = self.value
        try:
            schema: Mapping[str, Any] | bool = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"{self.name} is not JSON: {error}", self.field) from error
        try:
            check_is_schema(schema, self.name)
        except SettingsError as error:
            raise ConstraintError(str(error), self.field) from error
        return schema

    def write(self) -> str:
        """The grammar in llguidance's own format. Raises: SettingsError: invalid, or llguidance is not installed."""
        value: Any = self.value
        match self.kind:
            case "json":
                return grammar_of_schema(value, is_closed=True)
            case "regex":
                return grammar_of_regex(value)
            case "choice":
                return grammar_of_choices(value)
            case "grammar":
                return grammar_of_gbnf(value)
