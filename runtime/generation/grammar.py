"""Structured output: text that follows a JSON schema, a regular expression or a grammar.

`Grammar` is a logits processor that can go back to an earlier state, so it works with speculation. llguidance computes
which tokens may come next; it is an extra, and imported when a grammar is made.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import mlx.core as mx

from protocol.copying import Forced
from protocol.errors import SettingsError
from protocol.logits_processors import ForcedText
from protocol.reprs import shown
from runtime.generation.grammar_vocabulary import indexed, library
from runtime.generation.json_schema import grammar_of_schema, schema_name, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Most characters of a GBNF grammar. The time of its conversion may grow with the square of its length: 0.6 s for these.
_MAX_GBNF_LENGTH = 2**15

# Most tokens of a state that its matcher has not seen; with more, the state gets a new matcher.
_MAX_PENDING_TOKENS = 16

# llguidance's bound while a text is written. A state of its lexer takes some 400 bytes, and a grammar keeps the states
# of all its texts; with a lower bound, patterns that count to hundreds would not get far.
_MAX_LEXER_STATES = 100_000


@attrs.frozen
class _State:
    """The state of a text: a matcher, and the tokens that it has not seen yet. Continuing from it leaves it unchanged.

    (llguidance can also roll a matcher back, but version 1.9 then sometimes allows what the grammar does not.) A copy
    of a matcher takes some hundred kilobytes for a long text, so states share matchers, and keep the few tokens after.
    """

    size: int  # of the text, in tokens, prompt included
    matcher: LLMatcher | None  # None if the grammar does not allow the text
    pending: tuple[int, ...] = ()


class _ThreadState(threading.local):
    """The state of the calls on one thread. They mostly go on from the last one, whose matcher need not be copied."""

    state: _State | None = None  # after the last call; None before the first
    is_saved = False
    last: tuple[_State, LLMatcher] | None = None  # the state after the last call, and a matcher in it that no state has


class Grammar:
    """A logits processor that allows only tokens with which the text can still match a grammar.

        schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        grammar = runtime.Grammar.from_json_schema(schema, rt.tokenizer)
        answer = await rt.generate(prompt, logits_processors=[grammar])

    The grammar applies from the first token after the prompt, so the model cannot reason first; switch reasoning off in
    the chat template. `thinking_budget` is refused if that has begun the reasoning, and the grammar has no place for
    the tag that would end it. The text ends with an end-of-text token, which is allowed where the text is complete, and
    is the only token allowed where nothing can follow; or `max_tokens` or a stop string cuts the text off. Padding rows
    of an embedding, which the tokenizer does not know, are never allowed. `ignore_eos` is of no use with a grammar:
    after an end-of-text token, only further ones are allowed.

    One object serves any number of streams, one after the other or at once, as in `generate_many`. Making one takes a
    few milliseconds; the first one of a tokenizer about a second for a large vocabulary, which is indexed on the
    calling thread. The class methods raise the constructor's `SettingsError`, and take the same tokenizer.
    """

    def __init__(
        self,
        grammar: str,
        tokenizer: Any,
        *,
        what: str = "the grammar",
        error: Callable[[str], SettingsError] = SettingsError,
    ) -> None:
        """From a grammar in llguidance's own format; the class methods take other formats.

        Args:
            grammar: as `llguidance.LLMatcher.grammar_from_json_schema` and the like return it.
            tokenizer: `Runtime.tokenizer`, or a fast tokenizer of Hugging Face.
            what: the grammar's name in error messages.
            error: makes an error of a message.

        Raises: SettingsError: llguidance does not take the grammar or the tokenizer, or is not installed.
        """
        self._what = what
        self._error = error
        limits = library().LLParserLimits(max_lexer_states=_MAX_LEXER_STATES)
        self._vocabulary = indexed(tokenizer)
        self._start = library().LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        self._allowed(self._start)
        # One for each thread: `restore`, call and `save` follow each other on one, so streams may share an object.
        self._thread_state = _ThreadState()

    @classmethod
    def from_json_schema(
        cls, schema: Mapping[str, Any] | str | bool, tokenizer: Any, *, compact: bool = False
    ) -> Grammar:
        """JSON that matches a JSON schema.

        Args:
            schema: as an object, such as pydantic's `model_json_schema()` gives, or as JSON; True for any JSON. Object
                keys come in the schema's order; other keys only where `additionalProperties` is not false.
            compact: no whitespace between tokens of the JSON; otherwise a blank, or a new line and its indentation.

        Raises: SettingsError: also for a schema with an unsupported keyword, or that nothing satisfies.
        """
        return cls(grammar_of_schema(schema, compact=compact), tokenizer, what=schema_name(schema))

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Any) -> Grammar:
        """Text that matches a regular expression as a whole.

        The syntax is that of Rust's regex crate: Python's without lookaround and backreferences.
        """
        return cls(grammar_of_regex(pattern), tokenizer, what=f"the regular expression {shortened(pattern)}")

    @classmethod
    def from_choices(cls, choices: Sequence[str], tokenizer: Any) -> Grammar:
        """One of some texts."""
        return cls(grammar_of_choices(choices), tokenizer, what="the list of choices")

    @classmethod
    def from_lark(cls, grammar: str, tokenizer: Any) -> Grammar:
        """Text that matches a context-free grammar in Lark's syntax; its rule `start` is the text.

        llguidance extends it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
        """
        return cls(_grammar_of_lark(grammar), tokenizer, what=f"the grammar {shortened(grammar)}")

    @classmethod
    def from_gbnf(cls, grammar: str, tokenizer: Any) -> Grammar:
        """Text that matches a context-free grammar in llama.cpp's syntax, GBNF; its rule `root` is the text.

        It has at most 32,768 characters (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md). One in
        Lark's syntax is taken, too.
        """
        return cls(grammar_of_gbnf(grammar), tokenizer, what=f"the grammar {shortened(grammar)}")

    def __repr__(self) -> str:
        return f"<Grammar: {self._what}>"

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask the tokens that cannot come next.

        Args:
            tokens: (n,) ids of the text so far. One more than in the call before, or than in the state that was
                restored; otherwise they are the prompt of a new text.
            logits: (1, V).

        Returns: (1, V) logits, -inf for forbidden tokens; unchanged after a text that the grammar does not allow.
        Raises: SettingsError: the grammar is too complex to continue, or asks for text that no token stands for.
        """
        here = self._thread_state
        # Cleared first: after an error, no state is kept.
        state, here.state, here.is_saved = here.state, None, False
        last, here.last = here.last, None
        if state is None or tokens.size != state.size + 1:
            # A copy: two threads must not compute a mask with one matcher.
            matcher: LLMatcher | None = self._start.deep_copy()
            reached = _State(tokens.size, self._start)
        else:
            # Read in place: indexing the array would be a computation, perhaps on a GPU.
            in_state = last[1] if last is not None and last[0] is state else None
            matcher, reached = _after(state, memoryview(cast(Any, tokens))[-1], in_state)
        if matcher is not None:
            logits = self._masked(matcher, logits)
            here.last = None if matcher is reached.matcher else (reached, matcher)
        here.state = reached
        return logits

    def save(self) -> _State | None:
        """The state after the last call. None, which begins a new text, if there was no call since the last `save`."""
        # Each `save` of a stream but the first follows a call, so each stream begins with a new state.
        here = self._thread_state
        state = None if here.is_saved else here.state
        here.is_saved = True
        return state

    def restore(self, state: _State | None) -> None:
        """Continue from a state that `save` has returned."""
        self._thread_state.state, self._thread_state.is_saved = state, False

    def forced_text(self) -> ForcedText:
        """What the grammar forces in a text that begins now, for its drafter."""
        return GrammarText(self._start.deep_copy(), self._vocabulary)

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether a text may begin with some tokens."""
        # A copy: two threads must not use one matcher.
        num_allowed: int = self._start.deep_copy().validate_tokens(list(tokens))
        return num_allowed == len(tokens)

    def _masked(self, matcher: LLMatcher, logits: mx.array) -> mx.array:
        width = logits.shape[-1]
        # The model may have more tokens than the tokenizer, which mean nothing, or fewer.
        allowed = self._allowed(matcher)[:width].ljust(width, b"\0")
        if allowed.count(0) == width:
            raise self._error(self._no_token())
        return mx.where(mx.array(cast(Any, memoryview(allowed))), logits, -mx.inf)

    def _allowed(self, matcher: LLMatcher) -> bytes:
        """One byte for each of the tokenizer's tokens, 0 for a forbidden one."""
        # A matcher that has failed allows only the end.
        allowed: bytes = matcher.compute_logit_bias()
        if matcher.is_error():
            # After the message comes a dump of llguidance's state.
            error = matcher.get_error().partition("\n<state>")[0].rstrip()
            if error == "NoExtensionBias":
                raise self._error(self._no_token())
            raise self._error(f"{self._what} cannot be followed: {error}")
        return allowed

    def _no_token(self) -> str:
        return f"{self._what} asks for text that no token stands for; allow other text, or take another model"


