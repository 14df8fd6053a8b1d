"""Vocabularies for grammars: llguidance, and its indices of tokenizers' vocabularies."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import SettingsError
from protocol.reprs import shown

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def library() -> Any:
    """The module `llguidance`, an extra. Raises: SettingsError: it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise SettingsError(
            "a grammar needs llguidance, which is not installed; pip install 'outrider[grammar]'"
        ) from error
    return llguidance


# By Hugging Face tokenizer: its end-of-text ids, and llguidance's index of its vocabulary.
_indices: WeakKeyDictionary[Any, tuple[list[int], LLTokenizer]] = WeakKeyDictionary()


def indexed(tokenizer: Any) -> LLTokenizer:
    """The index that llguidance makes of a vocabulary, cached for as long as the tokenizer exists.

    Raises: SettingsError: llguidance is not installed or cannot read the tokenizer.
    """
    inner, ends = _inner_tokenizer(tokenizer)
    known = _indices.get(inner)
    if known is None or known[0] != ends:
        from llguidance.hf import from_tokenizer

        try:
            known = _indices[inner] = ends, from_tokenizer(inner, eos_token=ends)
        except ValueError as error:
            raise SettingsError(f"llguidance cannot read the tokenizer {type(inner).__name__}: {error}") from error
    return known[1]


def tokenizer_json(tokenizer: Any) -> tuple[str, list[int]]:
    """A tokenizer as `tokenizers` serializes it, for another process to index, and its end-of-text ids.

    Raises: SettingsError: as `indexed`.
    """
    indexed(tokenizer)  # needed anyway, and raises if something is wrong
    inner, ends = _inner_tokenizer(tokenizer)
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), ends


def _inner_tokenizer(tokenizer: Any) -> tuple[Any, list[int]]:
    if not hasattr(tokenizer, "eos_token_id"):
        raise SettingsError(
            f"a grammar needs the target's tokenizer, as Runtime.tokenizer has it, got {shown(tokenizer)}"
        )
    library()
    # Another tokenizer is not wrapped first: that would take longer than all the rest.
    if isinstance(tokenizer, TokenizerWrapper):
        inner, ends = tokenizer._tokenizer, sorted(tokenizer.eos_token_ids)
    else:
        inner, ends = tokenizer, sorted({tokenizer.eos_token_id} - {None})
    if not ends:
        raise SettingsError("a grammar needs a tokenizer with an end-of-text token, and this one has none; set one")
    return inner, ends


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, by their text: those that do not match as text in a grammar.

    Raises: SettingsError: as `indexed`.
    """
    indexed(tokenizer)  # raises if something is wrong
    inner, _ = _inner_tokenizer(tokenizer)
    added = inner.backend_tokenizer.get_added_tokens_decoder()
    # As llguidance decides it (toktrie_hf_tokenizers/src/lib.rs).
    return {
        token.content: id
        for id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
