"""Text and token ids: prompts and chat messages to ids, and ids to text, up to stop strings."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError, PromptTooLongError
from protocol.messages import Open
from protocol.reprs import shown
from protocol.session_state import Commit
from protocol.stop_strings import Stop, StopMatcher
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template.known import begins_answer, source_of
from runtime.generation.chat_template.rendering import render_chat_template
from runtime.generation.tool_calls.events import Delta

logger = logging.getLogger("outrider")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Characters per token of the context. A text with fewer is tokenised unchecked: the check for its length takes a while.
_SURELY_TOKENISED = 16

# Roles of chat messages for every chat template; a template may know further ones.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KNOWN_ROLES = ", ".join(map(repr, ROLES))


def encode_prompt(
    prompt: Prompt,
    tokenizer: TokenizerWrapper | None,
    vocab_size: int,
    context_length: int | None = None,
    switches: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a prompt.

    Args:
        tokenizer: None if the target has none; the prompt must then be ids.
        vocab_size: width of the target's logits.
        context_length: positions that the target can take; None for no bound.
        switches: further variables of the chat template.

    Raises:
        PromptError: the prompt is empty, of another type, needs a tokenizer or chat template that is missing, or has
            ids outside [0, vocab_size).
        PromptTooLongError: it fills the context, as was seen before it was tokenised or its ids were checked. Without
            this error, it may still fill it.
    """
    ids = _encode(prompt, tokenizer, context_length, switches or {})
    if not ids:
        raise PromptError("the prompt is empty; it must have at least one token")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids  # the fast way: trio's thread does this for every stream
    return tuple(_checked_id(token, vocab_size) for token in ids)


def _checked_id(token: Any, vocab_size: int) -> int:
    try:
        # Whatever can index a list is a whole number, numpy's included; so can a bool, which is a mistake.
        id = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        id = None
    if id is None:
        raise PromptError(f"a prompt of token ids must hold whole numbers, got {shown(token)} among them")
    if not 0 <= id < vocab_size:
        raise PromptError(f"prompt token {id} is outside the target's vocabulary of {vocab_size} ids")
    return id


def _encode(
    prompt: Prompt, tokenizer: TokenizerWrapper | None, context_length: int | None, switches: Mapping[str, Any]
) -> tuple[Any, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not text")
        return tokenized(prompt, tokenizer, context_length)
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
        raise PromptError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}")
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not hasattr(listed, "__iter__"):
        raise PromptError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__} of no length")
    items = tuple(listed)
    if not any(isinstance(item, Mapping) for item in items):
        check_prompt_length(len(items), context_length)
        return items
    for item in items:
        if not isinstance(item, Mapping):
            raise PromptError(f"chat messages are mappings with a role and a content, got {shown(item)} among them")
    if tokenizer is None:
        raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not messages")
    if not tokenizer.has_chat_template:
        raise PromptError("the target's tokenizer has no chat template; give the prompt as text or token ids")
    messages = [_checked_message(i, item, tokenizer) for i, item in enumerate(items)]
    return apply_chat_template(messages, tokenizer, context_length, **switches)


def check_prompt_length(num_tokens: int, context_length: int | None) -> None:
    """Raises: PromptTooLongError: `num_tokens` fill the context; None is a context without bound."""
    if context_length is not None and num_tokens >= context_length:
        raise _too_long(num_tokens, context_length)


def _too_long(num_tokens: int, context_length: int) -> PromptTooLongError:
    bound = f"this model's maximum context length is {context_length} tokens, one of them for the answer"
    return PromptTooLongError.by(num_tokens, context_length - 1, bound)


