"""Response bodies and chunks, in OpenAI's format and with extensions of our own.

The code that responds builds these dictionaries, and `runtime.server.openai.openapi` makes the API's description from
the same types. They are typed dictionaries rather than pydantic models, because a chunk is built for every round of
every stream and the type checker has checked it already. Their keys are sent in the order in which they are built.
"""

from __future__ import annotations

from typing import Literal, NotRequired

# pydantic cannot read `typing.TypedDict` before Python 3.12.
from typing_extensions import TypedDict

from runtime.server.openai.prompt_logprobs import PromptLogprobs
from runtime.tracing.drafter_states import DrafterState

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


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
    """A served model.

    Whether it has a chat template, and the length of its context, by vLLM's name for it, are known once it was loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    draft: str | None
    has_chat_template: bool | None
    max_model_len: int | None
    state: Literal["loaded", "loading", "unloaded"]


class ModelList(TypedDict):
    """The served models, loaded or not."""

    object: Literal["list"]
    data: list[ModelDescription]


class ModelHealth(TypedDict):
    """Whether a model works, and the number of its streams that run and wait."""

    state: Literal["loaded", "loading", "unloaded"]
    status: Literal["ok", "degraded", "broken"]
    streams: int
    waiting: int


class HealthReport(TypedDict):
    """Whether the models work, and the number of streams that run and wait: of all together, and of each.

    A server whose status is "draining" is about to stop: it ends the requests that it has, and takes no others.
    """

    status: Literal["ok", "degraded", "broken", "draining"]
    ok: bool
    target: bool
    draft: bool | None
    streams: int
    waiting: int
    models: dict[str, ModelHealth]


# --- version, properties and tokens ---------------------------------------------------------------


class Version(TypedDict):
    """The server's version."""

    version: str


class GenerationDefaults(TypedDict):
    """Properties of every generation: the context's length in tokens; null if it is unknown."""

    n_ctx: int | None


class Modalities(TypedDict):
    """What a prompt can have beside text."""

    vision: bool
    audio: bool


class Props(TypedDict):
    """Properties of the server and its first model, in llama.cpp's form.

    The chat template is "" if the model has none, or is not loaded, and `total_slots` null; so many requests are worked
    on at once.
    """

    model_path: str
    model_alias: str
    total_slots: int | None
    default_generation_settings: GenerationDefaults
    chat_template: str
    build_info: str
    modalities: Modalities


class Piece(TypedDict):
    """A token: its id, and its text, or its bytes if it is no whole text."""

    id: int
    piece: str | list[int]


class Tokenized(TypedDict):
    """Token ids of a text or a chat, their number, and the context's length (null if the model names none)."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int | None
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of token ids, under the names that vLLM and llama.cpp have for it."""

    prompt: str
    content: str


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
    """Log-probabilities; each list has an item per token. The first of a prompt that is repeated has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """The text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(TypedDict):
    """A response of `/v1/completions`, or a chunk of one; chunks have `usage` at the end, or all if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
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


class CalledFunction(TypedDict):
    """The function of a call, and its arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCallEntry(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The answer, and the reasoning before it if there is any; the content is null where there are only calls.

    `function_call` answers a request with `functions`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    function_call: NotRequired[CalledFunction]
    tool_calls: NotRequired[list[ToolCallEntry]]


class ChatChoice(TypedDict):
    """The message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    """A response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None


class FunctionDelta(TypedDict):
    """The part of a call's function that is new in a chunk: the name once, the arguments piece by piece."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The part of a call that is new in a chunk; `id` and `type` come with its first."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """The part of the message that is new in a chunk."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    function_call: NotRequired[FunctionDelta]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    """The part of the choice that is new in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(TypedDict):
    """A chunk of a response of `/v1/chat/completions`; chunks have `usage` as there."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage]
    speculation: NotRequired[Speculation]


Chunk = Completion | ChatChunk
