"""Response bodies and chunks as types, in OpenAI's format; `runtime.server.openai.serializers` makes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from runtime.tracing.drafter_states import DrafterState

FinishReason = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """Of the prompt's tokens: how many were still cached."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the answer's tokens: how many were thoughts, and what became of those that were drafted."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request and its answer, and of those that the drafter proposed, how many stood."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DraftedToken(BaseModel):
    """A token, and whether the drafter had proposed it."""

    id: int
    text: str
    from_draft: bool
    is_thinking: bool


class SoFar(BaseModel):
    """The statistics that a page shows: see `runtime.Statistics`."""

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    generation_tps: float | None
    time_to_first_token: float | None
    elapsed: float


class WorkSpan(BaseModel):
    """What a model worked on, in seconds since the generation began."""

    actor: Literal["target", "draft"]
    kind: str
    began: float
    ended: float
    round: int | None


class DrafterChange(BaseModel):
    """What the drafter does from a moment on, in seconds since the generation began.

    "resting": it leaves rounds to the target, where plain decoding is faster; "overdue": it took too long, and the
    target goes on without it; "left": it takes no part in this generation any more.
    """

    at: float
    state: DrafterState


class Speculation(BaseModel):
    """What has happened since the last chunk, and the statistics so far."""

    tokens: list[DraftedToken]
    statistics: SoFar
    spans: list[WorkSpan]
    drafter: list[DrafterChange]


class CompletionLogprobs(BaseModel):
    """Log-probabilities, a list item a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """An answer of `/v1/completions`, or with `usage` only at the end, a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculation: Speculation | None = None


class TopLogprob(BaseModel):
    """A token, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Likewise, and those of the likeliest tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities."""

    content: list[TokenLogprob]
    refusal: None


class Reply(BaseModel):
    """What is said, and what was thought before."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """The answer."""

    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """An answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What is new of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(BaseModel):
    """What is new."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """A chunk of an answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    speculation: Speculation | None = None
