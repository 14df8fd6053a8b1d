"""The interface that an API implements, and the parts of a response that all APIs make of an answer's tokens alike."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Literal

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typing_extensions import TypedDict

from protocol.scores import Score
from protocol.statistics import Statistics
from runtime.generation.answers.message_format import message_format
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template.known import structural_markers, tags_of
from runtime.generation.text import Detokenizer
from runtime.generation.token_stream import TokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.loading.tokenizers import byte_fallback, byte_level_piece
from runtime.server.answers.request import GenerationRequest
from runtime.server.errors import ErrorResponse
from runtime.server.timelines import Timeline

# --- the interface --------------------------------------------------------------------------------

# In ASCII, since clients may split events at Unicode's line separators.
event_json = json.JSONEncoder(separators=(",", ":")).encode


@attrs.frozen
class ServerSentEvent:
    """A server-sent event."""

    data: Mapping[str, Any] | str  # to send as JSON, or a text to send as it is
    name: str | None = None  # its type, for APIs that name it outside of the data

    def encoded(self) -> str:
        """The event as it is sent."""
        data = self.data if isinstance(self.data, str) else event_json(self.data)
        return f"data: {data}\n\n" if self.name is None else f"event: {self.name}\ndata: {data}\n\n"


class Serializer(ABC):
    """Serializer of the response to one request.

    For a response as one body, `whole` is called once. For events, `first_events` (of the first choice), then `events`
    for the tokens as they arrive, and at the end `last_events` or `error_events`.
    """

    id_header: ClassVar[bytes] = b"x-request-id"  # the name of the header with the id that the API's clients know
    id: str  # random, so that other clients cannot guess it
    # Clients and proxies give up a connection that is silent for a minute.
    interval_s: float = 15.0

    def __init__(self, answer: BegunAnswer) -> None:
        self._answer = answer
        self._shown = ShownTokens(answer.request, answer.tokenizer)
        self._last_token: Token | None = None

    def _parts(self, tokens: Sequence[Token]) -> list[Delta]:
        tokens = self._shown(tokens)
        self._last_token = tokens[-1] if tokens else self._last_token
        return self._answer.splitter.add(tokens)

    @abstractmethod
    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        """The whole response as one body, for JSON."""

    def first_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        """The events before any token."""
        return ()

    @abstractmethod
    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[ServerSentEvent]:
        """The events of the next tokens, of which there is at least one."""

    def idle_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        """The events to send when no token has come for `interval_s`."""
        return ()

    @abstractmethod
    def last_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        """The events after the last token."""

    @abstractmethod
    def error_events(self, error: ErrorResponse) -> Sequence[ServerSentEvent]:
        """The events that end a response whose generation has failed."""

    def whole_of(self, choices: Sequence[Choice]) -> Mapping[str, Any]:
        """The response as one body, with all choices; the first one's serializer is called. By default there is one."""
        (choice,) = choices
        return self.whole(choice.tokens, choice.statistics())

    def last_events_of(self, choices: Sequence[Choice]) -> Sequence[ServerSentEvent]:
        """The events after the last token of all choices; called likewise."""
        (choice,) = choices
        return self.last_events(choice.statistics())


@attrs.define
class Choice:
    """One generation of a request, which has begun."""

    serializer: Serializer
    stream: TokenStream | None  # None if nothing is to be generated
    statistics: Callable[[], Statistics]
    tokens: Sequence[Token] = ()  # all of them, for a response as one body

    def finish(self, tokens: Sequence[Token]) -> None:
        """Store all tokens and freeze the statistics, so that another thread can make the response."""
        self.tokens, statistics = tokens, self.statistics()
        self.statistics = lambda: statistics


@attrs.define
class Choices:
    """The choices of one response, which begin in order and a few at a time.

    The models take up generations in the order in which they began. If a request for many texts began them all at
    once, the requests of others would wait for all of them.
    """

    # Functions that begin one choice each, given those before it; at least one. They may raise OutriderError.
    _begins: Iterator[Callable[[Sequence[Choice]], Choice]]
    begun: list[Choice] = attrs.field(factory=list, init=False)
    is_cancelled: bool = attrs.field(default=False, init=False)  # whether the response ends with what there is by now
    _is_closed: bool = attrs.field(default=False, init=False)

    async def begin_next(self) -> int | None:
        """Begin the next choice. Returns its index; None if none is left. Raises: OutriderError: it cannot begin."""
        # Other tasks may run first: with a long prompt, beginning takes a while.
        await trio.lowlevel.checkpoint()
        if self._is_closed or (begin := next(self._begins, None)) is None:
            return None
        self.begun.append(begin(self.begun))
        return len(self.begun) - 1

    def cancel(self) -> None:
        """As `close`, and end the response as if its texts were over."""
        self.is_cancelled = True
        self.close()

    def close(self) -> None:
        """End all generations, and begin no other."""
        self._is_closed = True
        for choice in self.begun:
            if choice.stream is not None:
                choice.stream.close()


