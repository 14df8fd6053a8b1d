"""Requests for generations, independent of any API: settings, limits, and constraints on the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field
from pydantic_core import PydanticKnownError

from runtime.generation.text import Prompt
from runtime.generation.tool_calls.tools import MAX_TOOLS, Tools
from runtime.server.answers.body import Body, NoEffect
from runtime.server.answers.setting_fields import MAX_NUMBER, MINUS_ONE, NULL_IS_A_VALUE, GenerationBody, Id
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.constraint import ANY_OBJECT, Constraint, Kind

# Clients send "" for none.
Stop = Annotated[str, Field(max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
MinusOne = Annotated[int, Field(ge=-1, le=-1)]
# -1 for as many as fit into the context.
MaxTokens = Annotated[int, Field(ge=1)] | MinusOne
# A token id, or a text.
BiasKey = Annotated[str, Field(min_length=1, max_length=100)]
Bias = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]

_MAX_BIASES = 10_000


def _biases(biases: Any) -> Any:
    # llama.cpp's form: pairs of an id or a text and a bias, which is false for a token that is forbidden.
    if isinstance(biases, list) and len(biases) <= _MAX_BIASES and all(map(_is_pair, biases)):
        biases = {str(key): -MAX_NUMBER if bias is False else bias for key, bias in biases}
    # Checked here, as pydantic checks the field's own bound last, after it has gathered the problems of all entries.
    if isinstance(biases, (dict, list)) and len(biases) > _MAX_BIASES:
        context = {"field_type": "Dictionary", "max_length": _MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", context)
    return biases


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    return isinstance(item[0], str) or (type(item[0]) is int and item[0] >= 0)


Biases = Annotated[dict[BiasKey, Bias], Field(max_length=_MAX_BIASES), BeforeValidator(_biases)]


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
    """A constraint on the answer, in vLLM's form; at most one field is set."""

    json_: _Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


