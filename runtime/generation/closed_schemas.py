"""JSON schemas whose objects have no other properties than the listed ones.

JSON Schema allows any others where a schema does not say otherwise. A grammar that allows them lets a weak model go on
with properties that nobody asked for, until it is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords that may say more about the properties of the same object.
_COMPOSED = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
)
_OF_PROPERTIES = _COMPOSED | {"properties", "patternProperties", "required", "minProperties"}
# Other reasons to leave an object open.
_SAYS_OTHERWISE = frozenset(("additionalProperties", "unevaluatedProperties", "enum", "const"))

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_LEFT_AS_THEY_ARE = ("not", "if", "then", "else", "dependentSchemas", "dependencies")


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects with `properties` have only these.

    An object stays open if the schema says something about other properties, or describes it in several places: each
    of them would forbid what the others list. Raises: RecursionError: nested too deeply.
    """
    closing = _Closing()
    while True:
        num_open = len(closing.open_references)
        copy = closing.copy(schema, "#", may_close="#" not in closing.open_references)
        if len(closing.open_references) == num_open:
            return copy


class _Closing:
    """Copies a schema, until all references are known whose targets must stay open."""

    def __init__(self) -> None:
        self.open_references: set[str] = set()

    def copy(self, schema: Any, place: str, *, may_close: bool) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        may_close = may_close and place not in self.open_references
        others = schema.keys() & _OF_PROPERTIES
        if isinstance(reference := schema.get("$ref"), str) and not (may_close and others == {"$ref"}):
            self.open_references.add(reference)
        kept = dict(schema)
        for keyword in _MAPS:
            if isinstance(parts := schema.get(keyword), Mapping):
                below = f"{place}/{keyword}"
                kept[keyword] = {key: self.copy(each, f"{below}/{key}", may_close=True) for key, each in parts.items()}
        for keyword in _LISTS:
            if isinstance(parts := schema.get(keyword), (list, tuple)):
                is_alone = others == {keyword} and (keyword != "allOf" or len(parts) == 1)
                may = keyword == "prefixItems" or (may_close and is_alone)
                kept[keyword] = [
                    self.copy(each, f"{place}/{keyword}/{i}", may_close=may) for i, each in enumerate(parts)
                ]
        for keyword in _SINGLE:
            if keyword in schema:
                kept[keyword] = self.copy(schema[keyword], f"{place}/{keyword}", may_close=True)
        for keyword in _LEFT_AS_THEY_ARE:
            self._leave_open(schema.get(keyword))
        if may_close and _is_closable(schema):
            kept["additionalProperties"] = False
        return kept

    def _leave_open(self, schema: Any) -> None:
        """Leave everything open that a part of a schema refers to."""
        if isinstance(schema, Mapping):
            if isinstance(reference := schema.get("$ref"), str):
                self.open_references.add(reference)
            for part in schema.values():
                self._leave_open(part)
        elif isinstance(schema, (list, tuple)):
            for part in schema:
                self._leave_open(part)


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