@attrs.frozen
class BegunAnswer:
    """A generation that has begun, as its serializer sees it."""

    request: GenerationRequest
    model: str
    tokenizer: TokenizerWrapper
    splitter: AnswerSplitter
    watch: Callable[[str], Timeline] | None  # records the models' activity for the response of an id from now on
    prompt: Sequence[int] = ()
    index: int = 0  # of this choice in the response
    counts_prompt: bool = True  # whether its usage includes the prompt, which counts once for all choices
    echo: Echo | None = None  # if the response repeats the prompt
    score: Score | None = None  # of the prompt, if the response has its log-probabilities
    first: Serializer | None = None  # that of the response's first choice; None if this is the first
    defaults: Mapping[str, Any] = attrs.field(factory=dict)  # the model's settings


# --- tokens ---------------------------------------------------------------------------------------

EndReason = Literal["stop", "length", "cancelled"]

# In place of the stop reason, which no token has that ends a text by its length.
_CANCELLED, _NOTHING = "cancelled", "nothing"


def end_without_token(stream: TokenStream | None) -> Token:
    """What ends the text of a cancelled stream or of a choice without one; it is no token, see `tokens_among`."""
    if stream is None:
        return Token(0, "", 0, None, finish_reason="length", stop_reason=_NOTHING)
    index = stream.answer.num_tokens
    return Token(0, stream.tail, index, None, finish_reason="length", stop_reason=_CANCELLED)


