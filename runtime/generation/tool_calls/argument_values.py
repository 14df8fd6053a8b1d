"""Values of arguments: their types, as a tool's schema has them, and the JSON that a text stands for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import attrs

_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
# Names of types in schemas that no library has checked.
_OTHER_NAMES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"}
_OTHER_NAMES |= {"dict": "object", "list": "array"}

# References that are followed one after the other.
_MAX_REFERENCES = 16

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# As chat templates write these values by Python's `str`.
_OF_PYTHON = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


@attrs.frozen
class ArgumentType:
    """The values that an argument may have: their types in JSON, and the texts among its choices, if it has some."""

    types: frozenset[str] = _TYPES
    texts: frozenset[str] = frozenset()

    @property
    def is_any(self) -> bool:
        """Whether the schema names no type."""
        return self.types == _TYPES

    def json_of(self, text: str) -> str | None:
        """The JSON of a value that was written as plain text; None if the text is no such value.

        A text that may be a string or something else is something else if it is JSON of it.
        """
        if "string" in self.types:
            kind = kind_of(text)
            if text in self.texts or kind in (None, "string") or not self._has(kind):
                return json.dumps(text, ensure_ascii=False)
            return text
        written = text.strip()
        if kind_of(written) is not None:
            return written
        kind, value = _OF_PYTHON.get(written, ("", ""))
        if kind in self.types:
            return value
        return _of_python_literal(written) if self.types & {"object", "array"} else None

    def is_json(self, text: str) -> bool:
        """Whether a text can be only JSON, and is."""
        return "string" not in self.types and kind_of(text.strip()) is not None

    def _has(self, kind: str | None) -> bool:
        return kind in self.types or (kind == "integer" and "number" in self.types)


ANY = ArgumentType()


def argument_type(schema: Any, root: Mapping[str, Any]) -> ArgumentType:
    """The type of an argument with a schema, whose references are within `root`."""
    return _type_of(schema, root, _MAX_REFERENCES)


def _type_of(schema: Any, root: Mapping[str, Any], num_references: int) -> ArgumentType:
    if not isinstance(schema, Mapping):
        return ANY
    types, texts = _TYPES, frozenset[str]()
    if isinstance(reference := schema.get("$ref"), str) and num_references > 0:
        found = _type_of(_target(reference, root), root, num_references - 1)
        types, texts = found.types, found.texts
    if (named := schema.get("type")) is not None:
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        known = {_OTHER_NAMES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
        if known <= _TYPES and known:
            types &= frozenset(known | ({"integer"} if "number" in known else set()))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        types &= {_type_name(choice) for choice in choices}
        texts |= {choice for choice in choices if isinstance(choice, str)}
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list) and parts:
            found_all = [_type_of(part, root, num_references - 1) for part in parts] if num_references > 0 else [ANY]
            if keyword == "allOf":
                types = types.intersection(*(found.types for found in found_all))
            else:
                types &= frozenset().union(*(found.types for found in found_all))
            texts = texts.union(*(found.texts for found in found_all))
    if types == _TYPES and isinstance(schema.get("properties"), Mapping):
        types = frozenset(("object",))
    elif types == _TYPES and "items" in schema:
        types = frozenset(("array",))
    return ArgumentType(types or _TYPES, texts)


def _target(reference: str, root: Any) -> Any:
    """What a reference refers to; None if it cannot be followed."""
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    return kind_of(json.dumps(value)) or "null"


def kind_of(text: str) -> str | None:
    """The type of a value that is written as strict JSON, without white space around it; None if it is not."""
    if not text:
        return None
    if (number := _NUMBER.fullmatch(text)) is not None:
        return "number" if number[2] or number[3] else "integer"
    if text in ("true", "false"):
        return "boolean"
    if text == "null":
        return "null"
    kind = {'"': "string", "{": "object", "[": "array"}.get(text[0])
    return kind if kind is not None and is_json(text) else None


def is_json(text: str) -> bool:
    """Whether a text is strict JSON: without NaN, and without half a character."""
    try:
        value = json.loads(text, parse_constant=_no_json, parse_int=str, parse_float=str)
        # An escaped surrogate is half a character, if the other half is missing.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(name: str) -> Any:
    raise ValueError(name)


def _of_python_literal(text: str) -> str | None:
    """The JSON of a dictionary or a list in Python's syntax, as some chat templates write it; None if it is not one."""
    if text[:1] not in ("{", "["):
        return None
    try:
        written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written
