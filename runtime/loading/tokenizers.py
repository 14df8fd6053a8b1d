"""Tokenizers: mlx-lm's wrapper of one that has tokens, and private copies with variables for the chat template."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import ModelError, SettingsError
from protocol.validation import must_be
from runtime.loading.model_files import NO_TOKENIZER

logger = logging.getLogger("outrider")


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