def tokens_among(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens, but for an end without one."""
    if tokens and tokens[-1].finish_reason == "length" and tokens[-1].stop_reason is not None:
        return tokens[:-1]
    return tokens


def end_reason(token: Token) -> EndReason | None:
    """Why the text ends with a token; None if it goes on."""
    is_cancelled = token.finish_reason == "length" and token.stop_reason == _CANCELLED
    return "cancelled" if is_cancelled else token.finish_reason


@attrs.define
class AnswerSplitter:
    """Splits the tokens of one answer into parts, in the order in which they were generated."""

    _reader: Reader
    required: Sequence[ToolCall] = ()  # a call, without arguments, of each function of which the answer must call one
    num_reasoning_tokens: int = attrs.field(init=False, default=0)  # so far, tags included
    has_calls: bool = attrs.field(init=False, default=False)  # whether a call is complete
    _has_begun_call: bool = attrs.field(init=False, default=False)
    _has_left: bool = attrs.field(init=False, default=False)  # reasoning that was not closed, by a call

    def add(self, tokens: Sequence[Token]) -> list[Delta]:
        """The parts that the next tokens add. Text that may be the beginning of a tag or a call is withheld."""
        parts: list[Delta] = []
        # What may be reasoning is read token by token, since a call may end it.
        num_alone = max((i for i, token in enumerate(tokens, start=1) if token.is_thinking), default=0)
        for some in (*([token] for token in tokens[:num_alone]), tokens[num_alone:]):
            parts += self._reader.add("".join(token.text for token in some))
            for token in some:
                self.num_reasoning_tokens += self.is_reasoning(token)
                self._has_left = token.is_thinking and (self._has_left or self._reader.is_in_block)
        if tokens and tokens[-1].finish_reason is not None:
            last = self._reader.finish(is_complete=tokens[-1].is_complete)
            self._has_begun_call |= any(part.kind == "call_began" for part in (*parts, *last))
            is_head = not tokens[-1].is_complete and not self._has_begun_call
            parts += self._begun_call(last) if is_head else last
        self._has_begun_call |= any(part.kind == "call_began" for part in parts)
        self.has_calls |= any(part.kind == "call_ended" for part in parts)
        return [part for part in parts if part.index is not None or part.text]

    def _begun_call(self, parts: Sequence[Delta]) -> list[Delta]:
        """The last parts of an answer that ends in the name of a required call, with the call in place of its text."""
        text = "".join(part.source for part in parts if part.kind == "content")
        by_length: dict[int, list[ToolCall]] = {}
        for call in self.required:
            begun = [n for n in range(1, len(call.name)) if text.endswith(call.name[:n])]
            length = len(call.name) if call.name in text else max(begun, default=0)
            by_length.setdefault(length, []).append(call)
        longest = max(by_length, default=0)
        if longest == 0 or len(by_length[longest]) > 1:
            return list(parts)
        (call,) = by_length[longest]
        others = [part for part in parts if part.kind != "content"]
        return [*others, Delta("call_began", "", text, 0, call), Delta("call_broken", text, "", 0, call)]

    def is_reasoning(self, token: Token) -> bool:
        """Whether the last token, or the next one, is reasoning: between its tags, and before a call that ends it."""
        return self._reader.tells_reasoning and token.is_thinking and not (self._has_left or self._reader.is_in_block)


class ShownTokens:
    """Changes the texts of an answer's tokens to what a request wants to see."""

    def __init__(self, request: GenerationRequest, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shows_stop = request.includes_stop
        self._hidden: dict[int, str] = {}  # texts of special tokens by id
        # Where there may be calls, special tokens stay: calls are recognised by them.
        if request.skips_special_tokens and not (request.chat is not None and request.chat.has_tools):
            messages, tags = message_format(tokenizer), tags_of(tokenizer)
            marks = [getattr(tokenizer, name, None) or "" for name in ("tool_call_start", "tool_call_end")]
            marks += [*structural_markers(tokenizer), *(messages.marks if messages else ()), *(tags or ((),))[0]]
            added = getattr(tokenizer, "added_tokens_decoder", {})
            texts = {id: tokenizer.decode([id]) for id, token in added.items() if token.special}
            self._hidden = {id: text for id, text in texts.items() if not any(text in mark for mark in marks)}

    def __call__(self, tokens: Sequence[Token]) -> Sequence[Token]:
        if self._hidden:
            tokens = [attrs.evolve(token, text=self.without_special(token.id, token.text)) for token in tokens]
        if not self._shows_stop or not tokens or (stop := tokens[-1].stop_reason) is None:
            return tokens
        last = tokens[-1]
        text = stop if isinstance(stop, str) else self._tokenizer.decode([stop])
        return [*tokens[:-1], attrs.evolve(last, text=last.text + text)]

    def without_special(self, token: int, text: str) -> str:
        """The text that ends with a token, without the token if it is a special one that is hidden."""
        return text.removesuffix(self._hidden.get(token, ""))


class TopLogprobBody(TypedDict):
    """A token and its log-probability; `bytes` is null for part of a character whose bytes are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprobBody):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprobBody]


def token_logprobs(
    tokens: Sequence[Token], tokenizer: TokenizerWrapper, num_top: int | None
) -> list[TokenLogprob] | None:
    """The log-probabilities of a text's tokens, with the `num_top` most probable ones beside each; None for none."""
    if num_top is None:
        return None

    def named(id: int, text: str, logprob: float | None) -> TopLogprobBody:
        return {"token": text, "logprob": finite(logprob), "bytes": token_bytes(tokenizer, id, text)}

    return [
        {
            **named(token.id, tokenizer.decode([token.id]), token.logprob),
            "top_logprobs": [named(top.id, top.text, top.logprob) for top in token.top_logprobs[:num_top]],
        }
        for token in text_tokens(tokens)
    ]


def text_tokens(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens without an end-of-text or stop token, which has no text."""
    tokens = tokens_among(tokens)
    return tokens[:-1] if tokens and tokens[-1].is_complete else tokens


def finite(logprob: float | None) -> float:
    """A log-probability for JSON, which has no minus infinity; OpenAI has this in its place."""
    return -9999.0 if logprob is None else max(logprob, -9999.0)


def token_bytes(tokenizer: TokenizerWrapper, token: int, text: str) -> list[int] | None:
    """The bytes of a token, whose decoded text is `text`; None if they are unknown."""
    if "\ufffd" not in text:
        return list(text.encode())
    # Part of a character, which only a byte-level token or byte fallback names.
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    if convert is None or not isinstance(name := convert(token), str):
        return None
    piece = byte_fallback(name)
    if piece is None:
        piece = byte_level_piece(name)
    return None if piece is None else list(piece)


# --- prompts --------------------------------------------------------------------------------------


@attrs.frozen
class Echo:
    """A prompt as a response repeats it."""

    text: str
    tokens: list[str]  # each decoded alone
    offsets: list[int]  # where in `text` each token begins


def make_echo(prompt: str | None, ids: tuple[int, ...], tokenizer: TokenizerWrapper) -> Echo:
    """The echo of a prompt; `prompt` is its text, or None if the request has token ids, which are decoded then."""
    detokenizer, decoded, ends = Detokenizer(tokenizer), "", [0]
    for id in ids:
        decoded += detokenizer.add(id)
        ends.append(len(decoded))
    decoded += detokenizer.unread
    text = decoded if prompt is None else prompt
    # A tokenizer may put special tokens and a space in front, which the prompt's text does not have, or has in part.
    num_added = max(0, len(decoded) - len(text))
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(decoded, text, strict=False)))
    offsets = [max(0, end - num_added, min(end, num_same)) for end in ends[:-1]]
    return Echo(text, [detokenizer.alone(id) for id in ids], offsets)
