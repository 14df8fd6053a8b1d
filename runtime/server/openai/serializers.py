"""Completions and chats in OpenAI's format, with extensions of our own: their bodies and chunks, made from tokens."""

from __future__ import annotations

import importlib.metadata
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired

import attrs
from typing_extensions import TypedDict

from protocol.scores import ScoredToken
from protocol.statistics import Statistics
from runtime.generation.text import Detokenizer
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Answer, Delta, ToolCall
from runtime.server.answers.api import (
    BegunAnswer,
    Choice,
    Echo,
    EndReason,
    Serializer,
    ServerSentEvent,
    TokenLogprob,
    end_reason,
    finite,
    text_tokens,
    token_logprobs,
    tokens_among,
)
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests import OpenAIBody, StreamOptions
from runtime.server.timelines import ModelActivity, Timeline

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


class TextCompletion(_Response):
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


# The server's version. The text of a seed may depend on it, as on the model.
_FINGERPRINT = f"outrider-{importlib.metadata.version('outrider')}"


class ChunkSerializer(Serializer):
    """Serializer of OpenAI's bodies and chunks: the part that chats and completions share."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, body: OpenAIBody, answer: BegunAnswer) -> None:
        super().__init__(answer)
        first = answer.first
        assert first is None or isinstance(first, ChunkSerializer), "the choices of a response are alike"
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}" if first is None else first.id
        self._created: int = int(time.time()) if first is None else first._created
        self._request = answer.request
        self._options = options = body.stream_options or StreamOptions()
        self._gives_usage_in_each = options.continuous_usage_stats and options.include_usage is not False
        # Of the prompt: all tokens but the first, which nothing precedes.
        self._scored: Sequence[ScoredToken] = () if answer.score is None else answer.score.tokens
        self._num_given = 0
        self._num_reasoning_tokens = 0
        self._timeline = answer.watch(self.id) if answer.watch and options.include_speculation else None
        if self._timeline is not None:
            self.interval_s = 0.25

    # --- events and bodies ------------------------------------------------------------------------

    def first_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        """See `Serializer`: none before the first token, except with `include_speculation`."""
        return self.idle_events(statistics)

    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[ServerSentEvent]:
        chunks = self._chunks(self._shown(tokens))
        tokens = tokens_among(tokens)
        self._num_given += len(tokens)
        # The stream may be ahead of what the client has read.
        given = attrs.evolve(statistics, generated_tokens=self._num_given)
        for i, chunk in enumerate(chunks):
            if self._gives_usage_in_each:
                chunk["usage"] = self._usage(given)
            if chunk["choices"][0]["finish_reason"] is not None and not self._options.include_usage:
                chunk |= self._timings(given)
            if self._timeline is not None:
                # The tokens belong to the first chunk; one that only ends the text has none.
                chunk["speculation"] = _speculation([] if i else tokens, statistics, self._timeline)
        return [ServerSentEvent(chunk) for chunk in chunks]

    def idle_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        """See `Serializer`: with `include_speculation`, what the models do."""
        return () if self._timeline is None else self.events([], statistics)

    def last_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        chunk = {**self._chunk([]), "usage": self._usage(statistics), **self._timings(statistics)}
        return [*([ServerSentEvent(chunk)] if self._options.include_usage else []), ServerSentEvent("[DONE]")]

    def error_events(self, error: ErrorResponse) -> Sequence[ServerSentEvent]:
        return [ServerSentEvent(error.body())]  # alone, without [DONE]

    def whole_of(self, choices: Sequence[Choice]) -> Mapping[str, Any]:
        bodies = [choice.serializer.whole(choice.tokens, choice.statistics()) for choice in choices]
        given = [entry for body in bodies for entry in body["choices"]]
        return {
            **bodies[0],
            "choices": [{**entry, "index": index} for index, entry in enumerate(given)],
            "usage": _added([body["usage"] for body in bodies]),
        }

    def last_events_of(self, choices: Sequence[Choice]) -> Sequence[ServerSentEvent]:
        events = []
        for alike in zip(*(each.serializer.last_events(each.statistics()) for each in choices), strict=True):
            data = alike[0].data
            if not isinstance(data, str):
                data = {**data, "usage": _added([event.data["usage"] for event in alike])}
            events.append(ServerSentEvent(data))
        return events

    def _chunks(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """The chunks with the tokens since the last one; there may be no tokens, and no chunk without anything in it.

        At the end of the text, the finish reason comes in a chunk of its own, after any content: some clients do not
        look for text where they find a finish reason.
        """
        choice, empty, has_content = self._choice(tokens)
        says_more = self._timeline is not None or self._gives_usage_in_each
        if choice["finish_reason"] is None:
            return [self._chunk([choice])] if says_more or has_content else []
        content = [self._chunk([{**choice, "finish_reason": None}])] if has_content else []
        return [*content, self._chunk([{**choice, **empty}])]

    @abstractmethod
    def _choice(self, tokens: Sequence[Token]) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
        """The choice of a chunk; the fields to replace if it only ends the text; whether it has more than the end."""

    def _chunk(self, choices: Sequence[Mapping[str, Any]], kind: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind or self.kind,
            "created": self._created,
            "model": self._answer.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }

    # --- fields -----------------------------------------------------------------------------------

    def _usage(self, statistics: Statistics) -> Usage:
        counts_prompt = self._answer.counts_prompt
        num_prompt_tokens = statistics.prompt_tokens if counts_prompt else 0
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": statistics.generated_tokens,
            "total_tokens": num_prompt_tokens + statistics.generated_tokens,
            "proposed_tokens": statistics.proposed,
            "accepted_tokens": statistics.accepted,
            "accepted_copied_tokens": statistics.accepted_copied,
            "rejected_copied_tokens": statistics.rejected_copied,
            "accepted_grammar_tokens": statistics.accepted_grammar,
            "rejected_grammar_tokens": statistics.rejected_grammar,
            "prompt_tokens_details": {"cached_tokens": statistics.cached_tokens if counts_prompt else 0},
            "completion_tokens_details": {
                "reasoning_tokens": self._num_reasoning_tokens,
                "accepted_prediction_tokens": statistics.accepted,
                "rejected_prediction_tokens": statistics.rejected,
            },
        }

    def _timings(self, s: Statistics) -> dict[str, Timings]:
        """The field `timings`; left out if several texts are generated, as their rates do not add up.

        Of the prompt, the tokens that were not cached count. Their time is that of the prefill: without waiting for the
        models, and without the last token, which the first round reads. If only that one was read, it is the time to
        the first token. The answer's time begins with its first token. Its rate leaves out the tokens that came with
        that one, as `Statistics.generation_tps` does, and is 0 before a second round.
        """
        if self._request.num_answers > 1:
            return {}
        num_prompt, num_predicted = s.prompt_tokens - s.cached_tokens, s.generated_tokens
        prompt_ms = 1e3 * (s.prefilled_tokens / s.prompt_tps if s.prompt_tps else s.time_to_first_token or 0.0)
        predicted_ms = 0.0 if s.time_to_first_token is None else 1e3 * (s.elapsed - s.time_to_first_token)
        told: Timings = {
            "cache_n": s.cached_tokens,
            "prompt_n": num_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / num_prompt if num_prompt else 0.0,
            "prompt_per_second": 1e3 * num_prompt / prompt_ms if prompt_ms else 0.0,
            "predicted_n": num_predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / num_predicted if num_predicted else 0.0,
            "predicted_per_second": s.generation_tps or 0.0,
        }
        if s.proposed:
            told |= {"draft_n": s.proposed, "draft_n_accepted": s.accepted}
        return {"timings": told}

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        if (num_top := self._request.num_prompt_logprobs) is None:
            return None

        def entry(token: Any, rank: int, text: str) -> dict[str, PromptLogprob]:
            return {str(token.id): {"logprob": finite(token.logprob), "rank": rank, "decoded_token": text}}

        entries: PromptLogprobs = [None]
        for token in self._scored:
            by_id = entry(token, token.rank, self._decoded(token.id))
            for rank, top in enumerate(token.top_logprobs[:num_top], start=1):
                by_id |= entry(top, rank, top.text)
            entries.append(by_id)
        return entries

    def _decoded(self, token: int) -> str:
        text: str = self._answer.tokenizer.decode([token])
        return text


def _speculation(tokens: Iterable[Token], statistics: Statistics, timeline: Timeline) -> Speculation:
    def fields(kind: type, source: object) -> Any:
        return {name: getattr(source, name) for name in kind.__annotations__}

    told: list[Any] = [fields(SpeculationToken, token) for token in tokens]
    return {"tokens": told, "statistics": fields(SpeculationStatistics, statistics), **timeline.new_activity()}


def _added(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], Mapping):
        return {name: _added([each[name] for each in counts]) for name in counts[0]}
    return sum(counts)


class ChatSerializer(ChunkSerializer):
    """Serializer for `/v1/chat/completions`; it separates the reasoning from the answer."""

    id_prefix = "chatcmpl"
    kind = "chat.completion.chunk"

    def __init__(self, body: OpenAIBody, answer: BegunAnswer) -> None:
        super().__init__(body, answer)
        self._is_first = True

    def _chunks(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """See `ChunkSerializer`; the role comes with the first token, in a chunk of its own as from OpenAI."""
        role = []
        if tokens and self._is_first:
            self._is_first = False
            delta = {"role": "assistant", "content": ""}
            choice = {"index": self._answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
            role.append(self._chunk([choice]))
        return [*role, *super()._chunks(tokens)]

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        tokens = self._shown(tokens)
        answer = Answer()
        answer.add(self._split(tokens))
        called = [*answer.calls, *([] if answer.cut_call is None else [answer.cut_call])]
        content = None if called and not answer.content else answer.content
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if called:
            calls: Any = [call.message_part for call in called]
            message["tool_calls"] = calls
        finish_reason = self._finish_reason(tokens)
        assert finish_reason is not None, "the last token of a stream has a finish reason"
        choice: ChatChoice = {
            "index": self._answer.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        return {
            **self._chunk([choice], "chat.completion"),
            "usage": self._usage(statistics),
            **self._timings(statistics),
            "prompt_logprobs": self._prompt_logprobs(),
        }

    def _choice(self, tokens: Sequence[Token]) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in self._split(tokens):
            match part:
                case Delta("content", text):
                    delta["content"] = delta.get("content", "") + text
                case Delta("reasoning", text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case Delta("call_began", index=int() as index, call=ToolCall(id, name)):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id, "type": "function", "function": function}
                case Delta("call_arguments", text, index=int() as index):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = list(calls.values())
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {
            "index": self._answer.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(tokens),
        }
        has_content = bool(delta or (logprobs and logprobs["content"]))
        return choice, {"delta": {}, "logprobs": None}, has_content

    def _split(self, tokens: Sequence[Token]) -> list[Delta]:
        parts = self._answer.splitter.add(tokens)
        self._num_reasoning_tokens = self._answer.splitter.num_reasoning_tokens
        return parts

    def _finish_reason(self, tokens: Sequence[Token]) -> ChatFinishReason | None:
        reason = end_reason(tokens[-1]) if tokens else None
        return "tool_calls" if reason == "stop" and self._answer.splitter.has_calls else reason

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        content = token_logprobs(tokens, self._answer.tokenizer, self._request.num_logprobs)
        return None if content is None else {"content": content, "refusal": None}


class CompletionSerializer(ChunkSerializer):
    """Serializer for `/v1/completions`."""

    id_prefix = "cmpl"
    kind = "text_completion"

    def __init__(self, body: OpenAIBody, answer: BegunAnswer) -> None:
        super().__init__(body, answer)
        self._echo = answer.echo  # None once it was given
        # Length of the text so far, including text that is withheld because it may become a stop string.
        self._num_characters = 0 if answer.echo is None else len(answer.echo.text)
        self._detokenizer = Detokenizer(answer.tokenizer, answer.prompt)

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        choice = {**self._choice(self._shown(tokens))[0], "prompt_logprobs": self._prompt_logprobs()}
        return {**self._chunk([choice]), "usage": self._usage(statistics), **self._timings(statistics)}

    def _choice(self, tokens: Sequence[Token]) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
        self._num_reasoning_tokens += sum(token.is_thinking for token in tokens)
        echo, self._echo = self._echo, None
        text = ("" if echo is None else echo.text) + "".join(token.text for token in tokens)
        logprobs = None if self._request.num_logprobs is None else self._logprobs(echo, tokens)
        choice: CompletionChoice = {
            "index": self._answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end_reason(tokens[-1]) if tokens else None,
        }
        return choice, {"text": "", "logprobs": None}, bool(text or (logprobs and logprobs["tokens"]))

    def _logprobs(self, echo: Echo | None, tokens: Sequence[Token]) -> CompletionLogprobs:
        logprobs: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo is not None:
            own = [finite(token.logprob) for token in self._scored]
            tops = (token.top_logprobs for token in self._scored)
            logprobs = {
                "tokens": list(echo.tokens),
                "token_logprobs": [None, *own],
                "top_logprobs": [None, *map(self._by_text, echo.tokens[1:], own, tops)],
                "text_offset": list(echo.offsets),
            }
        # With an echo, clients tell the prompt's tokens from the answer's by counting: none is left out.
        for token in tokens_among(tokens) if self._answer.echo is not None else text_tokens(tokens):
            text, logprob = self._decoded(token.id), finite(token.logprob)
            logprobs["text_offset"].append(self._num_characters)
            piece = self._detokenizer.add(token.id)
            self._num_characters += len(self._shown.without_special(token.id, piece))
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append(self._by_text(text, logprob, token.top_logprobs))
        return logprobs

    def _by_text(self, text: str, logprob: float, top_logprobs: Sequence[Any]) -> dict[str, float]:
        """The log-probabilities of a token and of the likeliest ones; of those with the same text, the highest."""
        best = reversed(top_logprobs[: self._request.num_logprobs])
        return {text: logprob} | {top.text: finite(top.logprob) for top in best}
