"""Objects with listed properties have only these in a grammar, unless the schema says otherwise."""

from __future__ import annotations

from typing import Any

from sweeps import sweep

from runtime.generation.json_schema import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
CLOSED: dict[str, Any] = {"additionalProperties": False}
REFERENCE: dict[str, Any] = {"$ref": "#/$defs/A"}


@sweep(
    ("schema", "expected"),
    [
        (A, {**A, **CLOSED}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, **CLOSED}),
        ({"properties": {"o": A}}, {"properties": {"o": {**A, **CLOSED}}, **CLOSED}),
        ({"type": "array", "items": A}, {"type": "array", "items": {**A, **CLOSED}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [{**A, **CLOSED}, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [{**A, **CLOSED}]}),
        ({**REFERENCE, "$defs": {"A": A}}, {**REFERENCE, "$defs": {"A": {**A, **CLOSED}}}),
        (
            {"type": "object", "additionalProperties": A},
            {"type": "object", "additionalProperties": {**A, **CLOSED}},
        ),
    ],
)
def test_an_object_with_listed_properties_has_no_others(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@sweep(
    "schema",
    [
        {"type": "object"},
        True,
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": True}, "required": ["b"]},
        {"type": "object", "properties": {"a": True}, "minProperties": 2},
        # Each part would forbid the properties of the others.
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {**A, "if": {"required": ["a"]}, "then": B},
        {"anyOf": [A, B], "allOf": [{"required": ["c"]}]},
        {**B, **REFERENCE, "$defs": {"A": A}},
        {"allOf": [REFERENCE, B], "$defs": {"A": A}},
        {"allOf": [REFERENCE, B], "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": A}},
        {"not": REFERENCE, "$defs": {"A": A}},
    ],
)
def test_an_object_that_may_have_others_stays_open(schema: Any) -> None:
    assert closed(schema) == schema
