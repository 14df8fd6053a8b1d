"""Requests for generations: the fields that the bodies of all APIs share, and a request in the form of no API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import mlx.core as mx
from pydantic import AliasChoices, BeforeValidator, Field, create_model
from pydantic_core import PydanticKnownError

from protocol.options import options_of
from protocol.settings import Settings
from runtime.generation.text import Prompt
from runtime.generation.tool_calls.tools import MAX_TOOLS, Tools
from runtime.server.answers.body import Body, IgnoredFields, NoEffect, RequestBody
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.schemas import ANY_OBJECT, Constraint, ConstraintKind

Id = Annotated[int, Field(ge=0)]
# Validation stops at the first invalid item: to report each of a million takes seconds.
Ids = Annotated[list[Id], Field(fail_fast=True)]

# Bound of numbers for which the runtime has none.
MAX_NUMBER = 1e6

# Clients send "" for none.
StopText = Annotated[str, Field(max_length=1000)]
Stops = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]
# -1 for as many as fit into the context, 0 to read the prompt and generate nothing.
MaxTokens = Annotated[int, Field(ge=-1)]
# A token id, or a text.
BiasKey = Annotated[str, Field(min_length=1, max_length=100)]
Bias = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]

_MAX_BIASES = 10_000


def _biases(biases: Any) -> Any:
    # Checked here, as pydantic checks the field's own bound last, after it has gathered the problems of all entries.
    if isinstance(biases, dict) and (length := len(biases)) > _MAX_BIASES:
        context = {"field_type": "Dictionary", "max_length": _MAX_BIASES, "actual_length": length}
        raise PydanticKnownError("too_long", context)
    return biases


Biases = Annotated[dict[BiasKey, Bias], Field(max_length=_MAX_BIASES), BeforeValidator(_biases)]


# --- fields that are settings of the runtime, from their declarations ------------------------------

# Settings for which clients send -1, and what it stands for.
_MINUS_ONE = {"top_k": 0, "seed": None, "thinking_budget": None}
# Settings that requests have in a form of their own; see `GenerationBody`.
_IN_OTHER_FORMS = ("max_tokens", "stop", "logit_bias", "logprobs")


def _declared(name: str, hint: Any) -> tuple[Any, Any]:
    option, field = options_of(Settings)[name], attrs.fields_dict(Settings)[name]
    bounds: tuple[Any, ...] = getattr(field.validator, "bounds", ())
    low, high, *_ = *bounds, None, None
    low = -1 if name in _MINUS_ONE else low
    types: dict[Any, Any] = {
        int: Annotated[int, Field(ge=low, le=high)],
        float: Annotated[float, Field(ge=-MAX_NUMBER if low is None else low, le=MAX_NUMBER if high is None else high)],
        tuple[int, ...]: Ids,
    }
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    about = re.sub(r"\bNone\b", "null", option.about) + "".join(f"; also `{other}`" for other in option.fields)
    if name in _MINUS_ONE:
        about += "; -1 means " + ("null" if _MINUS_ONE[name] is None else str(_MINUS_ONE[name]))
    described: Any = Field(
        field.default if name in _NULL_IS_A_VALUE else None,
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
_NULL_IS_A_VALUE = {
    name for name, hint in _HINTS.items() if NoneType in get_args(hint) and attrs.fields_dict(Settings)[name].default
}

if TYPE_CHECKING:
    SettingFields = RequestBody
else:
    _fields = {name: _declared(name, hint) for name, hint in _HINTS.items()}
    SettingFields = create_model("SettingFields", __base__=RequestBody, **_fields)


# --- constraints on an answer -----------------------------------------------------------------------


class AnyText(Body):
    """Unconstrained text."""

    type: Literal["text"]


class AnyJson(Body):
    """One JSON object."""

    type: Literal["json_object"]


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


ResponseFormat = Annotated[AnyText | AnyJson | SchemaJson, Field(discriminator="type")]


class StructuredOutputs(Body):
    """A constraint on the answer, in vLLM's form; at most one field is set."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")  # a JSON schema, or one as JSON
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraints(self) -> Iterator[Constraint]:
        """The constraints that it gives."""
        json = ANY_OBJECT if self.json_ is None and self.json_object else self.json_
        values: dict[ConstraintKind, Any] = {
            "json": json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        for kind, value in values.items():
            if value is not None:
                yield Constraint(kind, value, "structured_outputs")


def format_constraint(format: ResponseFormat | NamedSchema | None) -> Constraint | None:
    """The constraint that a `response_format` stands for, or a schema in its place; None for any text."""
    match format:
        case SchemaJson(json_schema=NamedSchema(schema_=schema)) | NamedSchema(schema_=schema):
            return Constraint("json", schema, "response_format")
        case AnyJson():
            return Constraint("json", ANY_OBJECT, "response_format")
    return None


# --- a request --------------------------------------------------------------------------------------


@attrs.frozen
class ChatPrompt:
    """A chat to continue, as chat templates take it."""

    messages: Sequence[dict[str, Any]]  # at least one; the text of each is its `content`
    continues: bool  # whether the answer continues the last message
    variables: Mapping[str, Any]  # further ones of the template
    reasoning_field: str | None  # the field of the body that asks for reasoning, or for none, by the template's switch
    predicted_text: str  # that the answer may resemble
    has_tools: bool  # whether the request lists tools, which its answer may call or not
    tools: Tools | None  # those that the model may call


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """A request for one or more generations, in the form of no API."""

    model: str | None
    stream: bool
    ignored: IgnoredFields
    settings: Mapping[str, Any]  # without those that need the tokenizer: see `Preparation`
    prompt_field: str  # the name of the body's field that has the prompt
    chat: ChatPrompt | None = None
    texts: Sequence[Prompt] = ()  # texts or token ids to continue, if there is no chat; at least one
    suffix: str | None = None  # the text that follows the answers, for fill-in-the-middle
    echoes: bool = False
    num_choices: int = 1  # answers to each prompt
    num_logprobs: int | None = None  # most probable tokens to return with each token; None for no log-probabilities
    num_prompt_logprobs: int | None = None
    max_tokens: int | None  # -1 for as many as there may be; None if the body says none
    max_tokens_field: str = "max_tokens"  # the name that the body has for it
    min_tokens: int
    logit_bias: Mapping[str, float]  # by token ids or texts
    constraint: Constraint | None
    includes_stop: bool
    skips_special_tokens: bool

    @property
    def prompt_length(self) -> int:
        """In characters or token ids."""
        if self.chat is not None:
            return sum(len(message["content"]) for message in self.chat.messages)
        return sum(map(len, self.texts)) + len(self.suffix or "")

    @property
    def num_answers(self) -> int:
        """Number of answers to all prompts."""
        return max(1, len(self.texts)) * self.num_choices

    @property
    def num_scored(self) -> int | None:
        """As `num_prompt_logprobs`, also for an echo of the prompt."""
        asked = (self.num_prompt_logprobs, self.num_logprobs if self.echoes else None)
        return max((number for number in asked if number is not None), default=None)

    @property
    def num_named(self) -> int:
        """How many tokens a response names for each token of an answer: itself, and the likely others."""
        return 1 + (self.num_logprobs or 0)


class GenerationBody(SettingFields):
    """The fields that a request for a generation has in every API, besides those that are settings of the runtime.

    A missing or null field takes the runtime's default. Only a context size has null as a value: the whole text.
    """

    stream: bool | None = Field(None, description="send the answer while it is generated, as server-sent events")
    min_tokens: Id | None = Field(
        None, description="minimum number of tokens: before that, no end-of-text or stop token can end the answer"
    )
    stop: StopText | Stops | None = None
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string or token at the end")
    skip_special_tokens: bool | None = Field(
        None, description="true: leave special tokens out of the text, except those around reasoning and calls"
    )
    logit_bias: Biases | None = Field(
        None,
        description="numbers to add to the logits of tokens, by token id, or by a text, which stands for each of its "
        "tokens; -100 practically forbids a token",
    )
    cache_prompt: bool | None = Field(
        None, description="false: neither reuse cached tokens of the prompt, nor cache it for later requests"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field: a constraint on the answer")

    def given_settings(self) -> dict[str, Any]:
        """The settings that the request gives, as it gives them."""
        return self.model_dump(include=set(_HINTS), exclude_unset=True)

    def request_of(
        self, *, format: Constraint | None, num_logprobs: int | None, stop: Sequence[str] | None = None, **more: Any
    ) -> GenerationRequest:
        """The request that the fields stand for, with `more` fields. Raises: ErrorResponse: there are two constraints.

        Args:
            format: the constraint of the field that each API has in a form of its own.
            stop: stop strings, in place of `stop`.
        """
        constraints = [] if format is None else [format]
        if self.structured_outputs is not None:
            constraints += self.structured_outputs.constraints()
        if len(constraints) > 1:
            one, other = (constraint.field for constraint in constraints[:2])
            raise ErrorResponse(400, f"the answer cannot follow both {one} and {other}; leave one out", param=other)
        return GenerationRequest(
            model=self.model,
            stream=bool(self.stream),
            ignored=self.ignored,
            settings=self._settings(num_logprobs, self.stop if stop is None else stop),
            num_logprobs=num_logprobs,
            min_tokens=self.min_tokens or 0,
            logit_bias=self.logit_bias or {},
            constraint=constraints[0] if constraints else None,
            includes_stop=bool(self.include_stop_str_in_output),
            skips_special_tokens=bool(self.skip_special_tokens),
            **more,
        )

    def _settings(self, num_logprobs: int | None, stop: str | Sequence[str] | None) -> dict[str, Any]:
        settings = {
            name: _MINUS_ONE[name] if name in _MINUS_ONE and value == -1 else value
            for name, value in self.given_settings().items()
            if value is not None or name in _NULL_IS_A_VALUE
        }
        # Penalties without effect would still cost time.
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if settings.get(name) == neutral:
                del settings[name]
        if stop is not None:
            settings["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        if self.cache_prompt is not None:
            settings["reuse_prefix"] = self.cache_prompt
        # For OpenAI, 0 keeps only the most probable token; for the runtime, it turns the filter off.
        if settings.get("top_p") == 0:
            del settings["top_p"]
            settings["top_k"] = 1
        if num_logprobs is not None:
            # For the runtime, 0 would turn off the log-probability of the token itself, too.
            settings["logprobs"] = max(1, num_logprobs)
        return settings
