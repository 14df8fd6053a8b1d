"""Writes answers: from a stream's tokens to bodies and chunks, as plain dictionaries.

The types in `runtime.server.openai.responses` describe them; instances of these would be made for every round of every
stream.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from protocol.statistics import Statistics
from runtime.server.openai.reasoning import ReasoningSplitter
from runtime.server.openai.requests import ChatRequest, CompletionRequest, Request

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runtime.generation.token_reader import Token

# What stands for minus infinity, which JSON does not have.
IMPOSSIBLE = -9999.0


class Serializer(ABC):
    """Writes the answer to one request.

    Attributes:
        id: of the answer; nobody can guess it.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    kind_of_chunk: ClassVar[str]

    def __init__(self, request: Request, model: str, tokenizer: TokenizerWrapper) -> None:
        """For one answer.

        Args:
            request: what was asked.
            model: its name.
            tokenizer: the target's.
        """
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._head = {"created": int(time.time()), "model": model}
        self._num_logprobs = request.num_logprobs
        self._tokenizer = tokenizer
        self._num_thinking = 0
        self._num_characters = 0  # written

    def chunk(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """A chunk for what has come since the last; maybe for nothing."""
        return self._headed(self.kind_of_chunk, [self._choice(tokens)])

    def last_chunk(self, statistics: Statistics) -> dict[str, Any]:
        """The chunk that comes after the text, with the usage."""
        return {**self._headed(self.kind_of_chunk, []), "usage": self.usage(statistics)}

    @abstractmethod
    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> dict[str, Any]:
        """The answer as one body."""

    def usage(self, statistics: Statistics) -> dict[str, Any]:
        """What the answer took; see `Usage`."""
        return {
            "prompt_tokens": statistics.prompt_tokens,
            "completion_tokens": statistics.generated_tokens,
            "total_tokens": statistics.prompt_tokens + statistics.generated_tokens,
            "proposed_tokens": statistics.proposed,
            "accepted_tokens": statistics.accepted,
            "prompt_tokens_details": {"cached_tokens": statistics.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self._num_thinking,
                "accepted_prediction_tokens": statistics.accepted,
                "rejected_prediction_tokens": statistics.rejected,
            },
        }

    def _headed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._head, "choices": choices}

    @abstractmethod
    def _choice(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """A chunk's part for some tokens."""

    def _readable(self, tokens: Sequence[Token]) -> list[Token]:
        """The tokens without the one that ends the text and is none."""
        if tokens and tokens[-1].finish_reason == "stop" and not isinstance(tokens[-1].stop_reason, str):
            return list(tokens[:-1])
        return list(tokens)

    def _said(self, token: int) -> str:
        said: str = self._tokenizer.decode([token])
        return said


class CompletionSerializer(Serializer):
    """Writes a text."""

    prefix = "cmpl"
    kind = kind_of_chunk = "text_completion"

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> dict[str, Any]:
        """See `Serializer`."""
        return {**self._headed(self.kind, [self._choice(tokens)]), "usage": self.usage(statistics)}

    def _choice(self, tokens: Sequence[Token]) -> dict[str, Any]:
        logprobs = None if self._num_logprobs is None else self._logprobs(tokens)
        text = "".join(token.text for token in tokens)
        self._num_thinking += sum(token.is_thinking for token in tokens)
        finish_reason = tokens[-1].finish_reason if tokens else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        readable = self._readable(tokens)
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters)
            self._num_characters += len(token.text)
        return {
            "tokens": [self._said(token.id) for token in readable],
            "token_logprobs": [_finite(token.logprob) for token in readable],
            "top_logprobs": [
                {top.text: _finite(top.logprob) for top in token.top_logprobs[: self._num_logprobs]}
                for token in readable
            ]
            if self._num_logprobs
            else None,
            "text_offset": offsets[: len(readable)],
        }


class ChatSerializer(Serializer):
    """Writes an assistant's message, its thoughts apart."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"

    def __init__(
        self,
        request: Request,
        model: str,
        tokenizer: TokenizerWrapper,
        *,
        tags: tuple[str, str] = ("", ""),
        is_thinking: bool = False,
    ) -> None:
        """See `Serializer`; and what opens and closes thoughts, and whether the answer begins within one."""
        super().__init__(request, model, tokenizer)
        self._thoughts = ReasoningSplitter(tags, is_thinking=is_thinking) if all(tags) else None
        self._is_first = True

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> dict[str, Any]:
        """See `Serializer`."""
        said, thought = self._apart(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": tokens[-1].finish_reason,
        }
        return {**self._headed(self.kind, [choice]), "usage": self.usage(statistics)}

    def _choice(self, tokens: Sequence[Token]) -> dict[str, Any]:
        said, thought = self._apart(tokens)
        delta = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        if said:
            delta["content"] = said
        if thought:
            delta["reasoning_content"] = thought
        finish_reason = tokens[-1].finish_reason if tokens else None
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _apart(self, tokens: Sequence[Token]) -> tuple[str, str]:
        """What the tokens say, and what they think."""
        text = "".join(token.text for token in tokens)
        if self._thoughts is None:
            return text, ""
        self._num_thinking += sum(token.is_thinking for token in tokens)
        return self._thoughts.add(text, is_last=bool(tokens) and tokens[-1].finish_reason is not None)

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        content = []
        for token in self._readable(tokens):
            top = [_named(top.text, top.logprob) for top in token.top_logprobs[: self._num_logprobs]]
            content.append({**_named(self._said(token.id), token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    # Of a part of a character, only that it is one can be told.
    is_whole = "\ufffd" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


def _finite(logprob: float | None) -> float:
    return IMPOSSIBLE if logprob is None else max(logprob, IMPOSSIBLE)


def serializer_for(request: Request, model: str, tokenizer: TokenizerWrapper, **thinking: Any) -> Serializer:
    """What writes the answer to a request; thinking is told apart in chats."""
    if isinstance(request, ChatRequest):
        return ChatSerializer(request, model, tokenizer, **thinking)
    assert isinstance(request, CompletionRequest)
    return CompletionSerializer(request, model, tokenizer)
