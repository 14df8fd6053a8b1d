"""The serializer of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from protocol.statistics import Statistics
from runtime.generation.text import Detokenizer
from runtime.server.answers.api import Answer
from runtime.server.answers.serializer import Event
from runtime.server.openai.fingerprint import fingerprint
from runtime.server.openai.requests import CompletionRequest
from runtime.server.openai.responses import Chunk, Completion, CompletionChoice, CompletionLogprobs
from runtime.server.openai.serializers.chunks import ChunkSerializer, finish_reason
from runtime.server.openai.serializers.echo import Echo
from runtime.server.openai.token_logprobs import finite, text_tokens

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token


class CompletionSerializer(ChunkSerializer):
    """Serializer for `/v1/completions`."""

    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, answer: Answer) -> None:
        super().__init__(request, answer)
        self._echo, self._has_echo = answer.echo, answer.echo is not None  # the echo until it was given
        self._is_empty = answer.is_empty
        # Of the text so far. What may become a stop string is withheld, but counts.
        self._num_characters = 0 if answer.echo is None else len(answer.echo.text)
        self._detokenizer = Detokenizer(answer.tokenizer)
        for id in () if answer.echo is None else answer.echo.last_ids:
            self._detokenizer.add(id)

    def first_events(self, statistics: Statistics) -> Sequence[Event]:
        """See `ChunkSerializer`; everything, where nothing is to be generated."""
        return self.events([], statistics) if self._is_empty else super().first_events(statistics)

    def chunk(self, tokens: Sequence[Token]) -> Completion:
        return self._completion([self._choice(tokens)])

    def has_content(self, chunk: Chunk) -> bool:
        choices: Any = chunk["choices"]
        return any(choice["text"] or (choice["logprobs"] or {}).get("tokens") for choice in choices)

    def finishing(self, chunk: Chunk) -> Chunk:
        choices: Any = [{**choice, "text": "", "logprobs": None} for choice in chunk["choices"]]
        return self._completion(choices)

    def last_chunk(self, statistics: Statistics) -> Completion:
        return {**self._completion([]), "usage": self._usage(statistics)}

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Completion:
        tokens = self._shown(tokens)
        choice: CompletionChoice = {**self._choice(tokens), "prompt_logprobs": self._prompt_logprobs()}
        return {**self._completion([choice]), "usage": self._usage(statistics)}

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        }

    def _choice(self, tokens: Sequence[Token]) -> CompletionChoice:
        self._num_reasoning_tokens += sum(token.is_thinking for token in tokens)
        echo, self._echo = self._echo, None
        return {
            "index": self._index,
            "text": ("" if echo is None else echo.text) + "".join(token.text for token in tokens),
            "logprobs": None if self._num_logprobs is None else self._logprobs(echo, tokens),
            "finish_reason": "length" if self._is_empty else finish_reason(tokens),
        }

    def _logprobs(self, echo: Echo | None, tokens: Sequence[Token]) -> CompletionLogprobs:
        # With an echo, clients tell the prompt's tokens from the answer's by counting: none is left out.
        told = tokens if self._has_echo else text_tokens(tokens)
        logprobs = self._empty_logprobs() if echo is None else self._echoed_logprobs(echo)
        for token in told:
            text, logprob = self._decoded(token.id), finite(token.logprob)
            logprobs["text_offset"].append(self._num_characters)
            piece = self._detokenizer.add(token.id)
            self._num_characters += len(self._shown.without_special(token.id, piece))
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append(self._by_text(text, logprob, token.top_logprobs))
        return logprobs

    def _empty_logprobs(self) -> CompletionLogprobs:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _echoed_logprobs(self, echo: Echo) -> CompletionLogprobs:
        """The log-probabilities of a prompt; nothing precedes its first token."""
        scored = () if self._score is None else self._score.tokens
        own = [finite(token.logprob) for token in scored]
        tops = (token.top_logprobs for token in scored)
        return {
            "tokens": list(echo.tokens),
            "token_logprobs": [None, *own],
            "top_logprobs": [None, *map(self._by_text, echo.tokens[1:], own, tops)],
            "text_offset": list(echo.offsets),
        }

    def _by_text(self, text: str, logprob: float, top_logprobs: Sequence[Any]) -> dict[str, float]:
        """The log-probabilities of a token and of the likeliest ones; of those with the same text, the highest."""
        best = reversed(top_logprobs[: self._num_logprobs])
        return {text: logprob} | {top.text: finite(top.logprob) for top in best}
