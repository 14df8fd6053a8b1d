"""Response bodies in OpenAI's format, and extensions of our own, also of chunks."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from runtime.server.answers.api import EndReason
from runtime.server.answers.token_logprobs import TokenLogprob
from runtime.server.timelines import ModelActivity

ChatFinishReason = EndReason | Literal["tool_calls"]


class PromptLogprob(TypedDict):
    """Log-probability of a prompt token, or of a likely token at its position; rank 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, log-probabilities by token id; None for the first one, which nothing precedes."""


class PromptDetails(TypedDict):
    """Number of prompt tokens that were already cached."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Numbers of answer tokens that are reasoning, and of drafted tokens that were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Token counts of prompt and answer, and of drafted tokens, some of which are copied or forced by a grammar."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    accepted_copied_tokens: int
    rejected_copied_tokens: int
    accepted_grammar_tokens: int
    rejected_grammar_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(TypedDict):
    """Token counts, times in ms and rates per second of prompt and answer, under llama.cpp's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


class SpeculationToken(TypedDict):
    """A token, and who proposed it: `drafted_by` is null if it is the target's own. See `runtime.Token`."""

    id: int
    text: str
    from_draft: bool
    drafted_by: Literal["model", "copy", "grammar"] | None
    is_thinking: bool


class SpeculationStatistics(TypedDict):
    """Statistics of the stream so far, with times in seconds: see `runtime.Statistics`."""

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    proposed: int
    accepted: int
    accepted_copied: int
    rejected_copied: int
    accepted_grammar: int
    rejected_grammar: int
    acceptance_rate: float | None
    rows_per_pass: float | None
    generation_tps: float | None
    time_to_first_token: float | None
    elapsed: float


class Speculation(ModelActivity):
    """The chunk's tokens, the statistics so far, and the activity of the models since the last chunk."""

    tokens: list[SpeculationToken]
    statistics: SpeculationStatistics


class _Response(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(TypedDict):
    """Log-probabilities; each list has one item per token, null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of the texts, or the part of it that is new in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(_Response):
    """A response of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]
    timings: NotRequired[Timings]


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
    """The answer, and the reasoning before it if there is any; `content` is null if there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallEntry]]


class ChatChoice(TypedDict):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(_Response):
    """A response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timings: NotRequired[Timings]
    prompt_logprobs: PromptLogprobs | None
