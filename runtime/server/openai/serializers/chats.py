"""The serializer of `/v1/chat/completions`, and of `/v1/fim/completions`, which answers in the same form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from protocol.statistics import Statistics
from runtime.generation.tool_calls.events import Answer as WholeAnswer
from runtime.generation.tool_calls.events import AnswerEvent, CallArguments, CallBegan, ReasoningPart, TextPart
from runtime.server.answers.api import Answer
from runtime.server.openai.fingerprint import fingerprint
from runtime.server.openai.requests import ChatRequest, FimRequest
from runtime.server.openai.responses import (
    ChatChunk,
    ChatCompletion,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from runtime.server.openai.serializers.chunks import ChunkSerializer, finish_reason
from runtime.server.openai.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token


class ChatSerializer(ChunkSerializer):
    """Serializer for `/v1/chat/completions`; it separates the reasoning from the answer."""

    id_prefix = "chatcmpl"

    def __init__(self, request: ChatRequest | FimRequest, answer: Answer) -> None:
        super().__init__(request, answer)
        self._splitter = answer.splitter
        self._is_first = True
        self._has_functions = request.has_functions

    def chunk(self, tokens: Sequence[Token]) -> ChatChunk:
        parts = self._split(tokens)
        delta: Delta = {}
        if text := "".join(part.text for part in parts if isinstance(part, TextPart)):
            delta["content"] = text
        if reasoning := "".join(part.text for part in parts if isinstance(part, ReasoningPart)):
            delta["reasoning_content"] = reasoning
        if calls := _call_deltas(parts):
            if not self._has_functions:
                delta["tool_calls"] = calls
            elif calls[0]["index"] == 0:
                # The old form has one call.
                delta["function_call"] = calls[0]["function"]
        logprobs = self._logprobs(tokens) if tokens else None
        return self._chunk([self._choice(delta, logprobs, self._chat_finish_reason(tokens))])

    def chunks(self, tokens: Sequence[Token]) -> list[Chunk]:
        """See `ChunkSerializer`; the role comes with the first token, in a chunk of its own as from OpenAI."""
        role: list[Chunk] = []
        if tokens and self._is_first:
            self._is_first = False
            role.append(self._chunk([self._choice({"role": "assistant", "content": ""})]))
        return [*role, *super().chunks(tokens)]

    def has_content(self, chunk: Chunk) -> bool:
        choices: Any = chunk["choices"]
        return any(choice["delta"] or (choice["logprobs"] or {}).get("content") for choice in choices)

    def finishing(self, chunk: Chunk) -> Chunk:
        choices: Any = [{**choice, "delta": {}, "logprobs": None} for choice in chunk["choices"]]
        return self._chunk(choices)

    def last_chunk(self, statistics: Statistics) -> ChatChunk:
        return {**self._chunk([]), "usage": self._usage(statistics)}

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> ChatCompletion:
        tokens = self._shown(tokens)
        answer = WholeAnswer()
        answer.add(self._split(tokens))
        content = None if answer.calls and not answer.content else answer.content
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls and self._has_functions:
            message["function_call"] = {"name": answer.calls[0].name, "arguments": answer.calls[0].arguments}
        elif answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        finish_reason = self._chat_finish_reason(tokens)
        assert finish_reason is not None, "the last token of a stream has a finish reason"
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(),
            "choices": [
                {
                    "index": self._index,
                    "message": message,
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": finish_reason,
                }
            ],
            "usage": self._usage(statistics),
            "prompt_logprobs": self._prompt_logprobs(),
        }

    def _choice(
        self, delta: Delta, logprobs: ChatLogprobs | None = None, finish_reason: ChatFinishReason | None = None
    ) -> ChunkChoice:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        }

    def _split(self, tokens: Sequence[Token]) -> list[AnswerEvent]:
        parts = self._splitter.add(tokens)
        self._num_reasoning_tokens = self._splitter.num_reasoning_tokens
        return parts

    def _chat_finish_reason(self, tokens: Sequence[Token]) -> ChatFinishReason | None:
        reason = finish_reason(tokens)
        if reason != "stop" or not self._splitter.has_calls:
            return reason
        return "function_call" if self._has_functions else "tool_calls"

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if self._num_logprobs is None:
            return None
        return {"content": TokenLogprobs(self._tokenizer, self._num_logprobs).of(tokens), "refusal": None}


def _call_deltas(parts: Sequence[AnswerEvent]) -> list[ToolCallDelta]:
    """What parts add to calls: an entry for each call."""
    deltas: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, CallBegan):
            function: FunctionDelta = {"name": part.name, "arguments": ""}
            deltas[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            delta = deltas.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += part.text
    return list(deltas.values())
