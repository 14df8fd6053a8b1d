"""JSON schemas that several tests ask for."""

from __future__ import annotations

from typing import Any


def closed_object(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these properties, and no other."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
