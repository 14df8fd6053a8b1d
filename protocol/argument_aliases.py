"""Argument aliases: names that Outrider's arguments have elsewhere, for hints in errors about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


# The default of an argument that must be given: without one, Python would reject an alias before it could get its hint.
MISSING: Any = _Missing()

# From each alias to the setting or option of `open` that it stands for.
ALIASES = {
    # mlx-lm
    "chat_template_config": "chat_template_args",
    "decode_concurrency": "max_streams",
    "draft_model": "draft",
    "model": "target",
    "num_draft_tokens": "lookahead",
    "prompt_cache_bytes": "prefix_cache_bytes",
    "temp": "temperature",
    # transformers
    "assistant_model": "draft",
    "eos_token_id": "stop_tokens",
    "max_new_tokens": "max_tokens",
    "num_assistant_tokens": "lookahead",
    "prompt_lookup_num_tokens": "draft",
    "stop_strings": "stop",
    # requests to servers
    "chat_template_kwargs": "chat_template_args",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_speculative_tokens": "lookahead",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_token_ids": "stop_tokens",
    "top_logprobs": "logprobs",
}

NOTES = {"prompt_lookup_num_tokens": 'draft="ngram"'}  # hints to give besides the name


_ONE_DEVICE = (
    "MLX has one default device for the whole process, and both models compute there; call "
    "mx.set_default_device(mx.cpu) before, or give the command line --device cpu"
)

# Options of `mlx_lm.load`, which belong to one of the models.
_OF_MODEL_SPEC = ("adapter_path", "model_config", "quantize", "revision", "tokenizer_config", "trust_remote_code")

# What to do in place of options that do not exist here.
INSTEAD = {
    "device": _ONE_DEVICE,
    "target_device": _ONE_DEVICE,
    "chat_template": 'give the target as runtime.ModelSpec(path, tokenizer_config={"chat_template": ...})',
    "copy_corpus": "it was removed; drafts are copied from the stream's own text and its prediction=",
    "continue_final_message": 'give the last message as {"role": "assistant", "content": …, "prefix": True}',
    "prompt_cache": "prompt_cache_file= of a stream reads what mlx-lm has saved; reuse_prefix=True reuses what is read",
    **{name: f"give the model as runtime.ModelSpec(path, {name}=...)" for name in _OF_MODEL_SPEC},
}


def meant(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known argument that a name is an alias of, or similar to by `cutoff` (`difflib.get_close_matches`)."""
    known = tuple(known)
    if (here := ALIASES.get(name)) in known:
        return here
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None