def _after(state: _State, token: int, matcher: LLMatcher | None) -> tuple[LLMatcher | None, _State]:
    """The matcher and the state after one more token; the matcher is None where the grammar forbids the token.

    `matcher` is one in the state that may be changed; None to copy that of the state.
    """
    size = state.size + 1
    if state.matcher is None:
        return None, _State(size, None)
    if matcher is None:
        matcher = state.matcher.deep_copy()
        matcher.consume_tokens(list(state.pending))
    # A matcher that has stopped allows only the end, or is past it.
    if matcher.is_stopped():
        return matcher, attrs.evolve(state, size=size)
    if not matcher.consume_token(token):
        return None, _State(size, None)
    if len(state.pending) < _MAX_PENDING_TOKENS:
        return matcher, _State(size, state.matcher, (*state.pending, token))
    return matcher, _State(size, matcher)


# --- in llguidance's own format, as `Grammar` takes it; not compiled yet ----------------------------


def grammar_of_regex(pattern: str) -> str:
    """See `Grammar.from_regex`."""
    text = _text(pattern, f"the regular expression {shortened(pattern)}")
    return cast(str, library().LLMatcher.grammar_from_regex(text))


def grammar_of_choices(choices: Sequence[str]) -> str:
    """See `Grammar.from_choices`."""
    if isinstance(choices, str) or not choices:
        raise SettingsError(f"choices must be a list of at least one text, got {shown(choices)}")
    return _grammar_of_lark("start: " + " | ".join(json.dumps(_text(each, "a choice")) for each in choices))


