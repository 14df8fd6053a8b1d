"""Between text and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.decoders import DecodeStream

from protocol.errors import PromptError, VocabularyMismatchError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


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
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"a prompt of token ids must hold whole numbers, got {token!r} among them")
        if not 0 <= token < vocab_size:
            raise PromptError(f"prompt token {token} is outside the target's vocabulary of {vocab_size} ids")
    return ids


def _encode(prompt: Prompt, tokenizer: TokenizerWrapper | None) -> tuple[Any, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not text")
        # As mlx-lm does: a prompt that spells out its own begin-of-text token gets no second one.
        spelled_out = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid text: {error}; it must be encodable as UTF-8") from error
        # Not verbose: transformers would warn of long prompts, which are refused in words of our own.
        return tuple(tokenizer.encode(prompt, add_special_tokens=not spelled_out, verbose=False))
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
        raise PromptError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}")
    items = tuple(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    if not items or not isinstance(items[0], Mapping):
        return items
    if tokenizer is None:
        raise PromptError("the target was opened without a tokenizer, so a prompt must be token ids, not messages")
    if not tokenizer.has_chat_template:
        raise PromptError("the target's tokenizer has no chat template; give the prompt as text or token ids")
    return tuple(cast(Any, tokenizer).apply_chat_template(list(items), add_generation_prompt=True))


class Detokenizer:
    """The text of a growing list of tokens, piece by piece.

    The pieces add up to `tokenizer.decode(all the ids)`, whatever the script: a character whose bytes
    are spread over tokens comes with the last of them. (mlx-lm's own detokenizers drop a space at the
    start of the text, which a continuation needs.)
    """

    def __init__(self, tokenizer: TokenizerWrapper | None) -> None:
        """For one text; without a tokenizer every piece is empty."""
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """The text that a token makes readable; maybe empty."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        if self._fast is None:
            whole: str = self._tokenizer.decode(self._ids)
            piece = whole[self._given :] if not whole.endswith("\ufffd") else ""
        else:
            piece = self._stream.step(self._fast, token) or ""
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """What is left: a character that was never completed."""
        if self._tokenizer is None or not self._ids:
            return ""
        whole: str = self._tokenizer.decode(self._ids)
        piece = whole[self._given :]
        self._given += len(piece)
        return piece


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
        examples = ", ".join(f"id {i} is {ours[i]!r} and {theirs[i]!r}" for i in different[:3])
        raise VocabularyMismatchError(
            f"target and draft use different vocabularies: {len(different)} of {len(ours)} ids differ "
            f"({examples or 'they share none'}); use a draft model with the target's tokenizer"
        )
