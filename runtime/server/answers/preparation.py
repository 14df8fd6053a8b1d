"""The preparation of a request: its prompts as token ids, with the settings of their generations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError, PromptTooLongError
from protocol.logits_processors import Stateless, stateless
from protocol.scores import Score
from protocol.settings import Settings
from protocol.statistics import Counts, Statistics
from runtime.engine.runtime import Runtime
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template.known import asks_for_reasoning, lacks_switch
from runtime.generation.grammar import Grammar
from runtime.generation.reasoning import NO_REASONING, ReasoningTracker, marks_of, reader_of
from runtime.generation.text import check_prompt_length
from runtime.generation.token_stream import TokenStream
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import call_format
from runtime.generation.tool_calls.call_grammar import call_grammar, reasoning_before
from runtime.generation.tool_calls.events import Answer, ToolCall
from runtime.generation.tool_calls.tools import check_callable
from runtime.server.answers.api import AnswerSplitter, Echo, make_echo
from runtime.server.answers.request import GenerationRequest
from runtime.server.context import ServerContext
from runtime.server.errors import ErrorResponse, short_json
from runtime.server.models.loaded_model import LoadedModel, tokenizer_of

# Most tokens that a response may name: those of all answers, and the likely others beside them. Each takes some 60
# bytes of JSON, and several times that in memory.
MAX_NAMED_TOKENS = 2**20

# Most tokens of a prediction. It is indexed like a prompt, and takes as much memory.
_MAX_PREDICTED_TOKENS = 2**15

# Tokenising a key of `logit_bias` takes as long as this many characters of a prompt: each key is a call of its own.
_CHARACTERS_OF_KEY = 128


@attrs.frozen
class PreparedPrompt:
    """One prompt of a request."""

    ids: tuple[int, ...]
    settings: Settings  # of its generations, completed by the defaults
    echo: Echo | None  # see `BegunAnswer`
    score: Score | None  # likewise
    read: Statistics | None  # of reading it, if nothing is generated


class Preparation:
    """Prepares the prompts of one request, and the readers of its answers."""

    def __init__(self, context: ServerContext, model: LoadedModel, request: GenerationRequest, client: str) -> None:
        self.model = model
        self.request = request
        self.tools = None if request.chat is None else request.chat.tools  # those that the model may call
        self.tokenizer = tokenizer_of(model.runtime)
        self._context = context
        self._client = client  # its address; clients take turns at schemas
        # Known once the request is encoded: biases by token ids, and tokens that end a middle besides the end of text.
        self._logit_bias: dict[int, float] = {}
        self._ends: tuple[int, ...] = ()

    async def prompts(self) -> list[PreparedPrompt]:
        """The prompts, at least one. Raises: OutriderError or ErrorResponse: the request is invalid, or has failed."""
        max_tokens = self._max_tokens()
        encoded, grammar = await self._encoded_and_grammar()
        max_tokens = self._bounded(max_tokens, encoded)
        settings, ends = await self._settings_and_ends(grammar, max_tokens)
        prepared = []
        for index, ids in enumerate(encoded):
            await trio.lowlevel.checkpoint()
            own, echo = settings, None
            if self.request.min_tokens:
                processor = min_tokens(len(ids) + self.request.min_tokens, ends)
                own = attrs.evolve(settings, logits_processors=(*settings.logits_processors, processor))
            if self.request.echoes:
                text = self.request.texts[index]
                make = partial(make_echo, text if isinstance(text, str) else None, ids, self.tokenizer)
                echo = await self._context.in_thread(make, len(ids))
            score = await self._score(ids, settings)
            read = await self._read(ids, settings) if max_tokens == 0 else None
            prepared.append(PreparedPrompt(ids, own, echo, score, read))
        return prepared

    def reader(self, answer: ReasoningTracker) -> Reader:
        """A reader of an answer, of which nothing was given yet."""
        format = None if self.tools is None else check_callable(self.tools, self.tokenizer)
        if format is not None and format.bare == "sometimes" and self.request.constraint is not None:
            # The answer is JSON, or a call that its grammar begins with the marker.
            format = attrs.evolve(format, bare="never")
        tools = () if self.tools is None else self.tools.callable
        return reader_of(answer, format, tools) if self._reasons(answer) else AnswerReader(format=format, tools=tools)

    def _reasons(self, answer: ReasoningTracker) -> bool:
        """Whether an answer may reason; with a constraint, only if it was asked to, or if its prompt makes it."""
        chat = self.request.chat
        if chat is None:
            return False
        if self.request.constraint is None or answer.messages is not None or answer.began_thinking:
            return True
        return bool(asks_for_reasoning(self.tokenizer, chat.variables))

    def splitter(self, stream: TokenStream | None) -> AnswerSplitter:
        """The splitter of an answer's tokens."""
        format, tools, required = call_format(self.tokenizer), self.tools, []
        if format is not None and tools is not None and tools.must_call:
            required = [ToolCall(format.new_id(), tool["function"]["name"], "") for tool in tools.callable]
        return AnswerSplitter(AnswerReader() if stream is None else self.reader(stream.answer), required)

    async def expect_next_turn(self, stream: TokenStream | None) -> None:
        """Have the runtime read what the prompt after an answer that is over will begin with, when it is idle."""
        chat, runtime = self.request.chat, self.model.runtime
        if stream is None or chat is None or chat.continues or not self.tokenizer.has_chat_template:
            return
        answer, reader = Answer(), self.reader(stream.answer)
        answer.add(reader.add(stream.answer.text))
        answer.add(reader.finish(is_complete=True))
        messages = [*chat.messages, answer.message]
        render = partial(runtime.begun_turn, messages, **_variables(self.request, self.tokenizer))
        with suppress(PromptError):
            begun = await self._context.in_thread(render, self.request.prompt_length)
            runtime.expect(lambda: begun)

    # --- what the tokenizer makes of the request, and grammars ------------------------------------

    async def _encoded_and_grammar(self) -> tuple[Sequence[tuple[int, ...]], Grammar | None]:
        constraint, schemas, tools = self.request.constraint, self.model.schemas, self.tools
        format = None if tools is None else check_callable(tools, self.tokenizer)
        if tools is None or format is None:
            # The grammar first, as it may turn out to be invalid.
            grammar = None if constraint is None else await schemas.grammar(constraint, self._client)
            encoded = await self._encoded()
            answer = ReasoningTracker(self.tokenizer, encoded[0])
            if constraint is not None and self._reasons(answer):
                follow = partial(reasoning_before, tokenizer=self.tokenizer, **marks_of(answer))
                grammar = await schemas.grammar(constraint, self._client, follow)
            return encoded, grammar
        if constraint is not None and constraint.kind != "json":
            message = f"{constraint.field} cannot go together with tools, unless it is a JSON schema; leave one out"
            raise ErrorResponse(400, message, param=constraint.field)
        encoded = await self._encoded()
        (prompt,) = encoded  # a chat has one
        if constraint is None and not tools.needs_grammar:
            return encoded, None

        def write(loose: Collection[str]) -> str:
            answer = ReasoningTracker(self.tokenizer, prompt)
            content = None if constraint is None or tools.must_call else constraint.schema
            marks = marks_of(answer) if self._reasons(answer) else NO_REASONING
            return call_grammar(tools, format, self.tokenizer, **marks, content=content, loose=loose)

        def write_one(name: str) -> str:
            return call_grammar(tools.alone(name), format, self.tokenizer)

        may_be_loose = tools.not_strict
        grammar = await schemas.grammar_of_calls(write, self._client, may_be_loose=may_be_loose, write_one=write_one)
        return encoded, grammar

    async def _encoded(self) -> Sequence[tuple[int, ...]]:
        num_texts = sum(not _is_id(key) for key in self.request.logit_bias)
        length = self.request.prompt_length + _CHARACTERS_OF_KEY * num_texts
        encoded = await self._context.in_thread(self._encode, length)
        lengths, limit = list(map(len, encoded)), self._context.limits.max_prompt_tokens
        # Behind the message: clients look at its beginning.
        named = [f" (prompt[{index}])" if len(lengths) > 1 else "" for index in range(len(lengths))]
        if limit is not None and (most := max(lengths)) > limit:
            where = named[lengths.index(most)]
            bound = f"for prompts, this model's maximum context length is {limit} tokens here{where}"
            raise PromptTooLongError.by(most, limit, bound)
        for name, length in zip(named, lengths, strict=True):
            try:
                check_prompt_length(length, self.model.runtime.context_length)
            except PromptTooLongError as error:
                raise PromptTooLongError(f"{error}{name}") from error
        return encoded

    def _encode(self) -> Sequence[tuple[int, ...]]:
        request = self.request
        self._logit_bias = _biases(request.logit_bias, self.tokenizer)
        if (suffix := request.suffix) is None:
            return encode_prompts(request, self.model.runtime)
        if (fill := self.model.fill_in_middle) is None:
            raise ErrorResponse(
                400,
                f"the tokenizer of {self.model.name!r} has no fill-in-the-middle tokens, so nothing can be written in "
                "front of a suffix; leave it out, or ask a model that was trained for it",
                param="suffix",
            )
        texts = [prompt for prompt in request.texts if isinstance(prompt, str)]
        self._ends = fill.stop_tokens
        return [fill.prompt(text, suffix, self.tokenizer) for text in texts]

    # --- settings and bounds ----------------------------------------------------------------------

    async def _settings_and_ends(self, grammar: Grammar | None, max_tokens: int | None) -> tuple[Settings, set[int]]:
        """The settings of all prompts, without `min_tokens`, and the ids of the tokens that end their answers."""
        runtime, defaults = self.model.runtime, self.model.spec.settings
        step_size = defaults.get("prefill_step_size", self._context.limits.prefill_step_size)
        settings: dict[str, Any] = {"reuse_prefix": True, "prefill_step_size": step_size, **self.request.settings}
        settings["max_tokens"] = max_tokens or None
        if self._logit_bias:
            settings["logit_bias"] = self._logit_bias
        if self.request.chat is not None and (predicted := self.request.chat.predicted_text):
            # Cut generously before: in text that is not code, a token has some five characters.
            cut = predicted[: 16 * _MAX_PREDICTED_TOKENS]
            encode = partial(self.tokenizer.encode, cut, add_special_tokens=False)
            tokens = await self._context.in_thread(encode, len(predicted))
            settings["prediction"] = tokens[:_MAX_PREDICTED_TOKENS]
        if grammar is not None:
            settings["logits_processors"] = [grammar]
        # Before any model work. This adds the server's defaults for what the request leaves out.
        whole = runtime.check_settings(settings)
        if whole.ignore_eos:
            return whole, set(whole.stop_tokens)
        if self._ends:
            whole = attrs.evolve(whole, stop_tokens=(*whole.stop_tokens, *self._ends))
        return whole, {*whole.stop_tokens, *self.tokenizer.eos_token_ids}

    def _max_tokens(self) -> int | None:
        """The most tokens of an answer; None for as many as the model's context has room for."""
        requested, limits = self.request.max_tokens, self._context.limits
        limit = limits.max_tokens_limit
        if requested is None:
            requested = self.model.spec.settings.get("max_tokens", limits.max_tokens)
        elif requested == -1:
            requested = None
        elif self._context.is_strict and limit is not None and requested > limit:
            field = self.request.max_tokens_field
            raise ErrorResponse(400, f"{field} must be at most {limit} here, got {requested}", param=field)
        return min((bound for bound in (requested, limit) if bound is not None), default=None)

    def _bounded(self, max_tokens: int | None, prompts: Sequence[tuple[int, ...]]) -> int | None:
        """The most tokens of an answer, lowered so far that the response names no more than `MAX_NAMED_TOKENS`.

        Raises: ErrorResponse: the request asks for too many.
        """
        request = self.request
        each, num_answers = request.num_named, request.num_choices * len(prompts)
        if each * num_answers == 1 and request.num_prompt_logprobs is None:
            return max_tokens
        with_prompt = each if request.echoes else 0
        with_prompt += 0 if request.num_prompt_logprobs is None else 1 + request.num_prompt_logprobs
        of_prompts = with_prompt * sum(map(len, prompts))
        left = MAX_NAMED_TOKENS - request.num_choices * of_prompts
        if request.max_tokens is None:
            # Nobody has asked for so many.
            fitting = max(1, left // (each * num_answers))
            max_tokens = fitting if max_tokens is None else min(max_tokens, fitting)
        # No answer is longer than the context.
        bounds = [bound for bound in (self.model.runtime.context_length, max_tokens) if bound is not None]
        most = min(bounds, default=0)
        if (num_named := each * num_answers * most) > left:
            raise ErrorResponse(
                400,
                f"the response may have {MAX_NAMED_TOKENS - left + num_named} tokens ({num_answers} answers of up to "
                f"{most} tokens, each with {each - 1} likely others, and {of_prompts} of prompts), and the most is "
                f"{MAX_NAMED_TOKENS}; ask for fewer answers or log-probabilities, or lower {request.max_tokens_field}",
                param=request.max_tokens_field,
            )
        return max_tokens

    async def _read(self, ids: tuple[int, ...], settings: Settings) -> Statistics:
        """The statistics of a prompt for which nothing is generated: it is read and kept, unless it only comes back."""
        runtime = self.model.runtime
        if self.request.echoes or not settings.reuse_prefix:
            return Counts(prompt_tokens=len(ids)).snapshot(estimates=runtime.estimates)
        return await runtime.warm(ids, settings)

    async def _score(self, ids: tuple[int, ...], settings: Settings) -> Score | None:
        if (num_top := self.request.num_scored) is None or len(ids) == 1:
            return None
        return await self.model.runtime.score(
            ids[:1],
            ids[1:],
            logprobs=num_top,
            reuse_prefix=settings.reuse_prefix,
            prefill_step_size=settings.prefill_step_size,
        )


# --- with the tokenizer ---------------------------------------------------------------------------


def encode_prompts(request: GenerationRequest, runtime: Runtime) -> list[tuple[int, ...]]:
    """The prompts of a request as token ids; a chat is one. Raises: PromptError: one cannot be encoded."""
    tokenizer, prompts, variables = tokenizer_of(runtime), request.texts, {}
    if (chat := request.chat) is not None and not tokenizer.has_chat_template:
        # One text, as a base model continues it.
        prompts = ["".join(message["content"] for message in chat.messages)]
    elif chat is not None:
        *before, last = chat.messages
        prompts = [[*before, {**last, "prefix": chat.continues}]]
        variables = _variables(request, tokenizer)
        if chat.reasoning_field is not None and lacks_switch(tokenizer):
            request.ignored.add(chat.reasoning_field)
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(runtime.encode(prompt, **variables))
        except PromptError as error:
            if len(prompts) == 1:
                raise
            # Clients know by the beginning of a message that a context is full.
            is_long = isinstance(error, PromptTooLongError)
            message = f"{error} (prompt[{index}])" if is_long else f"prompt[{index}]: {error}"
            raise type(error)(message) from error
    return encoded


def _variables(request: GenerationRequest, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """The variables of the chat template for a request with a chat."""
    assert request.chat is not None
    tools = request.chat.tools
    variables = {**request.chat.variables, **({} if tools is None else tools.template_variables)}
    if request.constraint is not None and not asks_for_reasoning(tokenizer, variables):
        variables["enable_thinking"] = False
    return variables


def _biases(by_key: Mapping[str, float], tokenizer: TokenizerWrapper) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in by_key.items():
        tokens = [int(key)] if _is_id(key) else tokenizer.encode(key, add_special_tokens=False)
        if not tokens:
            raise ErrorResponse(
                400,
                f"the key {short_json(key)} of logit_bias stands for no token; give token ids or texts",
                param="logit_bias",
            )
        for token in tokens:
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit()


def min_tokens(length: int, ends: Iterable[int]) -> Stateless:
    """A logits processor that forbids the tokens that end a text until the text has `length` tokens, prompt included.

    Drafter and target apply it to the same texts, so proposals are drawn and judged by the same rule. Where no other
    token is allowed, as after complete JSON, the text may end. Ids beyond the model's vocabulary do not matter.
    """
    ids = sorted(ends)

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        known = [id for id in ids if id < logits.shape[-1]]
        if tokens.size >= length or not known:
            return logits
        masked = mx.put_along_axis(logits, mx.array([known]), mx.array(-mx.inf, logits.dtype), axis=-1)
        return mx.where(mx.max(masked) == -mx.inf, logits, masked)

    return stateless(forbid)
