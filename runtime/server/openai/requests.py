"""Request bodies, in OpenAI's format, and the runtime's settings that they stand for.

An unknown field, or a value that asks for something unsupported, is an error: no request is answered differently than
it was asked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticKnownError

from protocol.settings import MAX_LOOKAHEAD, MAX_SEED
from runtime.server.errors import ErrorResponse, error_response_of_body

# Bounds that are wider than the runtime's are left to the runtime, which has an error message for each.
_Probability = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-1e6, le=1e6)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Id = Annotated[int, Field(ge=0)]
# A token id as a key of a JSON object.
_IdKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-1e6, le=1e6)]
# Not Literal[1], which would accept true.
_One = Annotated[int, Field(ge=1, le=1)]
# Validation stops at the first invalid item: to report each of a million takes seconds.
_Ids = Annotated[list[_Id], Field(fail_fast=True)]
_TextInList = Annotated[list[str], Field(max_length=1, fail_fast=True)]
_IdsInList = Annotated[list[_Ids], Field(max_length=1, fail_fast=True)]
_EmptyList = Annotated[list[Any], Field(max_length=0)]
_ContextSize = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="number of latest tokens that the penalty counts, prompt included; null for all"),
]


def _check_false(value: Any) -> Any:
    # Literal[False] alone would accept 0.
    if value is not False:
        raise PydanticKnownError("literal_error", {"expected": "False"})
    return value


_False = Annotated[Literal[False], BeforeValidator(_check_false)]

_MAX_BIASES = 10_000


def _check_num_biases(biases: Any) -> Any:
    # The field's own bound is checked last, after the problems of all entries were gathered.
    if isinstance(biases, dict) and len(biases) > _MAX_BIASES:
        context = {"field_type": "Dictionary", "max_length": _MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", context)
    return biases


_Biases = Annotated[dict[_IdKey, _Bias], Field(max_length=_MAX_BIASES), BeforeValidator(_check_num_biases)]


class Body(BaseModel):
    """A JSON object with strict types and without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a streamed response.

    Attributes:
        include_usage: add a last chunk with the usage.
        include_obfuscation: an option of OpenAI's without effect here; chunks are never padded.
        include_speculation: add to each chunk its tokens, which of them the drafter proposed, the statistics, and what
            the models did; send at least four chunks a second, also while the prompt is read.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    include_speculation: bool | None = None


class AnyText(Body):
    """Unconstrained text."""

    type: Literal["text"]


class AnyJson(Body):
    """One JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class SchemaJson(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Request(Body):
    """The fields of both types of request.

    Fields that OpenAI has too have the same type and meaning; the others are settings of the runtime. A field that is
    missing or null has the runtime's default: the temperature is 0, for instance. Only for a context size null is a
    value, the whole text.

    Attributes:
        prompt_field: the name of the field that has the prompt.
    """

    model: str | None = Field(None, description="the name in `/v1/models`; may be left out")
    stream: bool | None = Field(None, description="send the text while it is generated, as server-sent events")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="maximum number of tokens of the answer")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0, the default, is greedy decoding")
    top_p: _Probability | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="makes the text reproducible at any temperature")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _Biases | None = Field(
        None, description="added to the logits of tokens, by token id; -100 practically forbids a token"
    )
    response_format: Annotated[AnyText | AnyJson | SchemaJson, Field(discriminator="type")] | None = None
    n: _One | None = Field(
        None, description="number of answers; for more, send several requests, they are worked on side by side"
    )
    user: str | None = Field(None, description="accepted without effect, like the next six fields")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    # Settings of the runtime.
    top_k: int | None = Field(None, ge=0)
    min_p: _Probability | None = None
    draft_temperature: float | None = Field(
        None, ge=0, le=1e6, description="temperature of the drafter; by default the same as the target's"
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
        """How many of the most probable tokens to return beside each token; None to return no log-probabilities."""
        raise NotImplementedError

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None if the request does not say."""
        return self.max_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        """The name of the field that has `max_answer_tokens`."""
        return "max_tokens"

    @property
    def prompt_length(self) -> int:
        """Number of characters or token ids of the prompt."""
        raise NotImplementedError

    @property
    def speculation(self) -> bool:
        """Whether the chunks have `speculation`."""
        return self.stream_options is not None and bool(self.stream_options.include_speculation)

    @property
    def usage(self) -> bool:
        """Whether there is a last chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def settings(self) -> dict[str, Any]:
        """Settings for `Runtime.stream`, without `max_tokens` and the response format."""
        settings = {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}
        # None is a value of these.
        settings |= {name: getattr(self, name) for name in _CONTEXT_SIZES if name in self.model_fields_set}
        # Penalties without effect would still cost time.
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if settings.get(name) == neutral:
                del settings[name]
        # For OpenAI, 0 keeps only the most probable token; for the runtime, it turns the filter off.
        if settings.get("top_p") == 0:
            del settings["top_p"]
            settings["top_k"] = 1
        if self.logit_bias:
            settings["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.num_logprobs is not None:
            # For the runtime, 0 would turn off the log-probability of the token itself, too.
            settings["logprobs"] = max(1, self.num_logprobs)
        return settings


# Fields that are settings of the same name and meaning.
_SETTINGS = (
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
    """The body of a request to `/v1/completions`: a text to continue."""

    prompt_field = "prompt"
    prompt: str | _Ids | _TextInList | _IdsInList
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: _False | None = None
    best_of: _One | None = None
    suffix: Literal[""] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return self.logprobs

    @property
    def prompt_length(self) -> int:
        """See `Request`."""
        return len(self.text_or_ids)

    @property
    def text_or_ids(self) -> str | list[int]:
        """The prompt, without the list around it: a text or token ids."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], (str, list)):
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]  # the check above has excluded the nested types


class TextPart(Body):
    """A part of a message's text."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Fields of responses, which clients send back as part of the chat.
    refusal: None = None
    tool_calls: _EmptyList | None = None
    function_call: None = None
    audio: None = None
    annotations: _EmptyList | None = None

    def plain(self) -> dict[str, str]:
        """The message for a chat template."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        # "developer" is OpenAI's newer name for "system"; chat templates do not know it.
        plain = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        return plain


class ChatRequest(Request):
    """The body of a request to `/v1/chat/completions`: a chat to continue."""

    prompt_field = "messages"
    # The bounds of lists of objects are for the time of reading them.
    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name for `max_tokens`")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: _EmptyList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    # Unsupported, but some clients send them as null.
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
    def prompt_length(self) -> int:
        """See `Request`."""
        return sum(len(message.plain()["content"]) for message in self.messages)

    @property
    def max_answer_tokens(self) -> int | None:
        """See `Request`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        """See `Request`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


R = TypeVar("R", bound=Request)


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse and validate the body of a request.

    Raises: ErrorResponse: the body is invalid.
    """
    try:
        request = request_type.model_validate_json(body)
    except ValidationError as error:
        raise error_response_of_body(error, list(request_type.model_fields)) from error
    if request.stream_options is not None and not request.stream:
        raise ErrorResponse(400, "stream_options need stream: true; add it or leave them out", param="stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and request.logprobs is None:
        raise ErrorResponse(400, "top_logprobs needs logprobs: true; add it or leave it out", param="top_logprobs")
    return request