def _checked_message(index: int, message: Mapping[str, Any], tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """A chat message; content in parts is joined to one text."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        what = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise PromptError(f"{where} {what}; give it one of {_KNOWN_ROLES}")
    # Some templates know roles that no other model has.
    if role not in ROLES and not any(f"{quote}{role}{quote}" in source_of(tokenizer) for quote in "'\""):
        raise PromptError(f"{where} has the role {shown(role)}, which is unknown; give it one of {_KNOWN_ROLES}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return dict(message)
    if content is None:
        what = "has the content None" if "content" in message else "has no content"
        raise PromptError(f'{where} {what}; give it a text, "" for an empty one')
    if isinstance(content, (list, tuple)):
        content = "".join(_checked_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise PromptError(f"{where}.content must be a text or a list of text parts, got {shown(content)}")
    return {**message, "content": content}


def _checked_part(where: str, part: Any) -> str:
    form = 'give parts of the form {"type": "text", "text": "…"}, or one text'
    if not isinstance(part, Mapping):
        raise PromptError(f"{where} must be a mapping, got {shown(part)}; {form}")
    if part.get("type") != "text":
        raise PromptError(f"{where} is of type {shown(part.get('type'))}, and only text can be read; {form}")
    if not isinstance(part.get("text"), str):
        raise PromptError(f"{where}.text must be a text, got {shown(part.get('text'))}; {form}")
    return cast(str, part["text"])


def tokenized(
    text: str, tokenizer: TokenizerWrapper, context_length: int | None = None, *, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """The token ids of a text, with the special tokens that the tokenizer puts around one if `add_special_tokens`; as
    in mlx-lm, without if the text begins with the begin-of-text token.

    Raises: PromptError: it is not encodable as UTF-8; PromptTooLongError: it fills the context, as was seen before it
        was tokenised.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; it must be encodable as UTF-8") from error
    if context_length is not None and len(text) >= _SURELY_TOKENISED * context_length:
        _check_text_length(text, tokenizer, context_length)
    if tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token):
        add_special_tokens = False
    # Not verbose: transformers would warn of long prompts, for which there is an error of our own.
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _check_text_length(text: str, tokenizer: TokenizerWrapper, context_length: int) -> None:
    """Check the length of a text before it is tokenised, which takes seconds for megabytes.

    With byte-level BPE and with byte fallback, a text of n characters has at least n / (length of the longest token)
    tokens. Other tokenizers drop or merge what they do not know, and their texts are not checked.
    """
    backend = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return
    if not backend.model.byte_fallback and type(backend.decoder).__name__ != "ByteLevel":
        return
    # A normaliser may have merged characters, or have dropped some.
    num_characters = len(text if backend.normalizer is None else backend.normalizer.normalize_str(text))
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    if num_characters >= context_length * longest:
        # At least so many tokens.
        raise _too_long(-(-num_characters // longest), context_length)


def apply_chat_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: TokenizerWrapper,
    context_length: int | None = None,
    /,
    **switches: Any,
) -> tuple[int, ...]:
    """The token ids of chat messages, up to where the answer begins. Raises: as `render_chat_template`, `tokenized`."""
    text = render_chat_template(messages, tokenizer, **switches)
    return tokenized(text, tokenizer, context_length, add_special_tokens=False)


def begun_turn(messages: Sequence[Mapping[str, Any]], tokenizer: TokenizerWrapper, /, **switches: Any) -> Prompt:
    """What the prompt of the turn after some messages begins with, whatever is said in it: as much as the prompts for
    two different turns have in common, as text. Raises: PromptError: as `apply_chat_template`.
    """
    if not tokenizer.has_chat_template:
        return "".join(message["content"] for message in messages)
    turn: dict[str, Any] = {"role": "user"}
    if messages and (calls := messages[-1].get("tool_calls")):
        turn = {"role": "tool", "tool_call_id": calls[0]["id"]}
    said = [[*map(dict, messages), {**turn, "content": content}] for content in ("1", "?")]
    one, other = (render_chat_template(chat, tokenizer, **switches) for chat in said)
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return tokenized(one[:num_common], tokenizer, add_special_tokens=False)


# This many pending tokens, not yet given as text, are no longer taken for the beginning of one character.
_MAX_PENDING = 16
# The most tokens of an incomplete character: it has at most 4 bytes, and a token at least one.
_INCOMPLETE = 3
# Last tokens of a prompt that are decoded with the text behind it: they decide on its first space, and may begin its
# first character.
_NUM_DECODED_BEFORE = 16


class Detokenizer:
    """An incremental decoder: the text of a growing list of tokens, piece by piece.

    The pieces add up to `tokenizer.decode(ids)`, in every script: a character whose bytes are spread over tokens comes
    with the last of them. The two may differ only for bytes that form no character, in the number of replacement
    characters. For each piece a bounded number of tokens is decoded, whatever the tokens are. SentencePiece's decoders
    drop the space at the start of a text; one that continues a prompt keeps it, and a new answer in a chat has none.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, prompt: Sequence[int] = ()) -> None:
        """Decode the text that follows a prompt; without a tokenizer every piece is empty."""
        self._tokenizer = tokenizer
        self._prompt = prompt  # empty once there is text
        self._ids: list[int] = []
        # The text of ids[_context_start:_given_end] was given, but for its last `_num_held` characters. Later ids are
        # decoded together with these, since tokenizers decide by the neighbours where a space goes.
        self._context_start = self._given_end = self._num_held = 0
        self.unread = ""  # the text of the last tokens, withheld because it ends in an incomplete character
        self._alone: dict[int, str] = {}
        # The last ids of the prompt that are text: behind a special token a text begins.
        last, special = list(prompt[-_NUM_DECODED_BEFORE:]), getattr(tokenizer, "all_special_ids", ())
        last = last[max((i + 1 for i, id in enumerate(last) if id in special), default=0) :]
        if tokenizer is not None and last and tokenizer.decode(last).endswith("\ufffd"):
            # The first token may complete a character. What was complete before is the prompt's.
            for token in last:
                self._ids.append(token)
                self._advance(is_last=False)
        else:
            self._ids, self._given_end = last, len(last)

    @property
    def ahead(self) -> str:
        """The complete characters of `unread`."""
        return self.unread.rstrip("\ufffd")

    def add(self, token: int) -> str:
        """The text that a token makes readable, possibly none."""
        self._ids.append(token)
        piece = self._advance(is_last=False)
        if piece and self._prompt:
            prompt, self._prompt = self._prompt, ()
            if piece[0] == " " and self.alone(token)[:1] != " " and begins_answer(self._tokenizer, prompt):
                return piece[1:]
        return piece

    def alone(self, token: int) -> str:
        """The text of a token decoded alone. Cached, as the same few tokens are the likeliest at many positions."""
        if token not in self._alone:
            self._alone[token] = "" if self._tokenizer is None else cast(str, self._tokenizer.decode([token]))
        return self._alone[token]

    def cut(self) -> str:
        """The remaining text, without a character that was never completed."""
        rest, self.unread = self.ahead, ""
        return rest

    def finish(self) -> str:
        """The remaining text, with a character that was never completed."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        if self._tokenizer is None:
            return ""
        given: str = self._tokenizer.decode(self._ids[self._context_start : self._given_end])
        num_given = len(given) - self._num_held
        fresh = self._decoded_after(num_given, len(self._ids))
        if fresh and (is_last or not fresh.endswith("\ufffd")):
            self._context_start, self._given_end, self.unread = self._given_end, len(self._ids), ""
            self._num_held = 0
            return fresh
        self.unread = fresh
        if len(self._ids) - self._given_end < _MAX_PENDING:
            return ""
        if not fresh:
            # Tokens without text. Those before them still decide where a space goes.
            del self._ids[self._given_end :]
            return ""
        # More bytes than a character has. Either all but the last ones form no character, or each token ends within a
        # character: then the half character at the end is held.
        end = len(self._ids) - _INCOMPLETE
        piece = self._decoded_after(num_given, end)
        pairs = enumerate(zip(piece, fresh, strict=False))
        num_whole = next((i for i, (early, late) in pairs if early != late), len(piece))
        self._context_start, self._given_end, self.unread = self._given_end, end, fresh[num_whole:]
        self._num_held = len(piece) - num_whole
        return piece[:num_whole]

    def _decoded_after(self, num_given: int, end: int) -> str:
        assert self._tokenizer is not None
        return cast(str, self._tokenizer.decode(self._ids[self._context_start : end]))[num_given:]


class GrowingText:
    """The text of one generation, token by token: without end-of-text tokens, and up to a stop string.

    With the reader of an answer, stop strings are searched for in its content, otherwise in the whole text.
    """

    readable = ""  # the text that the last token has made readable, given or withheld

    def __init__(self, tokenizer: TokenizerWrapper | None, opened: Open, reader: Reader | None = None) -> None:
        self._detokenizer = Detokenizer(tokenizer, opened.prompt)
        self.alone = self._detokenizer.alone
        self._textless = opened.stop_tokens
        stops = opened.settings.stop
        self._has_stops = bool(stops)
        self._matcher: StopMatcher | ContentStops = StopMatcher(stops)
        if stops and reader is not None and reader.marks:
            self._matcher = ContentStops(stops, reader)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matcher.found

    @property
    def tail(self) -> str:
        """The withheld text of the tokens so far: a possible beginning of a stop string, or half a character. Empty
        once the text is over.
        """
        return "" if self.stop is not None else self._matcher.withheld + self._detokenizer.unread

    def add(self, token: int, *, is_last: bool, is_cut: bool = False) -> str:
        """The text to give with a token, possibly empty; the last token brings all that was withheld.

        A text that `is_cut` by its length ends before a character of which there is only a part.
        """
        piece = "" if token in self._textless else self._detokenizer.add(token)
        ahead = self._detokenizer.ahead
        rest = ""
        if is_last:
            rest = self._detokenizer.cut() if is_cut else self._detokenizer.finish()
        self.readable = piece + rest
        given = self._matcher.add(piece, ahead) if self._has_stops else piece
        return given + self._matcher.finish(rest) if is_last else given


class StopFinder:
    """Searches the tokens that a generation is about to commit for stop strings."""

    def __init__(self, tokenizer: TokenizerWrapper, opened: Open, reader: Reader | None = None) -> None:
        self._text: GrowingText | None = GrowingText(tokenizer, opened, reader)

    def __call__(self, commit: Commit) -> Stop | None:
        """Where a stop string ends the text in this commit, if one does. To be called with each commit, in order."""
        if self._text is None:
            return None
        # The tokenizer is third-party code, called amid the target's work. The reader of the text gets the same error.
        try:
            for i, token in enumerate(commit.tokens, start=1):
                is_last = commit.finish_reason is not None and i == len(commit.tokens)
                self._text.add(token, is_last=is_last, is_cut=commit.finish_reason == "length")
                if self._text.stop is not None:
                    return Stop(self._text.stop, i)
        except Exception as error:
            logger.warning("session %d is not searched for stop strings any more: %s", commit.session, error)
            self._text = None
        return None


class ContentStops:
    """A `StopMatcher` for an answer with reasoning or calls, in which it does not search.

    A stop string must occur in one stretch of content: neither tags nor the whitespace beside them are part of it. A
    stop string with a tag or a marker of calls in it is searched for in the whole text. Text that may become a call is
    withheld, as it is content if it becomes none.
    """

    def __init__(self, stops: Sequence[str], reader: Reader) -> None:
        """Search the answer that `reader` reads; it has read nothing yet."""
        with_marks = [stop for stop in stops if any(mark in stop for mark in reader.marks)]
        self.found: str | None = None  # the stop string that ended the text; None so far
        self._whole = StopMatcher(with_marks)
        self._stops = [stop for stop in stops if stop not in with_marks]
        self._matcher = StopMatcher(self._stops)
        self._reader = reader
        self._pending = ""  # text that was read, and not given

    @property
    def withheld(self) -> str:
        """The end of the text so far that is not given yet."""
        return self._pending + self._whole.withheld

    def add(self, piece: str, ahead: str = "") -> str:
        """See `StopMatcher.add`."""
        given = self._read(self._whole.add(piece, ahead))
        # The next text is content, whatever it is but a mark, where nothing is withheld but by the matcher.
        is_in_content = not (self._reader.is_reasoning or self._reader.is_in_block)
        if ahead and self.found is None and is_in_content and self._pending == self._matcher.withheld:
            given += self._matcher.add("", ahead)
            if self._matcher.found is not None:
                self.found, self._pending = self._matcher.found, ""
        if self._whole.found is not None:
            given, self._pending = given + self._pending, ""
            self.found = self.found or self._whole.found
        return given

    def finish(self, rest: str = "") -> str:
        """See `StopMatcher.finish`."""
        given = self.add(rest)
        given += self._read(self._whole.finish())
        if self.found is None:
            given += self._pass(self._reader.finish(is_complete=False))
        if self.found is None:
            given, self._pending = given + self._pending, ""
        return given

    def _read(self, piece: str) -> str:
        if self.found is not None:
            return ""
        self._pending += piece
        return self._pass(self._reader.add(piece))

    def _pass(self, events: Iterable[Delta]) -> str:
        """The text to give with events, up to a stop string."""
        num_given = 0
        for event in events:
            content = event.text if event.kind == "content" and event.source else ""
            if num_around := len(event.source) - len(content):
                # Another stretch of content begins.
                num_given += len(self._matcher.withheld) + num_around
                self._matcher = StopMatcher(self._stops)
            num_given += len(self._matcher.add(content))
            if self._matcher.found is not None:
                self.found, given, self._pending = self._matcher.found, self._pending[:num_given], ""
                return given
        given, self._pending = self._pending[:num_given], self._pending[num_given:]
        return given
