"""What an answer must be, in the fields that clients of several servers have for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.server.answers.body import Body, NoEffect
from runtime.server.answers.ignored_fields import RequestBody
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.constraint import ANY_OBJECT, Constraint

# A JSON schema, or one as JSON.
_Schema = dict[str, Any] | bool | str
_Choices = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]


class AnyText(Body):
    """Unconstrained text."""

    type: Literal["text"]


class AnyJson(Body):
    """One JSON object; or JSON that matches a schema, in llama.cpp's form."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class NamedSchema(Body):
    """A JSON schema and its name."""

    name: str | None = None
    description: NoEffect = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class SchemaJson(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputs(Body):
    """What an answer must be, in vLLM's form: one of these."""

    json_: _Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstrainedRequest(RequestBody):
    """The fields of a request that say what the answer must be; at most one of them."""

    response_format: Annotated[AnyText | AnyJson | SchemaJson, Field(discriminator="type")] | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, description="llama.cpp's field: the answer matches it")
    grammar: str | None = Field(None, description="llama.cpp's field: the answer matches a grammar, in GBNF or Lark's")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field")
    guided_json: _Schema | None = Field(None, description="vLLM's older field, like the next three")
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be; None for any text."""
        return next(self._constraints(), None)

    def check(self) -> None:
        super().check()
        if len(given := [constraint.field for constraint in self._constraints()]) > 1:
            raise ErrorResponse(
                400, f"the answer cannot follow both {given[0]} and {given[1]}; leave one out", param=given[1]
            )

    def _constraints(self) -> Iterator[Constraint]:
        match self.response_format:
            case SchemaJson(json_schema=named):
                yield Constraint("json", named.schema_, "response_format")
            case AnyJson(schema_=schema):
                yield Constraint("json", ANY_OBJECT if schema is None else schema, "response_format")
        if (given := self.structured_outputs) is not None:
            json = ANY_OBJECT if given.json_ is None and given.json_object else given.json_
            yield from _given("structured_outputs", json, given.regex, given.choice, given.grammar)
        yield from _given("json_schema", json=self.json_schema)
        yield from _given("grammar", grammar=self.grammar)
        yield from _given("guided_json", json=self.guided_json)
        yield from _given("guided_regex", regex=self.guided_regex)
        yield from _given("guided_choice", choice=self.guided_choice)
        yield from _given("guided_grammar", grammar=self.guided_grammar)


# The fields of `ConstrainedRequest` that are not OpenAI's.
CONSTRAINTS = frozenset(ConstrainedRequest.model_fields) - {"response_format"}


def _given(
    field: str,
    json: dict[str, Any] | bool | str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Iterator[Constraint]:
    if json is not None:
        yield Constraint("json", json, field)
    if regex is not None:
        yield Constraint("regex", regex, field)
    if choice is not None:
        yield Constraint("choice", choice, field)
    # Clients of llama.cpp send "" for none.
    if grammar:
        yield Constraint("grammar", grammar, field)