_KINDS: dict[str, Kind] = {
    "json_schema": "json",
    "grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class ConstrainedRequest(GenerationBody):
    """The fields that constrain the answer; a request has at most one of them."""

    response_format: Annotated[AnyText | AnyJson | SchemaJson, Field(discriminator="type")] | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, description="llama.cpp's field: a schema of the answer")
    grammar: str | None = Field(None, description="llama.cpp's field: a grammar of the answer, in GBNF or Lark")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field: a constraint on the answer")
    guided_json: _Schema | None = Field(None, description="a schema of the answer; `guided_*` are vLLM's older fields")
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer; None for any text."""
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
        given: list[tuple[Kind, Any, str]] = [(kind, getattr(self, field), field) for field, kind in _KINDS.items()]
        if (of_vllm := self.structured_outputs) is not None:
            json = ANY_OBJECT if of_vllm.json_ is None and of_vllm.json_object else of_vllm.json_
            values: dict[Kind, Any] = {
                "json": json,
                "regex": of_vllm.regex,
                "choice": of_vllm.choice,
                "grammar": of_vllm.grammar,
            }
            given = [*((kind, value, "structured_outputs") for kind, value in values.items()), *given]
        for kind, value, field in given:
            # Clients of llama.cpp send "" for no grammar.
            if value is not None and (kind != "grammar" or value):
                yield Constraint(kind, value, field)


class Request(ConstrainedRequest):
    """A request for one or more generations. Its own fields are those that are not simply copies of a setting.

    A missing or null field takes the runtime's default. Only a context size has null as a value: the whole text.

    Attributes:
        prompt_field: the name of the field that has the prompt.
        is_chat: whether reasoning and calls are told apart from the text of an answer.
    """

    max_tokens: MaxTokens | None = Field(
        None,
        validation_alias=AliasChoices("max_tokens", "n_predict"),
        description="maximum number of tokens in the answer, -1 for as many as fit into the context; also `n_predict`",
    )
    min_tokens: Id | None = Field(
        None, description="minimum number of tokens: before that, no end-of-text or stop token can end the answer"
    )
    stop: Stop | Stops | None = None
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string or token at the end")
    skip_special_tokens: bool | None = Field(
        None, description="true: leave special tokens out of the text, except those around reasoning and calls"
    )
    logit_bias: Biases | None = Field(
        None,
        description="numbers to add to the logits of tokens, by token id, or by a text, which stands for each of its "
        "tokens; -100 practically forbids a token; also a list of [id or text, number] pairs",
    )
    cache_prompt: bool | None = Field(
        None, description="false: neither reuse cached tokens of the prompt, nor cache it for later requests"
    )

    prompt_field: ClassVar[str]
    is_chat: ClassVar[bool] = False

    def prompts(self, *, has_template: bool) -> Sequence[Prompt]:
        """The prompts, at least one; for a model with a chat template, or without."""
        raise NotImplementedError

    @property
    def suffix_text(self) -> str | None:
        """The text that follows the answers, for fill-in-the-middle; None if the answers only continue the prompt."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answers begin with their prompt."""
        return False

    @property
    def num_prompts(self) -> int:
        """Number of prompts; each gets `num_choices` answers."""
        return 1

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return 1

    @property
    def num_candidates(self) -> int:
        """Number of texts to generate for a prompt; the best `num_choices` of them are its answers."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens to return beside each token; None to return no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for the tokens of the prompt."""
        return None

    @property
    def num_scored(self) -> int | None:
        """As `num_prompt_logprobs`, also for an echo of the prompt; None if its log-probabilities are not needed."""
        asked = (self.num_prompt_logprobs, self.num_logprobs if self.echoes else None)
        return max((number for number in asked if number is not None), default=None)

    @property
    def num_named(self) -> int:
        """How many tokens a response names for each token of an answer: itself, and the likely others."""
        return 1 + (self.num_logprobs or 0)

    @property
    def num_named_with_prompt(self) -> int:
        """How many tokens a response names for each token of the prompt."""
        echoed = self.num_named if self.echoes else 0
        return echoed + (0 if self.num_prompt_logprobs is None else 1 + self.num_prompt_logprobs)

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; -1 for as many as there may be, None if the request does not say."""
        return self.max_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        """The name of the field that has `max_answer_tokens`."""
        return "max_tokens"

    @property
    def prompt_length(self) -> int:
        """Number of characters or token ids of the prompts."""
        raise NotImplementedError

    @property
    def predicted_text(self) -> str:
        """A text that the answer may resemble; "" for none."""
        return ""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return {}

    @property
    def reasoning_field(self) -> str | None:
        """The field that asks for reasoning, or for none, by the template's switch; None if none does."""
        return None

    @property
    def has_tools(self) -> bool:
        """Whether the request lists tools, which its answer may call or not."""
        return False

    def checked_tools(self) -> Tools | None:
        """The tools of the request; None where the model may call nothing. Raises: ErrorResponse: one is invalid."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings for `Runtime.stream`, without those that need the tokenizer: see `Preparation`."""
        settings = {
            name: MINUS_ONE[name] if name in MINUS_ONE and value == -1 else value
            for name, value in self.given_settings().items()
            if value is not None or name in NULL_IS_A_VALUE
        }
        # Penalties without effect would still cost time.
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if settings.get(name) == neutral:
                del settings[name]
        if self.stop is not None:
            settings["stop"] = [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]
        if self.cache_prompt is not None:
            settings["reuse_prefix"] = self.cache_prompt
        # For OpenAI, 0 keeps only the most probable token; for the runtime, it turns the filter off.
        if settings.get("top_p") == 0:
            del settings["top_p"]
            settings["top_k"] = 1
        if self.num_logprobs is not None:
            # For the runtime, 0 would turn off the log-probability of the token itself, too.
            settings["logprobs"] = max(1, self.num_logprobs)
        elif self.num_candidates > self.num_choices:
            settings["logprobs"] = 1  # to choose the best
        return settings
