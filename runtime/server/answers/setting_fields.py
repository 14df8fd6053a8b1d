"""The fields of requests that are settings of the runtime, made from their declarations in `protocol.settings`."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import attrs
import mlx.core as mx
from pydantic import AliasChoices, Field, create_model

from protocol.options import options_of
from protocol.settings import Settings
from runtime.server.answers.body import RequestBody

Id = Annotated[int, Field(ge=0)]
# Validation stops at the first invalid item: to report each of a million takes seconds.
Ids = Annotated[list[Id], Field(fail_fast=True)]

# Bound of numbers for which the runtime has none.
MAX_NUMBER = 1e6
# Settings for which clients send -1, and what it stands for.
MINUS_ONE = {"top_k": 0, "seed": None}
# Settings that requests have in a form of their own; see `GenerationBody`.
_IN_OTHER_FORMS = ("max_tokens", "stop", "logit_bias", "logprobs")


def _declared(name: str, hint: Any) -> tuple[Any, Any]:
    option, field = options_of(Settings)[name], attrs.fields_dict(Settings)[name]
    bounds: tuple[Any, ...] = getattr(field.validator, "bounds", ())
    low, high, *_ = *bounds, None, None
    low = -1 if name in MINUS_ONE else low
    types: dict[Any, Any] = {
        int: Annotated[int, Field(ge=low, le=high)],
        float: Annotated[float, Field(ge=-MAX_NUMBER if low is None else low, le=MAX_NUMBER if high is None else high)],
        tuple[int, ...]: Ids,
    }
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    about = re.sub(r"\bNone\b", "null", option.about) + "".join(f"; also `{other}`" for other in option.fields)
    if name in MINUS_ONE:
        about += "; -1 means " + ("null" if MINUS_ONE[name] is None else str(MINUS_ONE[name]))
    described: Any = Field(
        field.default if name in NULL_IS_A_VALUE else None,
        validation_alias=AliasChoices(name, *option.fields) if option.fields else None,
        description=about,
    )
    return Union[(*(types.get(each, each) for each in members if each is not NoneType), None)], described


_HINTS = {
    name: hint
    for name, hint in get_type_hints(Settings, localns={"mx": mx}).items()
    if options_of(Settings)[name].in_requests and name not in _IN_OTHER_FORMS
}
# Settings for which null asks for something other than the default.
NULL_IS_A_VALUE = {
    name for name, hint in _HINTS.items() if NoneType in get_args(hint) and attrs.fields_dict(Settings)[name].default
}

# Names of the fields that are settings.
SETTINGS = set(_HINTS)

if TYPE_CHECKING:
    SettingFields = RequestBody
else:
    declared = {name: _declared(name, hint) for name, hint in _HINTS.items()}
    SettingFields = create_model("SettingFields", __base__=RequestBody, **declared)
