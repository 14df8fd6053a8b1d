"""Between text and token ids."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError, VocabularyMismatchError
from protocol.messages import Open
from protocol.reprs import shown
from protocol.session_state import Commit
from protocol.stop_strings import Stop, StopMatcher

logger = logging.getLogger("outrider")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Of chat messages, for all chat templates; a template may know further ones.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def copy_of(tokenizer: TokenizerWrapper | None) -> TokenizerWrapper | None:
    """A tokenizer that nobody else has, and that several threads may use at once, for encoding and decoding.

    Those of Hugging Face keep truncation and padding as a state, which every call that encodes sets anew before it
    encodes: of two threads that want different ones, one gets the other's. Where all want the same, as here, nothing is
    ever set. Whoever holds the original may do with it as he likes.

    A large vocabulary takes a second. The original itself comes back where it cannot be copied.
    """
    if tokenizer is None:
        return None
    own = copy.copy(tokenizer)
    # Somebody else's code, some of it from a model's repository: not everything can be copied, and most need not be.
    try:
        own._tokenizer = copy.deepcopy(tokenizer._tokenizer)
        own.encode("")  # what truncation and padding the tokenizer's file asks for is put aside with the first text
    except Exception as error:
        logger.info("the tokenizer %s cannot be copied: %s", type(tokenizer._tokenizer).__name__, error)
        return tokenizer
    return own


def encode_prompt(prompt: Prompt, tokenizer: TokenizerWrapper | None, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a prompt.

    Args:
        prompt: text, token ids, or chat messages for the tokenizer's chat template.
        tokenizer: None where the target has none; then only ids will do.
        vocab_size: the width of the target's logits.

    Raises: PromptError: it is empty, of another type, needs a tokenizer or chat template that is not
        there, or has ids outside [0, vocab_size).
    """
    ids = _encode(prompt, tokenizer)
    if not ids:
        raise PromptError("the prompt is empty; it must have at least one token")
    return tuple(_checked_id(token, vocab_size) for token in ids)


def _checked_id(token: Any, vocab_size: int) -> int:
    try:
        # Whatever can index a list is a whole number, numpy's included; bool can too, and was never meant.
        id = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        id = None
    if id is None:
        raise PromptError(f"a prompt of token ids must hold whole numbers, got {shown(token)} among them")
    if not 0 <= id < vocab_size:
        raise PromptError(f"prompt token {id} is outside the target's vocabulary of {vocab_size} ids")
    return id


def _encode(prompt: Prompt, tokenizer: TokenizerWrapper | None) -> tuple[Any, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not text")
        # As mlx-lm does: a prompt that spells out its own begin-of-text token gets no second one.
        spelled_out = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return _tokenized(prompt, tokenizer, add_special_tokens=not spelled_out)
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
        raise PromptError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}")
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not hasattr(listed, "__iter__"):
        raise PromptError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__} of no length")
    items = tuple(listed)
    if not any(isinstance(item, Mapping) for item in items):
        return items
    for item in items:
        if not isinstance(item, Mapping):
            raise PromptError(f"chat messages are mappings with a role and a content, got {shown(item)} among them")
    if tokenizer is None:
        raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not messages")
    if not tokenizer.has_chat_template:
        raise PromptError("the target's tokenizer has no chat template; give the prompt as text or token ids")
    return apply_chat_template([_checked_message(i, item, tokenizer) for i, item in enumerate(items)], tokenizer)


def _checked_message(index: int, message: Mapping[str, Any], tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """A chat message, whose content is one text where it is given in parts.

    Raises: PromptError: no chat template could make anything of it.
    """
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        what = f"has the role {shown(role)}" if "role" in message else "has no role"
        raise PromptError(f"{where} {what}; give it one of {_named(ROLES)}")
    if role not in ROLES and not _is_in_template(role, tokenizer):
        raise PromptError(f"{where} has the role {shown(role)}, which is unknown; give it one of {_named(ROLES)}")
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
    """The text of a part of a message.

    Raises: PromptError: it is none of text.
    """
    form = 'give parts of the form {"type": "text", "text": "…"}, or one text'
    if not isinstance(part, Mapping):
        raise PromptError(f"{where} must be a mapping, got {shown(part)}; {form}")
    if part.get("type") != "text":
        raise PromptError(f"{where} is of type {shown(part.get('type'))}, and only text can be read; {form}")
    if not isinstance(part.get("text"), str):
        raise PromptError(f"{where}.text must be a text, got {shown(part.get('text'))}; {form}")
    return cast(str, part["text"])


def _named(roles: Sequence[str]) -> str:
    return ", ".join(map(repr, roles))


def _is_in_template(role: str, tokenizer: TokenizerWrapper) -> bool:
    """Whether a chat template speaks of a role by name, as some do of roles that no other model has."""
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, Mapping) else [template]
    return any(isinstance(each, str) and (f"'{role}'" in each or f'"{role}"' in each) for each in templates)


def _tokenized(text: str, tokenizer: TokenizerWrapper, *, add_special_tokens: bool) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; it must be encodable as UTF-8") from error
    # Not verbose: transformers would warn of long prompts, which are refused in words of our own.
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def apply_chat_template(
    messages: Sequence[Mapping[str, Any]], tokenizer: TokenizerWrapper, **switches: Any
) -> tuple[int, ...]:
    """The token ids that ask for an answer to messages.

    Args:
        messages: with a role and a content each.
        tokenizer: with a chat template.
        **switches: what else the template is to know.

    Raises: PromptError: the template does not take them.
    """
    # Somebody else's code, which was written with certain messages in mind, and may raise anything for others.
    try:
        text: str = cast(Any, tokenizer).apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **switches
        )
    except Exception as error:
        raise PromptError(f"the chat template does not take these messages: {error}") from error
    return _tokenized(text, tokenizer, add_special_tokens=False)


