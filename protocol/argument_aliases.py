"""Argument aliases: what Outrider's arguments are called in mlx-lm, vLLM, transformers, llama.cpp and their CLIs.

One table serves every place where a user may give a name that does not exist here: options of `runtime.open`, settings
of a stream, fields of a request, and flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


# The default of an argument that must be given. Without a default, Python would reject a call that uses the argument's
# alias (`target_model`) before the alias could get its hint.
MISSING: Any = _Missing()

# The arguments of `runtime.open`.
OPEN_ARGUMENTS = (
    "target",
    "draft",
    "rewind",
    "max_kv_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "max_streams",
    "max_batch",
    "prefix_cache_bytes",
    "prefix_cache_dir",
    "prefix_cache_dir_bytes",
    "defaults",
    "chat_template_args",
    "trace",
    "tune_mlx",
    "group",
    "draft_rank",
    "work_ahead",
)

ALIASES = {
    # arguments of open
    "model": "target",
    "model_id": "target",
    "model_name": "target",
    "model_path": "target",
    "base_model": "target",
    "main_model": "target",
    "target_model": "target",
    "verifier": "target",
    "verifier_model": "target",
    "assistant_model": "draft",
    "draft_model": "draft",
    "draft_model_path": "draft",
    "drafter": "draft",
    "drafter_model": "draft",
    "method": "draft",
    "model_draft": "draft",
    "prompt_lookup": "draft",
    "prompt_lookup_num_tokens": "draft",
    "speculative_algorithm": "draft",
    "speculative_config": "draft",
    "speculative_draft_model_path": "draft",
    "speculative_model": "draft",
    "speculator": "draft",
    "cache_bits": "kv_bits",
    "kv_cache_bits": "kv_bits",
    "max_concurrent_requests": "max_streams",
    "max_num_seqs": "max_streams",
    "max_cache_bytes": "prefix_cache_bytes",
    "prompt_cache_bytes": "prefix_cache_bytes",
    "chat_template_config": "chat_template_args",
    "chat_template_kwargs": "chat_template_args",
    # settings
    "block_size": "lookahead",
    "draft_tokens": "lookahead",
    "draft_max": "lookahead",
    "gamma": "lookahead",
    "k": "lookahead",
    "num_assistant_tokens": "lookahead",
    "num_draft_tokens": "lookahead",
    "num_speculative_tokens": "lookahead",
    "spec_k": "lookahead",
    "spec_tokens": "lookahead",
    "speculative_num_draft_tokens": "lookahead",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "eos_token_id": "stop_tokens",
    "extra_eos_token": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "prefill_chunk_size": "prefill_step_size",
    "top_logprobs": "logprobs",
}

# Hints to give beside the name.
NOTES = {
    "method": 'draft="ngram" looks up, any other names a draft model',
    "prompt_lookup": 'draft="ngram"',
    "prompt_lookup_num_tokens": 'draft="ngram"',
    "speculative_config": 'draft="ngram" looks up, any other names a draft model',
}


_ONE_DEVICE = (
    "MLX has one default device for the whole process, and both models compute there; call "
    "mx.set_default_device(mx.cpu) before, or give the command line --device cpu"
)

# Options of `mlx_lm.load`, which belong to one of the models.
_OF_MODEL_SPEC = ("adapter_path", "model_config", "quantize", "revision", "tokenizer_config", "trust_remote_code")

# What to do in place of options that do not exist here.
INSTEAD = {
    "device": _ONE_DEVICE,
    "draft_device": _ONE_DEVICE,
    "target_device": _ONE_DEVICE,
    "chat_template": 'give the target as runtime.ModelSpec(path, tokenizer_config={"chat_template": ...})',
    "continue_final_message": 'give the last message as {"role": "assistant", "content": …, "prefix": True}',
    "prompt_cache": "prompt_cache_file= of a stream reads what mlx-lm has saved; reuse_prefix=True reuses what is read",
    **{name: f"give the model as runtime.ModelSpec(path, {name}=...)" for name in _OF_MODEL_SPEC},
}


def meant(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The argument that a user may have meant by a name that does not exist.

    Args:
        name: as the user gave it.
        known: the names that exist.
        cutoff: how similar a misspelt name must be to a known one, in [0, 1]; see `difflib.get_close_matches`.

    Returns: the name that it is an alias of, if that is known; else the most similar known name; else None.
    """
    known = tuple(known)
    if (here := ALIASES.get(name)) in known:
        return here
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None