def grammar_of_gbnf(grammar: str) -> str:
    """See `Grammar.from_gbnf`."""
    what = f"the grammar {shortened(grammar)}"
    text = _text(grammar, what)
    # Line by line: llguidance's own search for these takes hours if there are thousands of blank lines.
    if any(_LARK.match(line) for line in text.splitlines()):
        return _grammar_of_lark(text)
    if len(text) > _MAX_GBNF_LENGTH:
        raise SettingsError(
            f"a grammar of llama.cpp must have at most {_MAX_GBNF_LENGTH} characters, got {len(text)}; give one in "
            "Lark's syntax, or a JSON schema"
        )
    try:
        return _grammar_of_lark(library().gbnf_to_lark.gbnf_to_lark(text))
    except Exception as error:  # llguidance raises nothing more specific, and RecursionError where it is nested deeply
        raise SettingsError(f"{what} cannot be read: {error}") from error


_LARK = re.compile(r"\s*(%llguidance\b|start\s*:(?!:=))")


def _grammar_of_lark(grammar: str) -> str:
    return cast(str, library().LLMatcher.grammar_from_lark(_text(grammar, f"the grammar {shortened(grammar)}")))


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise SettingsError(f"{what} must be a text")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{what} is not valid text: {error}; it must be encodable as UTF-8") from error
    return given


# --- the text that a grammar forces ---------------------------------------------------------------

