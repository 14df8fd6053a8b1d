"""The checks of the self-test: each passes on this device, and fails on a runtime that was broken on purpose."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from models import llama

import protocol.acceptance
import runtime
from actors.actor import ModelActor
from actors.mlx.sequence import MLXSequence
from actors.workers.thread_worker import ThreadWorker
from runtime.selftest import exactness, speed, stability
from runtime.selftest.findings import Finding
from runtime.selftest.subject import Subject

pytestmark = pytest.mark.slow


class TinyTokenizer:
    """Encodes every text as the same few ids."""

    def encode(self, text: str) -> list[int]:
        return [1 + i % 60 for i in range(9 + len(text) % 20)]


class TinySubject(Subject):
    """Two tiny models in place of those on disk."""

    def load(self, role: str, dtype: Any = None) -> Any:
        return llama(0 if role == "target" else 1), None

    def prompts(self, tokenizer: Any) -> list[tuple[int, ...]]:
        return [tuple(TinyTokenizer().encode(text)) for text in ("x", "xyz")]


def tiny(**changes: Any) -> Subject:
    return TinySubject(**{"seconds": 1.0, "max_tokens": 16, **changes})


EXACTNESS = [
    exactness.greedy_equality,
    exactness.seeded_equality,
    exactness.concurrent_logits,
    exactness.noise,
    exactness.not_a_number,
    exactness.kernels,
]
STABILITY = [
    stability.streams,
    stability.opening,
    stability.failures,
    stability.device_isolation,
    stability.failing_allocation,
]
SPEED = [speed.prices, speed.overlap, speed.switch_intervals, speed.memory]


@pytest.mark.parametrize("check", [*EXACTNESS, *STABILITY, *SPEED], ids=lambda check: check.__name__)
def test_a_check_passes_here(check: Callable[[Subject], Finding]) -> None:
    finding = check(tiny())
    assert finding.status == "passed", finding


# --- broken on purpose ----------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def accept_everything(patch: Patch) -> None:
    patch.setattr(protocol.acceptance, "count_matches", lambda chosen, drafted: len(drafted))


def forget_the_key(patch: Patch) -> None:
    draws = itertools.count()
    patch.setattr(protocol.acceptance, "key_for", lambda *_: mx.random.key(next(draws)))


def noise_of_the_thread(patch: Patch) -> None:
    gumbel = mx.random.gumbel
    patch.setattr(
        mx.random, "gumbel", lambda *args, **named: gumbel(*args, **named) + len(threading.current_thread().name)
    )


def overlook_nan(patch: Patch) -> None:
    largest = mx.max
    patch.setattr(mx, "max", lambda a, **named: largest(mx.where(mx.isnan(a), mx.array(0, a.dtype), a), **named))


def rewind_too_little(patch: Patch) -> None:
    rewind = MLXSequence.rewind
    patch.setattr(
        MLXSequence, "rewind", lambda self, length: rewind(self, length + 1) if length > 40 else rewind(self, length)
    )


def models_that_disturb_each_other(patch: Patch) -> None:
    """Logits are right while one model computes, and others while two do."""
    at_work: set[int] = set()
    both = threading.Barrier(2)

    class Disturbed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.layers = model, model.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            at_work.add(threading.get_ident())
            if threading.active_count() > self.num_threads_alone + 1:
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(5)
                return self.model(inputs, cache=cache) + len(at_work)
            return self.model(inputs, cache=cache)

    load = TinySubject.load

    def load_disturbed(self: TinySubject, role: str, dtype: Any = None) -> Any:
        model = Disturbed(load(self, role, dtype)[0])
        model.num_threads_alone = threading.active_count()
        return model, None

    patch.setattr(TinySubject, "load", load_disturbed)


def keep_every_array(patch: Patch) -> None:
    kept: list[mx.array] = []
    feed = MLXSequence.feed

    def feed_and_keep(self: MLXSequence, *args: Any) -> Any:
        kept.append(mx.zeros((2**20,)))
        mx.eval(kept[-1])
        return feed(self, *args)

    patch.setattr(MLXSequence, "feed", feed_and_keep)


def keep_threads(patch: Patch) -> None:
    async def leave(self: ThreadWorker, *_: object) -> None:
        return None

    patch.setattr(ThreadWorker, "__aexit__", leave)


def fail_for_good(patch: Patch) -> None:
    """Any failed job is taken for the end of its model."""

    async def is_dead(self: Any, *_: Any) -> bool:
        return False

    patch.setattr(ModelActor, "_still_works", is_dead)


def move_the_default_stream(patch: Patch) -> None:
    open_sync = runtime.open_sync

    def open_and_move(*args: Any, **named: Any) -> Any:
        mx.set_default_stream(mx.new_stream(mx.default_device()))
        return open_sync(*args, **named)

    patch.setattr(runtime, "open_sync", open_and_move)


@pytest.fixture
def default_stream() -> Iterator[None]:
    before = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(before)


@pytest.mark.usefixtures("default_stream")
@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        (exactness.greedy_equality, accept_everything),
        (exactness.seeded_equality, forget_the_key),
        (exactness.concurrent_logits, models_that_disturb_each_other),
        (exactness.noise, noise_of_the_thread),
        (exactness.not_a_number, overlook_nan),
        (exactness.kernels, accept_everything),
        (stability.streams, keep_every_array),
        (stability.opening, keep_threads),
        (stability.failures, accept_everything),
        (stability.device_isolation, move_the_default_stream),
        (stability.failing_allocation, fail_for_good),
    ],
    ids=lambda each: each.__name__,
)
def test_a_check_fails_on_a_runtime_that_is_broken(
    check: Callable[[Subject], Finding], break_it: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    break_it(monkeypatch)
    finding = check(tiny())
    assert finding.status == "failed", finding


def test_models_that_are_too_large_fail_the_check_of_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 10})
    assert speed.memory(tiny()).status == "failed"
