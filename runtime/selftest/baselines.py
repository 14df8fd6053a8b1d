"""What the runtime is compared with: mlx-lm's own decoding, and models on plain threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from actors.workers.thread_pool import release_streams

T = TypeVar("T")

NUM_TEXT_TOKENS = 256


def plain_text(model: Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy text of mlx-lm's plain decoding; no end-of-text token ends it."""
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens)]


def prefill_and_step(model: Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """The logits (1, V) after a prompt (1, n), and after the likeliest token that follows it; lazy."""
    cache = make_prompt_cache(model)
    first = model(tokens, cache=cache)[:, -1]
    return first, model(mx.argmax(first, axis=-1)[None], cache=cache)[:, -1]


def median_step_s(model: Module, seconds: float) -> float:
    """The median time of a token, from decoding texts of `NUM_TEXT_TOKENS` tokens for `seconds`."""
    times: list[float] = []
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at or len(times) < 3:
        if len(times) % NUM_TEXT_TOKENS == 0:
            cache = make_prompt_cache(model)
            token = mx.argmax(model(mx.array([[1 + i % 50 for i in range(64)]]), cache=cache)[:, -1], axis=-1)
            mx.eval(token)
        began = time.perf_counter()
        token = mx.argmax(model(token[None], cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def on_thread(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own."""
    return in_parallel({"": function})[""]


def in_parallel(functions: dict[str, Callable[[], T]]) -> dict[str, T]:
    """Call functions at the same time, each on a thread of its own, which releases its streams of MLX at its end.

    Raises: what one of them raised.
    """
    together = threading.Barrier(len(functions))

    def call(function: Callable[[], T]) -> T:
        together.wait()  # until each has a thread of its own
        try:
            return function()
        finally:
            release_streams()

    with ThreadPoolExecutor(len(functions), thread_name_prefix="selftest") as threads:
        results = {name: threads.submit(call, function) for name, function in functions.items()}
    return {name: result.result() for name, result in results.items()}


def threads_at_work() -> list[str]:
    """Names of this process's threads that work for a runtime."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")]