# Brackets, keys, quotes, the rest of an enumeration's value. llguidance says which bytes must come next. Hardly ever is
# only one token allowed there, since a token may reach into what follows, so the usual tokenisation of the bytes is
# proposed. Between two tokens of JSON a grammar may allow blanks. They are guessed to be those that the text had at the
# last such place, and what is forced after them follows.


# Longest text that is looked for at once. Most keys are shorter, and the rest is found in the next round.
_MAX_BYTES = 256
_BLANKS = b" \t\n"
# What may come behind a blank of JSON, and what a number begins with.
_BEGINS, _NUMBERS = ([bytes([byte]) for byte in some] for some in (b' "[{tfn,:}]\n', b"-0123456789"))
# llguidance's form of a special token in bytes.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


class GrammarText:
    """What a grammar forces in one text; see `protocol.logits_processors.ForcedText`.

    Copying the matcher of a long text takes longer than all the rest. So there is a second one, which goes ahead of the
    text, and is copied only where drafted tokens were rejected.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
        """Of a text that begins now; the matcher is this object's own, and the vocabulary the matcher's."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        blank, one = (vocabulary.tokenize_bytes(text) for text in (b" ", b"1"))
        self._is_number_apart = vocabulary.tokenize_bytes(b" 1") == [*blank, *one]
        begun = [(byte, vocabulary.tokenize_bytes(byte)) for byte in (*_BEGINS, *_NUMBERS)]
        self._begun = [(byte, [*blank, *tokens]) for byte, tokens in begun if tokens]
        self._text = b""
        self._blanks = _Blanks()
        self._ahead: tuple[tuple[int, ...], LLMatcher] | None = None  # after some drafted tokens

    def append(self, tokens: Sequence[int]) -> None:
        """See `protocol.logits_processors.ForcedText`."""
        drafted, ahead = self._ahead or ((), None)
        self._ahead = None
        if ahead is not None and tuple(tokens[: len(drafted)]) == drafted:
            ahead.consume_tokens(list(tokens[len(drafted) :]))
            self._ahead = (), ahead
        self._matcher.consume_tokens(list(tokens))
        self._text += self._vocabulary.decode_bytes(list(tokens))
        self._blanks.learn(self._text)

    def num_allowed(self, beyond: Sequence[int], tokens: Sequence[int]) -> int:
        """See `protocol.logits_processors.ForcedText`."""
        return self._matcher_after(beyond).validate_tokens(list(tokens))

    def after(self, beyond: Sequence[int]) -> list[Forced]:
        """See `protocol.logits_processors.ForcedText`."""
        matcher, text = self._matcher_after(beyond), self._text
        if matcher.is_stopped():
            return []
        if beyond:
            text += self._vocabulary.decode_bytes(list(beyond))
        begin, written, doubts = len(text), b"", dict[int, int]()
        consumed, asked = list[int](), list[int]()
        while len(text) < begin + _MAX_BYTES:
            piece, place = matcher.compute_ff_bytes()[:_MAX_BYTES], len(text)
            if not piece and text and (following := self._after_blank(matcher)) is not None:
                asked.append(place)
                blanks = self._blanks.guess(text, following)
                doubts |= dict.fromkeys(range(place, place + len(blanks) + 1), 1)
                if text[-1:].isalnum():
                    doubts[place] = 2
                piece = blanks + following
            tokens = self._tokenised(piece)
            if not tokens or not _allows(matcher, tokens):
                break
            matcher.consume_tokens(tokens)
            consumed += tokens
            written += piece
            text += self._vocabulary.decode_bytes(tokens)
        tokens, forced, place = self._tokenised(written) or consumed, list[Forced](), begin
        for token in tokens:
            end = place + len(self._vocabulary.decode_bytes([token]))
            # Something may follow that becomes part of the last token.
            is_open = end >= len(text) and not matcher.is_stopped()
            doubt = max([doubts.get(byte, 0) for byte in range(place, end)], default=0)
            forced.append(Forced(token, max(doubt, is_open)))
            place = end
        if not beyond:
            self._blanks.foresee(text, asked)
        self._ahead = (*beyond, *tokens), matcher
        return forced

    def _matcher_after(self, beyond: Sequence[int]) -> LLMatcher:
        """The matcher that goes ahead, after the text and drafted tokens; stopped if the grammar forbids them."""
        drafted, ahead = self._ahead or ((), None)
        if ahead is None or tuple(beyond[: len(drafted)]) != drafted:
            drafted, ahead = (), self._matcher.deep_copy()
        ahead.consume_tokens(list(beyond[len(drafted) :]))
        self._ahead = tuple(beyond), ahead
        return ahead

    def _after_blank(self, matcher: LLMatcher) -> bytes | None:
        """The byte that must follow if only blanks are free before it; empty if a number must, which has a token of its
        own; None if more is free. One blank shows it, unless the grammar allows any number of blanks.
        """
        may_follow = (byte for byte, tokens in self._begun if _allows(matcher, tokens))
        first = next(may_follow, b"")
        if next(may_follow, b""):  # in a string, nearly anything may follow
            return b"" if first in _NUMBERS and self._is_number_apart else None
        return None if not first or first.isspace() else first

    def _tokenised(self, text: bytes) -> list[int]:
        """The usual tokenisation; empty if the tokenizer changes such a text."""
        tokens: list[int] = []
        for index, part in enumerate(_SPECIAL.split(text)):
            if index % 2:
                tokens.append(int(part))
            elif part:
                found = self._vocabulary.tokenize_bytes(part)
                if self._vocabulary.decode_bytes(found) != part:
                    return []
                tokens += found
        return tokens