class Detokenizer:
    """The text of a growing list of tokens, piece by piece.

    The pieces add up to `tokenizer.decode(all the ids)`, whatever the script: a character whose bytes are spread
    over tokens comes with the last of them. Only where a model emits bytes that are no character may the two
    differ, in how many replacement characters stand for them. (mlx-lm's own detokenizers drop a space at the
    start of the text, which a continuation needs.)
    """

    def __init__(self, tokenizer: TokenizerWrapper | None) -> None:
        """For one text; without a tokenizer every piece is empty."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # The text of ids[_before:_read] is given already. What comes after it is decoded together with it, since
        # tokenizers decide by the neighbours where a space goes.
        self._before = self._read = 0
        self._unread = ""

    @property
    def unread(self) -> str:
        """The decoded text of the last tokens, which is withheld because it ends in an incomplete character."""
        return self._unread

    @property
    def ahead(self) -> str:
        """The complete characters of `unread`."""
        return self._unread.rstrip("\ufffd")

    def add(self, token: int) -> str:
        """The text that a token makes readable; maybe empty."""
        self._ids.append(token)
        return self._advance(is_last=False)

    def alone(self, token: int) -> str:
        """The text of a token by itself, whatever comes before it."""
        return "" if self._tokenizer is None else cast(str, self._tokenizer.decode([token]))

    def finish(self) -> str:
        """What is left: a character that was never completed."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        if self._tokenizer is None:
            return ""
        given: str = self._tokenizer.decode(self._ids[self._before : self._read])
        whole: str = self._tokenizer.decode(self._ids[self._before :])
        fresh = whole[len(given) :]
        if not fresh or (fresh.endswith("\ufffd") and not is_last):
            self._unread = fresh
            return ""
        self._before, self._read, self._unread = self._read, len(self._ids), ""
        return fresh


class GrowingText:
    """The text of a generation, token by token: without end-of-text tokens, and up to a stop string."""

    def __init__(self, tokenizer: TokenizerWrapper | None, opened: Open) -> None:
        """For one generation.

        Args:
            tokenizer: None where the target has none; then every piece is empty.
            opened: what began it.
        """
        self._detokenizer = Detokenizer(tokenizer)
        self._silent = opened.stop_tokens
        self._matcher = StopMatcher(opened.settings.stop) if opened.settings.stop else None
        self.readable = ""  # what the last token has completed, given or withheld

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return None if self._matcher is None else self._matcher.found

    @property
    def tail(self) -> str:
        """The decoded text of the tokens so far that was not given: it may begin a stop string, or be half a character.

        Empty once the text is over.
        """
        if self._matcher is None:
            return self._detokenizer.unread
        return "" if self.stop is not None else self._matcher.withheld + self._detokenizer.unread

    def alone(self, token: int) -> str:
        """The text of a token by itself, whatever comes before it."""
        return self._detokenizer.alone(token)

    def add(self, token: int, *, is_last: bool) -> str:
        """What a token gives to read, maybe empty; with the last one, whatever was withheld."""
        piece = "" if token in self._silent else self._detokenizer.add(token)
        ahead = self._detokenizer.ahead
        rest = self._detokenizer.finish() if is_last else ""
        self.readable = piece + rest
        if self._matcher is None:
            return self.readable
        given = self._matcher.add(piece, ahead)
        return given + self._matcher.finish(rest) if is_last else given


class StopFinder:
    """Reads what a generation is about to commit, for stop strings."""

    def __init__(self, tokenizer: TokenizerWrapper, opened: Open) -> None:
        """For one generation that has stop strings."""
        self._text: GrowingText | None = GrowingText(tokenizer, opened)

    def resume(self, tokens: Iterable[int]) -> None:
        """Go on behind tokens that were generated before, and in which no stop string is complete."""
        if self._text is not None:
            for token in tokens:
                self._text.add(token, is_last=False)

    def __call__(self, commit: Commit) -> Stop | None:
        """Where a stop string ends the text, if it does in this round; to be called with each, in order."""
        if self._text is None:
            return None
        # Somebody else's code, called in the middle of the target's work. Who reads the text will meet the same error.
        try:
            for i, token in enumerate(commit.tokens, start=1):
                self._text.add(token, is_last=commit.finish_reason is not None and i == len(commit.tokens))
                if self._text.stop is not None:
                    return Stop(self._text.stop, i)
        except Exception as error:
            logger.warning("session %d is not searched for stop strings any more: %s", commit.session, error)
            self._text = None
        return None


def check_vocabularies(target: TokenizerWrapper, draft: TokenizerWrapper) -> None:
    """Compare what two tokenizers mean by their ids.

    Ids that only one of them has are no harm: the target never confirms what it does not know, and
    padding rows at the end of an embedding have no token at all.

    Raises: VocabularyMismatchError: an id that both have stands for different tokens.
    """
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    different = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if different or not ours.keys() & theirs.keys():
        examples = ", ".join(f"id {i} is {shown(ours[i])} and {shown(theirs[i])}" for i in different[:3])
        raise VocabularyMismatchError(
            f"target and draft use different vocabularies: {len(different)} of {len(ours)} ids differ "
            f"({examples or 'they share none'}); use a draft model with the target's tokenizer"
        )
