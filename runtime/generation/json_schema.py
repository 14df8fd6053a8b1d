"""JSON schemas as grammars: checks of a schema, and its form for llguidance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

from protocol.errors import SettingsError
from runtime.generation.grammar_vocabulary import library

# Between tokens of JSON: a blank, or a new line and its indentation, as JSON is usually written. With all the
# whitespace that the standard allows, a weak model writes newlines until it is cut off.
_WHITESPACE = r"[ ]|\n[ \t]{0,32}"

# Most characters of a schema, a pattern or a grammar in messages.
_MAX_SHOWN_CHARS = 80

# Most remainders of division that llguidance may have to tell apart, with a state of its lexer for each: 0.2 s, 20 MB.
# Its time grows with their square; it cannot be interrupted, and its own limits do not bound it.
_MAX_REMAINDERS = 100_000
# Keywords whose schemas are about the same value.
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")

# Most optional properties of one object: these take a second. llguidance's time grows with their square.
_MAX_OPTIONAL = 2000

# The values of `format` that llguidance enforces; it refuses others. In JSON Schema a format says what a text is, and
# need not be checked, so others are left out of the schema, such as pydantic's for paths, secrets and patterns.
# `uniqueItems`, which pydantic writes for sets, is left out too: no grammar can remember all items.
_ENFORCED_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Keywords with schemas for values. Not `not` and the like: there, a schema that is less strict would forbid more.
_MAPS_OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LISTS_OF_SCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_SCHEMAS = frozenset(("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "contains"))

_ANNOTATIONS = frozenset(("title", "description", "$comment", "examples", "default", "deprecated"))
_NEVER_NULL = (
    _MAPS_OF_SCHEMAS | _LISTS_OF_SCHEMAS | _SCHEMAS | {"type", "enum", "required", "pattern", "$ref", "not", "if"}
)
_NEVER_NULL |= {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "multipleOf"}
_NEVER_NULL |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

# Numbers at or below this one crash llguidance; JSON distinguishes whole numbers down to it.
_MIN_NUMBER = -(2**53)
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}  # and their direction
# Bounds further out than this one fail in llguidance, which reads numbers in double precision: the next one is 2**63.
# A maximum of integers may have any value.
_MAX_BOUND = 2**63 - 1024


def schema_name(schema: Any) -> str:
    """The name of a JSON schema in messages."""
    return f"the JSON schema {shortened(schema)}"


def check_is_schema(value: Any, what: str) -> None:
    """Raises: SettingsError: the value, called `what` in the message, has a type that no schema has."""
    if not isinstance(value, (Mapping, bool)):
        raise SettingsError(f"{what} must be an object, True or False")


def check_json_schema(schema: Mapping[str, Any] | str | bool) -> None:
    """Check a schema, as far as that is possible without a tokenizer.

    Raises: SettingsError: see `Grammar.from_json_schema`.
    """
    if error := library().LLMatcher.validate_grammar(grammar_of_schema(schema)):
        raise SettingsError(f"{schema_name(schema)} cannot be followed: {error}")


def follows_schema(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON object follows a schema, as the grammar of the schema has it; its own keys may be in any order.

    Raises: SettingsError: no grammar follows the schema.
    """
    values = json.loads(text)
    in_order = {key: values[key] for key in schema.get("properties") or () if key in values} | values
    tokenizer = library().LLTokenizer("byte")
    matcher = library().LLMatcher(tokenizer, grammar_of_schema(schema, is_closed=True), log_level=0)
    tokens = tokenizer.tokenize_str(json.dumps(in_order, ensure_ascii=False))
    num_taken: int = matcher.try_consume_tokens(tokens)
    return num_taken == len(tokens) and bool(matcher.is_accepting())