def _allows(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether all of some tokens may follow."""
    return matcher.validate_tokens(list(tokens)) == len(tokens)


# A place between two tokens of JSON: in front of a byte, if True, or behind it.
_Place = tuple[bool, int]
_BEHIND_COMMA, _BEHIND_COLON, _BEHIND_BRACE = (False, ord(",")), (False, ord(":")), (False, ord("{"))


@attrs.define
class _Blanks:
    """The blanks that one text has between tokens of JSON, by their places."""

    # Within a line, the blanks as they are; of a new line, how much further it is indented than the line before.
    _known: dict[_Place, bytes | int] = attrs.field(factory=dict)
    # A text that was foreseen, and where it might have had blanks; learnt from once the text is there.
    _foreseen: bytes = b""
    _places: list[int] = attrs.field(factory=list)

    def guess(self, text: bytes, following: bytes) -> bytes:
        """The blanks between a text, which is not empty, and what follows it; that is empty if it is a number."""
        place = _place(text, following)
        known = self._known.get(place)
        if known is None and isinstance(step := self._known.get(_BEHIND_BRACE), int):
            # An object over several lines: each member has its own.
            known = 0 if place == _BEHIND_COMMA else -step if following[:1] in (b"}", b"]") else None
        if known is None and place in (_BEHIND_COMMA, _BEHIND_COLON):
            other = self._known.get(_BEHIND_COLON if place == _BEHIND_COMMA else _BEHIND_COMMA)
            known = other if isinstance(other, bytes) else b" "
        if isinstance(known, int):
            return b"\n" + b" " * (_indentation(text) + known)
        return known or b""

    def foresee(self, text: bytes, places: Sequence[int]) -> None:
        """Note how the text may go on, and where it may have blanks."""
        self._foreseen, self._places = text, [*self._places, *places]

    def learn(self, text: bytes) -> None:
        """Learn from the text that has come."""
        places, self._places = self._places, []
        for place in places:
            following = text[place:].lstrip(_BLANKS)
            if text[:place] != self._foreseen[:place]:
                continue
            if not following:
                self._places.append(place)
                continue
            blanks = text[place : len(text) - len(following)]
            further = len(blanks) - blanks.rfind(b"\n") - 1 - _indentation(text[:place])
            self._known[_place(text[:place], following)] = further if b"\n" in blanks else blanks


def _place(text: bytes, following: bytes) -> _Place:
    return (True, following[0]) if following and following[0] in b",:}]" else (False, text[-1])


def _indentation(text: bytes) -> int:
    """Of the last line."""
    line = text[text.rfind(b"\n") + 1 :]
    return len(line) - len(line.lstrip(b" "))
