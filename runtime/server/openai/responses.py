"""Response bodies and chunks, in OpenAI's format and with extensions of our own.

The code that responds builds these dictionaries, and `runtime.server.openai.openapi` makes the API's description from
the same types. They are typed dictionaries rather than pydantic models, because a chunk is built for every round of
every stream and the type checker has checked it already. Their keys are sent in the order in which they are built.
"""

from __future__ import annotations

from typing import Literal, NotRequired

# pydantic cannot read `typing.TypedDict` before Python 3.12.
from typing_extensions import TypedDict

from runtime.tracing.drafter_states import DrafterState

FinishReason = Literal["stop", "length"]


# --- errors, models and health --------------------------------------------------------------------


class ErrorDetail(TypedDict):
    """An error: a message for people, the rest for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ModelDescription(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    draft: str | None
    has_chat_template: bool


class ModelList(TypedDict):
    """The served models: always one."""

    object: Literal["list"]
    data: list[ModelDescription]


class HealthReport(TypedDict):
    """Whether the models work, and the number of streams that run and wait."""

    status: Literal["ok", "degraded", "broken"]
    ok: bool
    target: bool
    draft: bool | None
    streams: int
    waiting: int


# --- usage ----------------------------------------------------------------------------------------


class PromptDetails(TypedDict):
    """Prompt tokens that were still cached."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Answer tokens that are reasoning, and drafted tokens that were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Token counts of a request and its answer, and of the proposed and accepted drafted tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


# --- speculation, for `stream_options.include_speculation` ----------------------------------------


class SpeculationToken(TypedDict):
    """A token, and whether the drafter had proposed it."""

    id: int
    text: str
    from_draft: bool
    is_thinking: bool


class SpeculationStatistics(TypedDict):
    """Statistics of the stream so far: see `runtime.Statistics`."""

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    rows_per_pass: float | None
    generation_tps: float | None
    time_to_first_token: float | None
    elapsed: float


class WorkSpan(TypedDict):
    """A job of a model: its begin and end in seconds since the stream began, and how many streams shared it."""

    actor: Literal["target", "draft"]
    kind: str
    began: float
    ended: float
    round: int | None
    streams: int


class DrafterChange(TypedDict):
    """A change of the drafter's state, at a time in seconds since the stream began.

    "resting": it leaves rounds to the target, where plain decoding is faster; "overdue": it took too long, and the
    target goes on without it; "left": it takes no further part in this stream.
    """

    at: float
    state: DrafterState


class ModelActivity(TypedDict):
    """Jobs of the models and changes of the drafter's state, since the last chunk."""

    spans: list[WorkSpan]
    drafter: list[DrafterChange]


class Speculation(ModelActivity):
    """The chunk's tokens, the statistics so far, and the activity of the models since the last chunk."""

    tokens: list[SpeculationToken]
    statistics: SpeculationStatistics


# --- /v1/completions ------------------------------------------------------------------------------


class CompletionLogprobs(TypedDict):
    """Log-probabilities; each list has an item per token, but `top_logprobs` none where `logprobs` is 0."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """The text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(TypedDict):
    """A response of `/v1/completions`, or a chunk of one. Of the chunks, only the last may have `usage`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]
    speculation: NotRequired[Speculation]


# --- /v1/chat/completions -------------------------------------------------------------------------


class TopLogprob(TypedDict):
    """A token and its log-probability; `bytes` is null where the tokenizer tells none for part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(TypedDict):
    """The answer, and the reasoning before it if there is any."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: NotRequired[str]


class ChatChoice(TypedDict):
    """The message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    """A response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(TypedDict):
    """The part of the message that is new in a chunk."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChunkChoice(TypedDict):
    """The part of the choice that is new in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(TypedDict):
    """A chunk of a response of `/v1/chat/completions`; only the last may have `usage`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage]
    speculation: NotRequired[Speculation]


Chunk = Completion | ChatChunk