def grammar_of_schema(schema: Any, *, compact: bool = False, is_closed: bool = False) -> str:
    """A JSON schema in llguidance's own format; see `Grammar.from_json_schema`. Compiles nothing.

    If it `is_closed`, objects have only the properties that are listed, unless the schema says otherwise.
    """
    what = schema_name(schema)
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        value = _followable(value)
        written = json.dumps(closed(value) if is_closed else value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{what} is nested too deeply to be followed") from error
    check_is_schema(value, what)
    copy = json.loads(written)
    if (number := _too_low(copy)) is not None:
        raise SettingsError(
            f"{what} has {shortened(number)}, which is too low to be followed; numbers must be above {_MIN_NUMBER}"
        )
    if (remainders := _num_remainders(copy)) > _MAX_REMAINDERS:
        raise SettingsError(
            f"{what} has numbers for multipleOf that take too long to be followed: the product of their prime factors "
            f"other than 2 and 5, added up over all values, must be at most {_MAX_REMAINDERS}, "
            f"got {shortened(remainders)}; take rounder ones"
        )
    if (optional := _num_optional(copy)) > _MAX_OPTIONAL:
        raise SettingsError(
            f"{what} has an object with {optional} optional properties, which take too long to be followed; make all "
            f"but {_MAX_OPTIONAL} of them required"
        )
    # llguidance takes options only with an object, which the schemas True and False are not.
    written = "{}" if value is True else written
    spacing = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    options = None if value is False else spacing
    try:
        return cast(str, library().LLMatcher.grammar_from_json_schema(written, overrides=options))
    except ValueError as error:
        raise SettingsError(f"{what} cannot be followed: {error}") from error


def _followable(schema: Any) -> Any:
    """A copy of a schema without keywords that llguidance refuses although they say nothing."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for name, inner in schema.items():
        if name in _MAPS_OF_SCHEMAS and isinstance(inner, Mapping):
            # Some programs write null for a property of any type.
            inner = {key: True if each is None else _followable(each) for key, each in inner.items()}
        elif name in _LISTS_OF_SCHEMAS and isinstance(inner, (list, tuple)):
            inner = [_followable(each) for each in inner]
        elif name in _SCHEMAS:
            inner = _followable(inner)
        elif name in _BOUNDS and type(inner) in (int, float) and (inner := _bound(schema, name, inner)) is None:
            continue
        if not _says_nothing(schema, name, inner):
            kept[name] = inner
    return kept


def _says_nothing(schema: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a keyword of a schema allows every value, or is not to be checked."""
    match name:
        case "uniqueItems" | "$dynamicAnchor":
            return True
        case "format":
            return not (isinstance(value, str) and value in _ENFORCED_FORMATS)
        case "$schema":
            return not (isinstance(value, str) and "://json-schema.org/" in value)
        case "propertyNames" if isinstance(value, Mapping):
            return {key: each for key, each in value.items() if key not in _ANNOTATIONS} in ({}, {"type": "string"})
        case "propertyNames":
            return value is True
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return not value
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "not" | "$recursiveAnchor":
            return value is False
    # Some programs write null for what is missing, and an empty list for an empty object.
    return (value is None and name in _NEVER_NULL) or (value == [] and name in _MAPS_OF_SCHEMAS)


def _bound(schema: Mapping[str, Any], name: str, bound: float) -> float | None:
    """The bound, or one that llguidance can follow; None for none. No number between the two can be written."""
    sign, is_integer = _BOUNDS[name], schema.get("type") == "integer"
    if sign * bound <= _MAX_BOUND or (is_integer and sign > 0):
        return bound
    # Beyond 64 bits, numbers have exponents, and in llguidance no bounded number has one.
    return sign * _MAX_BOUND if is_integer or sign * bound <= 2**63 else None


def _num_optional(schema: Any) -> int:
    """The most optional properties that one object in a schema has."""
    most = 0
    for _, part, _ in _entries(schema):
        if isinstance(part, dict) and isinstance(properties := part.get("properties"), dict):
            required = part.get("required")
            named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            most = max(most, len(properties.keys() - named))
    return most


def _too_low(schema: Any) -> float | None:
    """A number of the schema that would crash llguidance: a value or an upper bound that is too low; None for none.

    For a range of integers that ends near the minimum of 64 bits, llguidance recurses until the stack overflows, which
    ends the process. A lower bound alone may have any value: generated schemas have the minimum of 64 bits.
    """
    numbers = (entry for entry in _entries(schema) if isinstance(entry[1], (int, float)) and entry[1] <= _MIN_NUMBER)
    return next((part for name, part, is_literal in numbers if is_literal or name not in _LOWER_BOUNDS), None)


def _entries(schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """All parts of a schema: the key of each ("" in a list), the part, and whether it belongs to a literal value."""
    todo: list[tuple[str, Any, bool]] = [("", schema, False)]
    while todo:
        entry = _, part, is_literal = todo.pop()
        yield entry
        if isinstance(part, Mapping):
            todo += [(name, inner, is_literal or name in ("const", "enum")) for name, inner in part.items()]
        elif isinstance(part, (list, tuple)):
            todo += [("", inner, is_literal) for inner in part]


def _num_remainders(schema: Any) -> int:
    """A lower bound of the number of remainders of division (`multipleOf`) that llguidance has to tell apart.

    The last digits show divisibility by 2 and 5, so these factors do not count. Numbers for one value multiply, as far
    as they are coprime; numbers for different values add up. References are not followed.
    """
    groups: list[list[int]] = []  # for each value, its least common multiple
    todo: list[tuple[Any, list[int] | None]] = [(schema, None)]  # parts, and their value's group; None for a new value
    while todo:
        part, group = todo.pop()
        if isinstance(part, list):
            todo += [(inner, group) for inner in part]
        elif isinstance(part, dict):
            if group is None:
                groups.append(group := [1])
            for name, inner in part.items():
                if name == "multipleOf" and type(inner) in (int, float) and inner > 0:
                    # A number that is too large need not grow: with ten thousand factors that would take minutes.
                    if group[0] <= _MAX_REMAINDERS:
                        group[0] = math.lcm(group[0], _without_2_and_5(inner))
                elif name not in ("const", "enum"):
                    todo.append((inner, group if name in _SAME_VALUE else None))
    return sum({number for (number,) in groups if number > 1})


def _without_2_and_5(number: float) -> int:
    """A number's digits as a whole number, without its prime factors 2 and 5; > 0."""
    digits = int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def shortened(given: Any) -> str:
    """A schema, pattern or grammar in one line of at most `_MAX_SHOWN_CHARS` characters, for messages."""
    try:
        text = given if isinstance(given, str) else repr(given)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        text = f"<{type(given).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


# --- objects without other properties ---------------------------------------------------------------

# JSON Schema allows any others where a schema does not say otherwise. A grammar that allows them lets a weak model go
# on with properties that nobody asked for, until it is cut off.

# Keywords that may say more about the properties of the same object.
_COMPOSED = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
)
_OF_PROPERTIES = _COMPOSED | {"properties", "patternProperties", "required", "minProperties"}
# Other reasons to leave an object open.
_SAYS_OTHERWISE = frozenset(("additionalProperties", "unevaluatedProperties", "enum", "const"))

_LEFT_AS_THEY_ARE = ("not", "if", "then", "else", "dependentSchemas", "dependencies")


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects with `properties` have only these.

    An object stays open if the schema says something about other properties, or describes it in several places: each
    of them would forbid what the others list. Raises: RecursionError: nested too deeply.
    """
    open_references: set[str] = set()  # whose targets must stay open
    while True:
        num_open = len(open_references)
        copy = _closed(schema, "#", open_references)
        if len(open_references) == num_open:
            return copy


def _closed(schema: Any, place: str, open_references: set[str], *, may_close: bool = True) -> Any:
    """A copy in which all is closed that may be, by what is known of references; adds to these what it finds."""
    if not isinstance(schema, Mapping):
        return schema
    may_close = may_close and place not in open_references
    others = schema.keys() & _OF_PROPERTIES
    if isinstance(reference := schema.get("$ref"), str) and not (may_close and others == {"$ref"}):
        open_references.add(reference)
    kept = dict(schema)
    for keyword, inner in schema.items():
        below = f"{place}/{keyword}"
        if keyword in _LEFT_AS_THEY_ARE:
            found = (part for name, part, _ in _entries(inner) if name == "$ref" and isinstance(part, str))
            open_references.update(found)
        elif keyword in _MAPS_OF_SCHEMAS and isinstance(inner, Mapping):
            kept[keyword] = {key: _closed(each, f"{below}/{key}", open_references) for key, each in inner.items()}
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(inner, (list, tuple)):
            is_alone = others == {keyword} and (keyword != "allOf" or len(inner) == 1)
            may = keyword == "prefixItems" or (may_close and is_alone)
            kept[keyword] = [
                _closed(each, f"{below}/{i}", open_references, may_close=may) for i, each in enumerate(inner)
            ]
        elif keyword in _SCHEMAS:
            kept[keyword] = _closed(inner, below, open_references)
    if may_close and _is_closable(schema):
        kept["additionalProperties"] = False
    return kept


def _is_closable(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping) or schema.keys() & (_COMPOSED | _SAYS_OTHERWISE):
        return False
    fewest = schema.get("minProperties", 0)
    return (
        isinstance(required, (list, tuple))
        and all(key in properties for key in required)
        and isinstance(fewest, int)
        and fewest <= len(properties)
    )
