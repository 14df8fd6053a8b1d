"""What the serializers of chats and completions share: chunks, their order, and the usage."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

from protocol.statistics import Statistics
from runtime.server.answers.api import Answer
from runtime.server.answers.serializer import Event, Serializer
from runtime.server.answers.shown_tokens import ShownTokens
from runtime.server.errors import ErrorResponse
from runtime.server.openai.prompt_logprobs import PromptLogprobs, prompt_logprobs
from runtime.server.openai.requests import Request
from runtime.server.openai.responses import Chunk, FinishReason, Usage
from runtime.server.openai.speculation import INTERVAL_S, speculation

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token


class ChunkSerializer(Serializer):
    """Serializer of OpenAI's bodies and chunks."""

    id_prefix: ClassVar[str]

    def __init__(self, request: Request, answer: Answer) -> None:
        """For one response.

        Args:
            request: the request.
            answer: its generation.
        """
        first = answer.first
        assert first is None or isinstance(first, ChunkSerializer), "the choices of a response are alike"
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}" if first is None else first.id
        self._created: int = int(time.time()) if first is None else first._created
        self._index = answer.index
        self._counts_prompt = answer.counts_prompt
        self._model = answer.model
        self._has_usage = request.usage
        self._has_continuous_usage = request.continuous_usage
        self._shown = ShownTokens(request, answer.tokenizer)
        self._num_logprobs = request.num_logprobs
        self._num_prompt_logprobs, self._score = request.prompt_logprobs, answer.score
        self._num_given = 0
        self._tokenizer = answer.tokenizer
        self._timeline = answer.watch(self.id) if request.stream and request.speculation else None
        if self._timeline is not None:
            self.interval_s = INTERVAL_S
        self._num_reasoning_tokens = 0

    def first_events(self, statistics: Statistics) -> Sequence[Event]:
        """See `Serializer`: none before the first token, except for who watches."""
        return self.idle_events(statistics)

    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[Event]:
        chunks = self.chunks(self._shown(tokens))
        self._num_given += len(tokens)
        for i, chunk in enumerate(chunks):
            if self._has_continuous_usage:
                # The stream may be ahead of what the client has read.
                chunk["usage"] = self._usage(attrs.evolve(statistics, generated_tokens=self._num_given))
            if self._timeline is not None:
                # The tokens came with the first; a chunk that only ends the text has none.
                chunk["speculation"] = speculation([] if i else tokens, statistics, self._timeline)
        return [Event(chunk) for chunk in chunks]

    def idle_events(self, statistics: Statistics) -> Sequence[Event]:
        """See `Serializer`: who watches hears what the models do."""
        return () if self._timeline is None else self.events([], statistics)

    def last_events(self, statistics: Statistics) -> Sequence[Event]:
        usage = [Event(self.last_chunk(statistics))] if self._has_usage else []
        return [*usage, Event("[DONE]")]

    def error_events(self, error: ErrorResponse, statistics: Statistics) -> Sequence[Event]:
        """See `Serializer`: the error alone, without [DONE]."""
        return [Event(error.body())]

    @abstractmethod
    def chunk(self, tokens: Sequence[Token]) -> Chunk:
        """A chunk with the tokens since the last one, possibly none."""

    @abstractmethod
    def has_content(self, chunk: Chunk) -> bool:
        """Whether a chunk has anything beside a finish reason."""

    @abstractmethod
    def finishing(self, chunk: Chunk) -> Chunk:
        """A chunk with the finish reason of another one, and without its text."""

    def chunks(self, tokens: Sequence[Token]) -> list[Chunk]:
        """As `chunk`; at the end of the text the finish reason comes in a chunk of its own, after the content if any.

        Some clients do not look for text where they find a finish reason.
        """
        chunk = self.chunk(tokens)
        if all(choice["finish_reason"] is None for choice in chunk["choices"]):
            return [chunk]
        if not self.has_content(chunk):
            return [self.finishing(chunk)]
        finishing = self.finishing(chunk)
        for choice in chunk["choices"]:
            choice["finish_reason"] = None
        return [chunk, finishing]

    @abstractmethod
    def last_chunk(self, statistics: Statistics) -> Chunk:
        """The chunk after the text, with the usage."""

    def _usage(self, statistics: Statistics) -> Usage:
        num_prompt_tokens = statistics.prompt_tokens if self._counts_prompt else 0
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": statistics.generated_tokens,
            "total_tokens": num_prompt_tokens + statistics.generated_tokens,
            "proposed_tokens": statistics.proposed,
            "accepted_tokens": statistics.accepted,
            "prompt_tokens_details": {"cached_tokens": statistics.cached_tokens if self._counts_prompt else 0},
            "completion_tokens_details": {
                "reasoning_tokens": self._num_reasoning_tokens,
                "accepted_prediction_tokens": statistics.accepted,
                "rejected_prediction_tokens": statistics.rejected,
            },
        }

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        if (num_top := self._num_prompt_logprobs) is None:
            return None
        return prompt_logprobs(self._score, num_top, self._decoded)

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


def finish_reason(tokens: Sequence[Token]) -> FinishReason | None:
    """Why the text ended, if the last of these tokens has ended it."""
    return tokens[-1].finish_reason if tokens else None
