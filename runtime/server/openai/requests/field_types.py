"""Types of fields, with their bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from runtime.generation.tool_calls.tools import MAX_TOOLS

# Bounds that are wider than the runtime's are left to the runtime, which has an error message for each.
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-1e6, le=1e6)]
# Clients send "" for none.
Stop = Annotated[str, Field(max_length=1000)]
Id = Annotated[int, Field(ge=0)]
MinusOne = Annotated[int, Field(ge=-1, le=-1)]
# -1 for as many as there may be.
MaxTokens = Annotated[int, Field(ge=1)] | MinusOne
# A token id, or a text.
BiasKey = Annotated[str, Field(min_length=1, max_length=100)]
_MAX_BIAS = 1e6
Bias = Annotated[float, Field(ge=-_MAX_BIAS, le=_MAX_BIAS)]
# Of answers to one prompt.
Number = Annotated[int, Field(ge=1, le=16)]
# Validation stops at the first invalid item: to report each of a million takes seconds.
Ids = Annotated[list[Id], Field(fail_fast=True)]
ListOfTexts = Annotated[list[str], Field(max_length=128, fail_fast=True)]
ListOfIds = Annotated[list[Ids], Field(max_length=128, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
ContextSize = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="number of latest tokens that the penalty counts, prompt included; null for all"),
]


_MAX_BIASES = 10_000


def _biases(biases: Any) -> Any:
    # llama.cpp's form: pairs of an id or a text and a bias, which is false for a token that is forbidden.
    if isinstance(biases, list) and len(biases) <= _MAX_BIASES and all(map(_is_pair, biases)):
        biases = {str(key): -_MAX_BIAS if bias is False else bias for key, bias in biases}
    # The field's own bound is checked last, after the problems of all entries were gathered.
    if isinstance(biases, (dict, list)) and len(biases) > _MAX_BIASES:
        context = {"field_type": "Dictionary", "max_length": _MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", context)
    return biases


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    return isinstance(item[0], str) or (type(item[0]) is int and item[0] >= 0)


Biases = Annotated[dict[BiasKey, Bias], Field(max_length=_MAX_BIASES), BeforeValidator(_biases)]
