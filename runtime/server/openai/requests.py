"""What may be asked: the bodies of requests, as OpenAI has them, and the settings that they stand for.

A field that is misspelt, or asks for what is not there, is an error: a request that is answered is answered as asked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticKnownError

from protocol.settings import MAX_LOOKAHEAD, MAX_SEED
from runtime.server.errors import ErrorResponse, error_response_of_body

# Of the bodies' own; what it bounds further is said by the runtime, in words of its own.
_Probability = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-1e6, le=1e6)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Id = Annotated[int, Field(ge=0)]
# Ids as JSON has them for keys.
_IdKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-1e6, le=1e6)]
# Not as a literal, which true would be too.
_One = Annotated[int, Field(ge=1, le=1)]
# The first thing that is wrong with a list is enough: to gather what is wrong with each of a million takes seconds.
_Ids = Annotated[list[_Id], Field(fail_fast=True)]
_OneText = Annotated[list[str], Field(max_length=1, fail_fast=True)]
_OneOfIds = Annotated[list[_Ids], Field(max_length=1, fail_fast=True)]
_Nothing = Annotated[list[Any], Field(max_length=0)]
_ContextSize = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="tokens that the penalty looks back, prompt included; null for the whole text"),
]


def _false(value: Any) -> Any:
    # As a literal alone, 0 would be too.
    if value is not False:
        raise PydanticKnownError("literal_error", {"expected": "False"})
    return value


_False = Annotated[Literal[False], BeforeValidator(_false)]

_MOST_BIASES = 10_000


def _few(biases: Any) -> Any:
    # Likewise. A bound of the field's own is looked at when every entry was, and what is wrong with it gathered.
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        context = {"field_type": "Dictionary", "max_length": _MOST_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", context)
    return biases


_Biases = Annotated[dict[_IdKey, _Bias], Field(max_length=_MOST_BIASES), BeforeValidator(_few)]


class Body(BaseModel):
    """Of the types that it says, without fields that it does not have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream has beside its text.

    Attributes:
        include_usage: a last chunk with the usage.
        include_obfuscation: of OpenAI's; nothing is padded here.
        include_speculation: in each chunk, its tokens and who they are from, the statistics, and what the models did;
            several times a second, also while the prompt is read.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    include_speculation: bool | None = None


class AnyText(Body):
    """Text as it comes."""

    type: Literal["text"]


class AnyJson(Body):
    """One JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema, and what it is called."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class SchemaJson(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Request(Body):
    """What both kinds of request have.

    Names, types and meaning are OpenAI's; those that OpenAI does not have are the runtime's settings. Where a field is
    left out or null, the runtime's default holds: a temperature of 0, among others. A context size of null is the whole
    text, as it is for the runtime.

    Attributes:
        prompt_field: the one with the prompt.
    """

    model: str | None = Field(None, description="as `/v1/models` names it; may be left out")
    stream: bool | None = Field(None, description="send the text as it comes, by server-sent events")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="most tokens of the answer")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0, the default, is greedy")
    top_p: _Probability | None = None
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="makes the text follow from the request alone, at any temperature"
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _Biases | None = Field(
        None, description="what to add to the logits of tokens, by id; -100 as good as forbids one"
    )
    response_format: Annotated[AnyText | AnyJson | SchemaJson, Field(discriminator="type")] | None = None
    n: _One | None = Field(None, description="one answer a request; send several, they are worked on side by side")
    user: str | None = Field(None, description="taken, and without effect; so are the next six")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    # The runtime's own.
    top_k: int | None = Field(None, ge=0)
    min_p: _Probability | None = None
    draft_temperature: float | None = Field(
        None, ge=0, le=1e6, description="the drafter's own; the default is the temperature"
    )
    xtc_probability: _Probability | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=1e6)] | None = None
    repetition_context_size: _ContextSize = 20
    presence_context_size: _ContextSize = 20
    frequency_context_size: _ContextSize = 20
    stop_tokens: _Ids | None = None
    ignore_eos: bool | None = None
    lookahead: Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)] | Literal["auto"] | None = None
    acceptance: Literal["auto", "match", "rejection"] | None = None

    prompt_field: ClassVar[str]

    @property
    def num_logprobs(self) -> int | None:
        """For how many of the likeliest tokens log-probabilities are asked for beside the token's own; None for no."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer; None where it is not said."""
        return self.max_tokens

    @property
    def most_tokens_field(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def speculation(self) -> bool:
        """Whether the chunks are to tell of speculation."""
        return self.stream_options is not None and bool(self.stream_options.include_speculation)

    @property
    def usage(self) -> bool:
        """Whether a last chunk is to have the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def settings(self) -> dict[str, Any]:
        """For `Runtime.stream`: what was said; a response format is left to be made a grammar of."""
        said = {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not None}
        # Of these None is a value, and not what was left out.
        said |= {name: getattr(self, name) for name in _CONTEXT_SIZES if name in self.model_fields_set}
        # They change nothing, and cost something all the same.
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if said.get(name) == neutral:
                del said[name]
        # To OpenAI the smallest of nuclei, to the runtime none.
        if said.get("top_p") == 0:
            del said["top_p"]
            said["top_k"] = 1
        if self.logit_bias:
            said["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.num_logprobs is not None:
            # With none of the likeliest asked for, the token's own comes along with one.
            said["logprobs"] = max(1, self.num_logprobs)
        return said


# Fields that are settings of the same name.
_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "draft_temperature",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "stop_tokens",
    "ignore_eos",
    "lookahead",
    "acceptance",
)
_CONTEXT_SIZES = ("repetition_context_size", "presence_context_size", "frequency_context_size")


class CompletionRequest(Request):
    """A text to go on with."""

    prompt_field = "prompt"
    prompt: str | _Ids | _OneText | _OneOfIds
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: _False | None = None
    best_of: _One | None = None
    suffix: Literal[""] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return self.logprobs

    @property
    def text(self) -> str | list[int]:
        """The prompt: text, or token ids."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], (str, list)):
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]  # neither of the two that were just seen to


class TextPart(Body):
    """A part of what was said."""

    type: Literal["text"]
    text: str


class Message(Body):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # What an answer has, as clients send it back.
    refusal: None = None
    tool_calls: _Nothing | None = None
    function_call: None = None
    audio: None = None
    annotations: _Nothing | None = None

    def plain(self) -> dict[str, str]:
        """For a chat template."""
        said = self.content or ""
        if not isinstance(said, str):
            said = "".join(part.text for part in said)
        # The same under another name, of which templates do not know.
        plain = {"role": "system" if self.role == "developer" else self.role, "content": said}
        if self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        return plain


class ChatRequest(Request):
    """A conversation to go on with."""

    prompt_field = "messages"
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name for `max_tokens`")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: _Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    # What is not there, and null in the requests of some clients.
    reasoning_effort: None = None
    verbosity: None = None
    prediction: None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """See `Request`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_tokens_field(self) -> str:
        """See `Request`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


R = TypeVar("R", bound=Request)


def read(kind: type[R], body: bytes) -> R:
    """A request from a body.

    Raises: Refusal: it is none.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise error_response_of_body(error, list(kind.model_fields)) from error
    if request.stream_options is not None and not request.stream:
        raise ErrorResponse(400, "stream_options have a meaning only with stream: true", param="stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and request.logprobs is None:
        raise ErrorResponse(400, "top_logprobs have a meaning only with logprobs: true", param="top_logprobs")
    return request
