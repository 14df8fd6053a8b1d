"""JSON objects of requests: strict types, and the fields on which nothing depends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class _WithoutEffect:
    """Marks a field that is known and on which nothing depends."""


# A field that clients send and on which no answer could depend; of any type.
NoEffect = Annotated[Any, _WithoutEffect(), Field(description="accepted without effect")]

# A field of responses, which clients send back as part of a conversation; of any type.
SentBack = Annotated[Any, Field(description="a field of responses; of no meaning in a request")]


class Body(BaseModel):
    """A JSON object with strict types. Fields that it does not have are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def take_other_names(self) -> None:
        """Take fields that were given as null under their first name from another name of theirs.

        pydantic takes the first name that is there.

        Raises: pydantic.ValidationError: the value is invalid.
        """
        for name, field in type(self).model_fields.items():
            if not isinstance(field.validation_alias, AliasChoices) or getattr(self, name) is not None:
                continue
            extra = self.model_extra or {}
            for other in field.validation_alias.choices:
                if (value := extra.get(str(other))) is not None:
                    del extra[str(other)]
                    self.__pydantic_validator__.validate_assignment(self, name, value)
                    break

    def unknown(self) -> Iterator[str]:
        """Names of given fields that the object does not have, in dotted form for those of objects within it.

        Without those that are null or [], which ask for nothing. A name may come more than once.
        """
        for name, value in (self.model_extra or {}).items():
            if value is not None and value != []:
                yield name
        for name in type(self).model_fields:
            for body in _bodies(getattr(self, name)):
                yield from (f"{name}.{inner}" for inner in body.unknown())

    def without_effect(self) -> Iterator[str]:
        """Names of given fields that are known, and have no effect."""
        for name, field in type(self).model_fields.items():
            is_marked = any(isinstance(mark, _WithoutEffect) for mark in field.metadata)
            if is_marked and getattr(self, name) is not None:
                yield name
            for body in _bodies(getattr(self, name)):
                yield from (f"{name}.{inner}" for inner in body.without_effect())


def _bodies(value: Any) -> Iterator[Body]:
    """The bodies that a field consists of. An object that is kept as it came, such as a schema, is none."""
    if isinstance(value, Body):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, Body))
