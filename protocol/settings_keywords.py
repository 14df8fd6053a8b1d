"""Settings as keyword arguments, for type checkers and completion: `stream(prompt, max_tokens=200)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict

from protocol.logits_processors import LogitsProcessor, Sampler
from protocol.settings import Acceptance


class SettingsArguments(TypedDict, total=False):
    """The keyword arguments of `stream` and others. `Settings` explains them, and converts those with a wider type."""

    max_tokens: int | None
    temperature: float
    draft_temperature: float | None
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Iterable[int] | None
    seed: int | None
    thinking_budget: int | None
    stop: str | Iterable[str] | None
    stop_tokens: Iterable[int] | None
    ignore_eos: bool
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int | None
    presence_penalty: float | None
    presence_context_size: int | None
    frequency_penalty: float | None
    frequency_context_size: int | None
    logits_processors: Iterable[LogitsProcessor] | None
    sampler: Sampler | None
    logprobs: int
    prefill_step_size: int | Literal["auto"]
    acceptance: Acceptance
    lookahead: int | Literal["auto"]
    prediction: Iterable[int] | None
    reuse_prefix: bool
    prompt_cache_file: str | None


class ScoreArguments(TypedDict, total=False):
    """The keyword arguments of `score`, which explains them."""

    logprobs: int
    reuse_prefix: bool
    prefill_step_size: int | Literal["auto"]
