"""Serializers: from a stream's tokens to the response bodies and chunks of `runtime.server.openai.responses`."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from protocol.statistics import Statistics
from runtime.generation.text import Detokenizer
from runtime.server.openai.reasoning import ReasoningSplitter
from runtime.server.openai.requests import ChatRequest, CompletionRequest, Request
from runtime.server.openai.responses import (
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from runtime.server.openai.token_bytes import token_bytes

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runtime.generation.token_reader import Token

# OpenAI's stand-in for minus infinity, which JSON does not have.
_MIN_LOGPROB = -9999.0


class Serializer(ABC):
    """Serializer of the response to one request.

    Attributes:
        id: the response's id; random, so that other clients cannot guess it.
    """

    id_prefix: ClassVar[str]

    def __init__(self, request: Request, model: str, tokenizer: TokenizerWrapper) -> None:
        """For one response.

        Args:
            request: the request.
            model: the model's name.
            tokenizer: the target's.
        """
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        self._num_logprobs = request.num_logprobs
        self._tokenizer = tokenizer
        self._num_reasoning_tokens = 0

    @abstractmethod
    def chunk(self, tokens: Sequence[Token]) -> Chunk:
        """A chunk with the tokens since the last one, possibly none."""

    @abstractmethod
    def finishing(self, chunk: Chunk) -> Chunk:
        """A chunk with the finish reason of another one, and without its text."""

    def chunks(self, tokens: Sequence[Token]) -> list[Chunk]:
        """As `chunk`; at the end of the text two, of which the last has the finish reason and no text.

        Some clients do not look for text where they find a finish reason.
        """
        chunk = self.chunk(tokens)
        if _finish_reason(tokens) is None:
            return [chunk]
        finishing = self.finishing(chunk)
        for choice in chunk["choices"]:
            choice["finish_reason"] = None
        return [chunk, finishing]

    @abstractmethod
    def last_chunk(self, statistics: Statistics) -> Chunk:
        """The chunk after the text, with the usage."""

    @abstractmethod
    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Completion | ChatCompletion:
        """The whole response as one body."""

    def _usage(self, statistics: Statistics) -> Usage:
        return {
            "prompt_tokens": statistics.prompt_tokens,
            "completion_tokens": statistics.generated_tokens,
            "total_tokens": statistics.prompt_tokens + statistics.generated_tokens,
            "proposed_tokens": statistics.proposed,
            "accepted_tokens": statistics.accepted,
            "prompt_tokens_details": {"cached_tokens": statistics.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self._num_reasoning_tokens,
                "accepted_prediction_tokens": statistics.accepted,
                "rejected_prediction_tokens": statistics.rejected,
            },
        }

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


class CompletionSerializer(Serializer):
    """Serializer for `/v1/completions`."""

    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: TokenizerWrapper) -> None:
        """See `Serializer`."""
        super().__init__(request, model, tokenizer)
        # Of the text so far. What may become a stop string is withheld, but counts.
        self._num_characters = 0
        self._detokenizer = Detokenizer(tokenizer)

    def chunk(self, tokens: Sequence[Token]) -> Completion:
        """See `Serializer`."""
        return self._completion([self._choice(tokens)])

    def finishing(self, chunk: Chunk) -> Chunk:
        """See `Serializer`."""
        choices: Any = [{**choice, "text": "", "logprobs": None} for choice in chunk["choices"]]
        return self._completion(choices)

    def last_chunk(self, statistics: Statistics) -> Completion:
        """See `Serializer`."""
        return {**self._completion([]), "usage": self._usage(statistics)}

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Completion:
        """See `Serializer`."""
        return {**self._completion([self._choice(tokens)]), "usage": self._usage(statistics)}

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, tokens: Sequence[Token]) -> CompletionChoice:
        self._num_reasoning_tokens += sum(token.is_thinking for token in tokens)
        return {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": None if self._num_logprobs is None else self._logprobs(tokens),
            "finish_reason": _finish_reason(tokens),
        }

    def _logprobs(self, tokens: Sequence[Token]) -> CompletionLogprobs:
        text_tokens = _text_tokens(tokens)
        offsets = []
        for token in text_tokens:
            offsets.append(self._num_characters)
            self._num_characters += len(self._detokenizer.add(token.id))
        return {
            "tokens": [self._decoded(token.id) for token in text_tokens],
            "token_logprobs": [_finite(token.logprob) for token in text_tokens],
            "top_logprobs": [
                {top.text: _finite(top.logprob) for top in token.top_logprobs[: self._num_logprobs]}
                for token in text_tokens
            ]
            if self._num_logprobs
            else [],
            "text_offset": offsets,
        }


class ChatSerializer(Serializer):
    """Serializer for `/v1/chat/completions`; it separates the reasoning from the answer."""

    id_prefix = "chatcmpl"

    def __init__(
        self, request: ChatRequest, model: str, tokenizer: TokenizerWrapper, reasoning: ReasoningSplitter | None
    ) -> None:
        """See `Serializer`; without a splitter, all text is the answer."""
        super().__init__(request, model, tokenizer)
        self._reasoning = reasoning
        self._is_first = True

    def chunk(self, tokens: Sequence[Token]) -> ChatChunk:
        """See `Serializer`."""
        answer, reasoning = self._split(tokens)
        delta: Delta = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        if answer:
            delta["content"] = answer
        if reasoning:
            delta["reasoning_content"] = reasoning
        choice: ChunkChoice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": _finish_reason(tokens),
        }
        return self._chunk([choice])

    def finishing(self, chunk: Chunk) -> Chunk:
        """See `Serializer`."""
        choices: Any = [{**choice, "delta": {}, "logprobs": None} for choice in chunk["choices"]]
        return self._chunk(choices)

    def last_chunk(self, statistics: Statistics) -> ChatChunk:
        """See `Serializer`."""
        return {**self._chunk([]), "usage": self._usage(statistics)}

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> ChatCompletion:
        """See `Serializer`."""
        answer, reasoning = self._split(tokens)
        message: ChatMessage = {"role": "assistant", "content": answer, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        finish_reason = _finish_reason(tokens)
        assert finish_reason is not None, "the last token of a stream has a finish reason"
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": finish_reason,
                }
            ],
            "usage": self._usage(statistics),
        }

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _split(self, tokens: Sequence[Token]) -> tuple[str, str]:
        """The new text of the answer, and that of the reasoning."""
        text = "".join(token.text for token in tokens)
        if self._reasoning is None:
            return text, ""
        self._num_reasoning_tokens += sum(token.is_thinking for token in tokens)
        return self._reasoning.add(text, is_last=_finish_reason(tokens) is not None)

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if self._num_logprobs is None:
            return None
        content: list[TokenLogprob] = []
        for token in _text_tokens(tokens):
            top = [self._top_logprob(top.id, top.text, top.logprob) for top in token.top_logprobs[: self._num_logprobs]]
            content.append({**self._top_logprob(token.id, self._decoded(token.id), token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _top_logprob(self, id: int, text: str, logprob: float | None) -> TopLogprob:
        return {"token": text, "logprob": _finite(logprob), "bytes": token_bytes(self._tokenizer, id, text)}


def serializer_for(
    request: Request, model: str, tokenizer: TokenizerWrapper, reasoning: ReasoningSplitter | None
) -> Serializer:
    """The serializer of the response to a request.

    Args:
        request: the request.
        model: the model's name.
        tokenizer: the target's.
        reasoning: splits the text of a chat; None where all of the text is the answer. A completion is never split.
    """
    if isinstance(request, ChatRequest):
        return ChatSerializer(request, model, tokenizer, reasoning)
    assert isinstance(request, CompletionRequest)
    return CompletionSerializer(request, model, tokenizer)


def _finish_reason(tokens: Sequence[Token]) -> FinishReason | None:
    return tokens[-1].finish_reason if tokens else None


def _text_tokens(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens without an end-of-text or stop token, which has no text."""
    if tokens and tokens[-1].finish_reason == "stop" and not isinstance(tokens[-1].stop_reason, str):
        return tokens[:-1]
    return tokens


def _finite(logprob: float | None) -> float:
    return _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)
