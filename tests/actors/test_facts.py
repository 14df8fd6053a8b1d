"""Premises of the design about MLX and mlx-lm.

If one of these tests fails after an upgrade, a premise has changed. The test names the code that rests on it, which may
now be simpler, or wrong.
"""

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import outcome
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache
from sweeps import sweep


def on_another_thread(call: Callable[[], Any]) -> Any:
    """The result of a function on a thread of its own; what it raises is raised here."""
    results: list[outcome.Outcome[Any]] = []

    def run() -> None:
        results.append(outcome.capture(call))
        mx.synchronize()
        mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results.pop().unwrap()


def entries(length: int, first: float = 0.0) -> tuple[mx.array, mx.array]:
    """Keys and values for `length` tokens, numbered from `first`."""
    keys = (first + mx.arange(length, dtype=mx.float32)).reshape(1, 1, length, 1)
    return keys, -keys


# --- threads: why a model has one of its own, and what may cross (actors.workers.worker) ------------------


def test_streams_and_lazy_arrays_work_on_their_own_thread_only() -> None:
    stream, x = mx.new_stream(mx.cpu), mx.arange(4) * 2
    assert mx.sum(mx.ones(3), stream=stream).item() == 3
    for call in (lambda: mx.sum(mx.ones(3), stream=stream).item(), lambda: (x + 1).tolist()):
        with pytest.raises(RuntimeError, match="There is no Stream"):
            on_another_thread(call)
    mx.eval(x)
    assert on_another_thread(lambda: (x + 1).tolist()) == [1, 3, 5, 7]


def test_a_models_weights_are_lazy_until_somebody_evaluates_them() -> None:
    """Why `open` evaluates a model that is handed to it before its thread sees it."""
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="There is no Stream"):
        on_another_thread(lambda: layer(mx.ones((1, 4))).tolist())


def test_the_random_state_belongs_to_a_thread() -> None:
    """Why every draw has a key of its own (protocol.randomness)."""
    mx.random.seed(3)
    here = [mx.random.uniform().item() for _ in range(2)]
    mx.random.seed(3)
    assert mx.random.uniform().item() == here[0]
    on_another_thread(lambda: mx.random.seed(3))
    assert mx.random.uniform().item() == here[1]


# --- randomness: why noise is made at one width for both models (protocol.acceptance) -------------


def test_the_noise_of_an_entry_depends_on_the_size_of_the_array() -> None:
    key = mx.random.key(5)
    narrow, wide = mx.random.gumbel((16,), key=key), mx.random.gumbel((20,), key=key)
    assert not mx.array_equal(narrow, wide[:16])


# --- caches: why a class is asked, and not `is_trimmable` or `trim` (actors.mlx.cache_kinds) -------------


@sweep("kind, seen", [(KVCache, [0, 1, 2, 90]), (ConcatenateKVCache, [0, 1, 2, 3, 4, 90])])
def test_a_cache_forgets_what_is_trimmed_but_one_that_concatenates_keeps_it(kind: type, seen: list[int]) -> None:
    cache = kind()
    cache.update_and_fetch(*entries(5))
    assert cache.is_trimmable()
    assert cache.trim(2) == 2
    keys, _ = cache.update_and_fetch(*entries(1, first=90))
    assert keys.flatten().tolist() == seen


def test_a_rotating_cache_that_fills_in_mid_round_loses_what_it_overwrites() -> None:
    cache = RotatingKVCache(max_size=4)
    for i in range(3):
        cache.update_and_fetch(*entries(1, first=i))
    assert cache.is_trimmable(), "so says the cache before the round"
    for i in range(3, 6):
        cache.update_and_fetch(*entries(1, first=i))
        assert not cache.is_trimmable()
    assert cache.trim(3) == 3, "and afterwards it claims to have done it"
    keys, _ = cache.update_and_fetch(*entries(1, first=90))
    assert keys.flatten().tolist() != [0, 1, 2, 90]
