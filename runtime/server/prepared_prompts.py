"""Prepared prompts: the prompts of a request as token ids, with the settings of their generations."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import PromptTooLongError
from protocol.randomness import seed_of_text
from protocol.scores import Score
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import check_prompt_length
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat, call_format
from runtime.generation.tool_calls.call_grammar import call_grammar
from runtime.generation.tool_calls.tools import Tools, check_callable
from runtime.server.answers.parts import AnswerSplitter
from runtime.server.errors import ErrorResponse
from runtime.server.fair_threads import FairThreads
from runtime.server.grammars.constraint import Constraint
from runtime.server.models.loaded_model import LoadedModel
from runtime.server.openai.choices import check_size
from runtime.server.openai.min_tokens import min_tokens
from runtime.server.openai.prompts import Encoded, encode_all, encode_prediction, encoding_length, tokenizer_of
from runtime.server.openai.requests import ChatRequest, CompletionRequest, Request
from runtime.server.openai.serializers.echo import Echo, make_echo

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runtime.generation.grammar import Grammar
    from runtime.generation.token_stream import TokenStream


@attrs.frozen
class PreparedPrompt:
    """One prompt of a request.

    Attributes:
        ids: its token ids.
        settings: of its generations; `max_tokens` may be 0, and then there is none.
        echo: of the prompt, if the response begins with it.
        score: of its tokens but the first, if the response has their log-probabilities and there are any.
    """

    ids: tuple[int, ...]
    settings: dict[str, Any]
    echo: Echo | None = None
    score: Score | None = None

    @property
    def is_generated_for(self) -> bool:
        """Whether anything is generated."""
        return bool(self.settings["max_tokens"] != 0)

    def settings_of_text(self, number: int) -> dict[str, Any]:
        """The settings of one of several texts, the first of which is that of a request for one."""
        seed = self.settings.get("seed")
        return self.settings if seed is None else {**self.settings, "seed": seed_of_text(seed, number)}


@attrs.frozen
class PromptPreparation:
    """Prepares the prompts of one request.

    Attributes:
        model: the request's.
        request: the request.
        tools: of the request.
        client: the client's address; clients take turns at long prompts and at schemas.
        threads: tokenise prompts.
        max_prompt_tokens: of each prompt; None for the context's length.
        settings: of all prompts, among them `max_tokens`; the request's own replace them.
    """

    model: LoadedModel
    request: Request
    tools: Tools | None
    client: str
    threads: FairThreads
    max_prompt_tokens: int | None
    settings: dict[str, Any]

    async def prompts(self) -> list[PreparedPrompt]:
        """The prompts, at least one; those whose log-probabilities are wanted have been scored.

        Raises:
            OutriderError: a setting or a prompt is invalid, or the target has failed.
            ErrorResponse: a prompt or what may be answered is too long, or the JSON schema cannot be compiled.
        """
        encoded, grammar = await self._encoded_and_grammar()
        settings, ends = await self._settings_and_ends(encoded, grammar)
        # No answer is longer than the context.
        bounds = [self.model.runtime.context_length, settings["max_tokens"]]
        most = min((bound for bound in bounds if bound is not None), default=0)
        check_size(self.request, list(map(len, encoded.prompts)), most)
        prepared = []
        for index, ids in enumerate(encoded.prompts):
            await trio.lowlevel.checkpoint()
            own = self._with_min_tokens(settings, len(ids), ends)
            echo, score = await self._echo(index, ids), await self._score(ids, settings)
            prepared.append(PreparedPrompt(ids, own, echo, score))
        return prepared

    async def _settings_and_ends(self, encoded: Encoded, grammar: Grammar | None) -> tuple[dict[str, Any], set[int]]:
        """The settings of all prompts, without `min_tokens`, and the ids of the tokens that end their answers.

        Raises: SettingsError: one is invalid.
        """
        request, tokenizer = self.request, tokenizer_of(self.model.runtime)
        settings = {**self.settings, **request.settings()}
        if encoded.logit_bias:
            settings["logit_bias"] = encoded.logit_bias
        if predicted := request.predicted_text:
            encode_ahead = partial(encode_prediction, predicted, tokenizer)
            settings["prediction"] = await self.threads.run(encode_ahead, len(predicted), self.client)
        if grammar is not None:
            settings["logits_processors"] = [grammar]
        # Before any model work. What the request does not say, the server may have a default for.
        whole = self.model.runtime.check_settings({**settings, "max_tokens": settings["max_tokens"] or None})
        settings["seed"] = whole.seed
        if whole.ignore_eos:
            return settings, set(whole.stop_tokens)
        if encoded.ends:
            settings["stop_tokens"] = [*whole.stop_tokens, *encoded.ends]
        return settings, {*whole.stop_tokens, *encoded.ends, *tokenizer.eos_token_ids}

    def _with_min_tokens(self, settings: dict[str, Any], num_prompt_tokens: int, ends: set[int]) -> dict[str, Any]:
        """The settings of a prompt, whose answers have `min_tokens` before one of `ends`."""
        if not self.request.min_tokens:
            return settings
        processor = min_tokens(num_prompt_tokens + self.request.min_tokens, ends)
        return {**settings, "logits_processors": [*settings.get("logits_processors", ()), processor]}

    def _check_lengths(self, prompts: list[tuple[int, ...]]) -> None:
        """Raises: PromptTooLongError: a prompt fills the context."""
        if (context_length := self.model.runtime.context_length) is None:
            return
        for index, ids in enumerate(prompts):
            try:
                check_prompt_length(len(ids), context_length)
            except PromptTooLongError as error:
                raise PromptTooLongError(f"{_named(index, prompts)}{error}") from error

    async def _echo(self, index: int, ids: tuple[int, ...]) -> Echo | None:
        """The echo of a prompt, if the request asks for it."""
        request, tokenizer = self.request, tokenizer_of(self.model.runtime)
        if not isinstance(request, CompletionRequest) or not request.echo:
            return None
        prompt = request.prompts[index]
        make = partial(make_echo, prompt if isinstance(prompt, str) else None, ids, tokenizer)
        return await self.threads.run(make, len(ids), self.client)

    async def _score(self, ids: tuple[int, ...], settings: dict[str, Any]) -> Score | None:
        """The score of a prompt, if the request asks for it."""
        if (num_top := self.request.num_scored) is None or len(ids) == 1:
            return None
        reading = {name: settings[name] for name in ("reuse_prefix", "prefill_step_size")}
        return await self.model.runtime.score(ids[:1], ids[1:], logprobs=num_top, **reading)

    async def _encoded_and_grammar(self) -> tuple[Encoded, Grammar | None]:
        """What the tokenizer makes of the request, and what holds the answers to a schema or to tools."""
        constraint, model, tools = self.request.constraint, self.model, self.tools
        tokenizer = tokenizer_of(model.runtime)
        format = None if tools is None else check_callable(tools, tokenizer)
        if tools is None or format is None:
            # First, as it may turn out invalid.
            grammar = None if constraint is None else await model.schemas.grammar(constraint, self.client)
            return await self._encoded(), grammar
        if constraint is not None and constraint.kind != "json":
            raise ErrorResponse(
                400,
                f"{constraint.field} cannot go together with tools, unless it is a JSON schema; leave one out",
                param=constraint.field,
            )
        encoded = await self._encoded()
        (prompt,) = encoded.prompts  # of a chat
        if constraint is None and not tools.needs_grammar:
            return encoded, None
        write = partial(_call_grammar, tools, format, tokenizer, prompt, constraint)
        is_strict = constraint is not None or tools.is_strict
        return encoded, await model.schemas.grammar_of_calls(write, self.client, is_strict=is_strict)

    async def _encoded(self) -> Encoded:
        """What the tokenizer makes of the request.

        Raises:
            OutriderError: a prompt is invalid.
            ErrorResponse: a prompt is too long, or see `encode_all`.
        """
        encode = partial(encode_all, self.request, self.model)
        encoded = await self.threads.run(encode, encoding_length(self.request), self.client)
        limit, lengths = self.max_prompt_tokens, list(map(len, encoded.prompts))
        if limit is not None and max(lengths) > limit:
            index = lengths.index(max(lengths))
            raise ErrorResponse(
                400,
                f"{_named(index, lengths)}the prompt must have at most {limit} tokens, got {lengths[index]}; "
                "shorten it",
                param=self.request.prompt_field,
                code="context_length_exceeded",
            )
        self._check_lengths(encoded.prompts)
        return encoded


def _named(index: int, prompts: Sized) -> str:
    """What a message about one of several prompts begins with."""
    return f"prompt[{index}]: " if len(prompts) > 1 else ""


def answer_splitter(
    request: Request, tools: Tools | None, stream: TokenStream | None, tokenizer: TokenizerWrapper
) -> AnswerSplitter:
    """The splitter of an answer's tokens."""
    # With a constraint, the whole text is the answer, even if the template has opened the reasoning.
    may_reason = isinstance(request, ChatRequest) and request.constraint is None
    answer = stream.answer if stream is not None and may_reason and all(stream.answer.tags) else None
    reader = AnswerReader(
        tags=None if answer is None else answer.tags,
        is_thinking=answer is not None and answer.is_thinking,
        format=None if tools is None else call_format(tokenizer),
        tools=() if tools is None else tools.listed,
    )
    return AnswerSplitter(reader, has_reasoning=answer is not None)


def _call_grammar(
    tools: Tools,
    format: CallFormat,
    tokenizer: TokenizerWrapper,
    prompt: tuple[int, ...],
    constraint: Constraint | None,
    is_loose: bool,
) -> str:
    """The grammar of an answer with calls; see `call_grammar`."""
    reasoning = ReasoningTracker(tokenizer, prompt)
    return call_grammar(
        tools,
        format,
        tokenizer,
        # With a constraint, there is no reasoning: see `answer_splitter`.
        tags=reasoning.tags if all(reasoning.tags) and constraint is None else None,
        is_thinking=reasoning.is_thinking,
        content=None if tools.must_call or constraint is None else constraint.schema,
        is_loose=is_loose,
    )
