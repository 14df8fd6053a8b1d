"""Tokenizers: mlx-lm's wrapper of one that has tokens, private copies, and how one vocabulary is read in another."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.convert_slow_tokenizer import bytes_to_unicode

from protocol.errors import ModelError, SettingsError, VocabularyMismatchError
from protocol.reprs import shown
from protocol.validation import must_be
from protocol.vocabulary_map import Vocabulary, VocabularyMap, map_vocabularies
from runtime.loading.model_files import NO_TOKENIZER

logger = logging.getLogger("outrider")

_REMEDY = "use a draft model with the target's tokenizer"

_BLANK = "\u2581"  # in tokenizers in the way of SentencePiece
# By the character that stands for it in a byte-level token, as in GPT-2.
_BYTES: dict[str, int] = {spelled: byte for byte, spelled in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def wrapped(tokenizer: Any, named: str) -> TokenizerWrapper | None:
    """mlx-lm's wrapper around a tokenizer, or the wrapper itself; None for None. Raises: ModelError: it is empty."""
    if tokenizer is None:
        return None
    wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    if set(wrapper.get_vocab().values()) <= set(wrapper.all_special_ids):
        raise ModelError(f"cannot load {named}: {NO_TOKENIZER}")
    return wrapper


def check_template_args(args: Any) -> None:
    """Raises: SettingsError: `chat_template_args` is not a mapping by name, or has what the prompt decides."""
    if args is not None and (not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args)):
        raise must_be("chat_template_args", "a mapping from names to values", args)
    if taken := set(args or ()) & {"add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}:
        raise SettingsError(f"chat_template_args cannot have {min(taken)}, which the prompt decides; leave it out")


def copy_of(
    tokenizer: TokenizerWrapper | None, chat_template_args: Mapping[str, Any] = MappingProxyType({})
) -> TokenizerWrapper | None:
    """A private copy of a tokenizer, which several threads may use at once; the original if it cannot be copied. Takes
    a second if the vocabulary is large.

    Hugging Face's tokenizers keep truncation and padding as a state, which each call sets before it encodes. All uses
    of the copy want the same, so its state is never set. Its chat template gets the `chat_template_args`.
    """
    if tokenizer is None:
        return None
    private = copy.copy(tokenizer)
    if chat_template_args:
        with_args = partial(private.apply_chat_template, **chat_template_args)
        private.apply_chat_template = with_args  # type: ignore[method-assign]
    # Third-party code, some of it from a model's repository: it may raise anything, and most need no copy.
    try:
        private._tokenizer = copy.deepcopy(tokenizer._tokenizer)
        private.encode("")  # the first call drops the truncation and padding that the tokenizer's file asks for
    except Exception as error:
        logger.info("the tokenizer %s cannot be copied: %s", type(tokenizer._tokenizer).__name__, error)
        if not chat_template_args:
            return tokenizer
        private._tokenizer = tokenizer._tokenizer
    return private


def vocabulary_map(
    target: TokenizerWrapper, target_size: int, draft: TokenizerWrapper, draft_size: int
) -> VocabularyMap | None:
    """How a draft model reads its target's tokens; None if the vocabularies are the same. Sizes are widths of logits.
    For the thread of the draft model, whose tokenizer is used. Takes a second for large vocabularies.

    Raises: VocabularyMismatchError: they share no token, or a tokenizer does not tell its tokens' bytes.
    """
    if (difference := _difference(target, draft)) is None:
        return None
    ours, theirs = vocabulary(target, target_size), vocabulary(draft, draft_size)
    if ours is None or theirs is None:
        whose = "target" if ours is None else "draft model"
        raise VocabularyMismatchError(
            f"{difference}, and the {whose}'s tokenizer does not tell the bytes of its tokens; {_REMEDY}"
        )

    found = map_vocabularies(ours, theirs, partial(_tokenized, target), partial(_tokenized, draft))
    if not found.shared:
        raise VocabularyMismatchError(f"{difference}, and no token is in both; {_REMEDY}")
    return found


def _tokenized(tokenizer: TokenizerWrapper, texts: Sequence[str]) -> list[list[int]]:
    backend: Any = tokenizer._tokenizer.backend_tokenizer
    return [encoding.ids for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]


def _difference(target: TokenizerWrapper, draft: TokenizerWrapper) -> str | None:
    """How two vocabularies differ, as the beginning of a message; None if they have the same token for each id."""
    target_tokens = {i: token for token, i in target.get_vocab().items()}
    draft_tokens = {i: token for token, i in draft.get_vocab().items()}
    shared = target_tokens.keys() & draft_tokens.keys()
    different = [i for i in sorted(shared) if target_tokens[i] != draft_tokens[i]]
    if shared and not different:
        return None
    examples = ", ".join(f"id {i} is {shown(target_tokens[i])} and {shown(draft_tokens[i])}" for i in different[:3])
    return (
        f"target and draft use different vocabularies: {len(different)} of {len(target_tokens)} ids differ "
        f"({examples or 'they share none'})"
    )


def vocabulary(tokenizer: TokenizerWrapper, size: int) -> Vocabulary | None:
    """The tokens of a tokenizer, for logits of a width of `size`; None if it does not tell their bytes: it is not from
    the library `tokenizers`, or neither byte-level nor like SentencePiece.
    """
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    if (spelling := _spelling(json.loads(backend.decoder.__getstate__()))) is None:
        return None
    spelled, has_byte_tokens = spelling
    added = backend.get_added_tokens_decoder()
    special = {id: token.content for id, token in added.items() if token.special}
    names = {id: name for name, id in tokenizer.get_vocab().items()}
    special |= {id: names[id] for id in {*tokenizer.all_special_ids, *tokenizer.eos_token_ids} if id in names}
    pieces: dict[int, bytes] = {}
    of_bytes: dict[int, bytes] = {}  # come last, so that other tokens with the same bytes are preferred
    for id, name in sorted(names.items()):
        if id in special:
            continue
        if id in added:
            pieces[id] = added[id].content.encode()
        elif has_byte_tokens and (byte := byte_fallback(name)) is not None:
            of_bytes[id] = byte
        else:
            pieces[id] = spelled(name)
    main_end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
    ends = sorted(tokenizer.eos_token_ids, key=lambda end: (end != main_end, end))
    return Vocabulary(
        size=size,
        pieces=pieces | of_bytes,
        special=special,
        ends=tuple(end for end in ends if end in special),
        begin=begin,
        adds_begin=begin is not None and list(tokenizer.encode("a"))[:1] == [begin],
        unknown=tokenizer.unk_token_id,
    )


def _spelling(decoder: dict[str, Any]) -> tuple[Callable[[str], bytes], bool] | None:
    """What names of tokens spell, and whether some stand for single bytes, by a decoder; None if it has another way."""
    parts = list(_parts(decoder))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return lambda name: byte_level_piece(name) or name.encode(), False
    metaspace = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), None)
    is_replaced = any(part["type"] == "Replace" and part["pattern"] == {"String": _BLANK} for part in parts)
    if metaspace is None and not is_replaced:
        return None
    return lambda name: name.replace(metaspace or _BLANK, " ").encode(), "ByteFallback" in kinds


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def byte_level_piece(name: str) -> bytes | None:
    """The bytes of a token of a byte-level tokenizer; None if its name has characters that stand for no byte."""
    values = [_BYTES.get(character) for character in name]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else None


def byte_fallback(name: str) -> bytes | None:
    """The byte of a token that stands for one, as SentencePiece names it; None for other tokens."""
    byte = _BYTE_TOKEN.fullmatch(name)
    return None if byte is None else bytes([int(byte[1], 16)])
