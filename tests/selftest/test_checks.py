"""The checks of the self-test: each passes on this device, and fails on a runtime that was broken on purpose."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from device_tables import all_tables
from fixed_lookaheads import auto
from models import Wrapped, llama, save
from scenario import Scenario
from simulation import run_simulation
from sweeps import sweep

import actors.mlx.memory
import actors.target.target_actor
import protocol.acceptance
import runtime
from actors.mlx.row_batch import RowBatch
from actors.mlx.row_caches import RowKVCache
from actors.mlx.sequence import MLXSequence
from actors.workers import thread_pool
from runtime.selftest import checks, exactness, speed, stability
from runtime.selftest.checks import Finding
from runtime.selftest.report import SelfTestReport
from runtime.selftest.runner import CheckRun
from runtime.selftest.subject import Subject

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


class TinySubject(Subject):
    """Two tiny models in place of those on disk."""

    def load(self, role: str, dtype: Any = None) -> Any:
        return llama(0 if role == "target" else 1), None

    def prompts(self, tokenizer: Any) -> list[tuple[int, ...]]:
        return [tuple(1 + i % 60 for i in range(length)) for length in (9, 23)]


TINY = TinySubject(seconds=1.0, max_tokens=16)

CHECKS = [
    exactness.greedy_equality,
    exactness.seeded_equality,
    exactness.concurrent_logits,
    exactness.noise,
    exactness.not_a_number,
    exactness.kernels,
    exactness.rows,
    stability.streams,
    stability.opening,
    stability.failures,
    stability.device_isolation,
    stability.failing_allocation,
    speed.overlap,
    speed.models,
]


@pytest.fixture(autouse=True)
def memory_is_refused(monkeypatch: Patch) -> None:
    """As on a GPU: an error where there is not enough memory. MLX's CPU backend ends the process."""

    def refuse(logits: mx.array) -> mx.array:
        raise RuntimeError("[malloc] Unable to allocate 281474976710656 bytes.")

    monkeypatch.setattr(stability, "memory_can_be_refused", lambda: True)
    monkeypatch.setattr(stability, "with_too_much_memory", refuse)


@pytest.fixture(autouse=True)
def less(monkeypatch: Patch) -> None:
    """Fewer openings and texts, which are enough here."""
    monkeypatch.setattr(stability, "NUM_OPENINGS", 3)
    monkeypatch.setattr(exactness, "ROW_LENGTHS", (5, 12, 21))


def test_on_a_cpu_nobody_asks_for_too_much_memory(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    if not stability.memory_can_be_refused():
        assert stability.failing_allocation(TINY).status == "skipped"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes_here(check: Callable[[Subject], Finding]) -> None:
    finding = check(TINY)
    assert finding.status == "passed", finding


@sweep(
    ("check", "names"),
    [
        (speed.speeds, {"mlx-lm plain", "mlx-lm speculative 2", "outrider lookahead 0", "outrider lookahead auto"}),
        (speed.shape, {"mlx-lm plain", "mlx-lm speculative 4", "outrider lookahead 0", "outrider lookahead auto"}),
        (speed.many_streams, {"1 streams, outrider at once", "3 streams, mlx-lm BatchGenerator"}),
    ],
)
def test_speeds_are_measured(
    check: Callable[[Subject], Finding], names: set[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    less = {
        "NUMBERS_OF_STREAMS": (1, 3),
        "NUM_REPEATS": 1,
        "NUM_QUICK_REPEATS": 1,
        "WIDTHS": (1, 4),
        "NUMBERS_OF_TEXTS": (1, 2),
    }
    for name, value in less.items():
        monkeypatch.setattr(speed, name, value)
    target, draft = (save(tmp_path / name, llama(seed)) for seed, name in enumerate(("target", "draft")))
    finding = check(Subject(target=target, draft=draft, seconds=1.0, max_tokens=16, shape="tiny", is_quick=True))
    assert finding.status == "passed"
    speeds = finding.figures["tokens_per_second"]
    assert names < speeds.keys()
    assert all(speed > 0 for speed in speeds.values())
    assert finding.figures["clock"] > 0


def test_a_cpu_is_spared_the_shape_of_a_real_pair() -> None:
    assert speed.shape(TINY).status == "skipped"


def test_what_python_takes_of_a_pass_is_measured_by_layers(monkeypatch: Patch) -> None:
    monkeypatch.setattr(speed, "NUMBERS_OF_STREAMS", (3,))
    monkeypatch.setattr(speed, "NUM_REPEATS", 1)
    monkeypatch.setattr(speed, "NUMBERS_OF_LAYERS", (1, 8))
    figures = speed.python(TINY).figures
    few, many = figures["building_s"].values()
    assert 0 < few < many
    assert set(figures["microseconds_a_token"]) >= {"1 streams, outrider plain", "3 streams, mlx-lm BatchGenerator"}


def test_auto_is_simulated_with_a_reports_price_tables(tmp_path: Path) -> None:
    finding = speed.prices(attrs.evolve(TINY, is_quick=True))
    assert finding.status == "passed"
    (check,) = (each for each in checks.CHECKS if each.name == "prices")
    SelfTestReport(False, runs=[CheckRun(check, finding, 1.0)]).write(tmp_path / "my.mac")
    read = all_tables(tmp_path / "my.json")
    # By tokens and by texts, as they are and in 4 bits.
    assert [sorted(table) for table in read] == [["draft", "target"], ["target"]] * 2
    assert [[width for width, _ in table["target"]] for table in read[:2]] == [list(speed.WIDTHS), [1, 2, 4, 8, 16]]
    for table in read:
        scenario = Scenario(0.8, 0.1, verify_table=table["target"], draft_table=table.get("draft", ()))
        assert run_simulation(scenario, num_tokens=20, make_policy=auto).speed > 0
    page = (tmp_path / "my.md").read_text()
    assert "### Passes: by texts that share a pass, the bundled pair" in page
    assert "| target, 64 tokens of text |" in page
    assert "It has no paths" in page


# --- broken on purpose ----------------------------------------------------------------------------


def accept_everything(patch: Patch) -> None:
    patch.setattr(protocol.acceptance, "count_matches", lambda chosen, drafted: len(drafted))


def forget_the_key(patch: Patch) -> None:
    draws = itertools.count()
    patch.setattr(
        protocol.acceptance, "keys_for", lambda _, decisions: mx.stack([mx.random.key(next(draws)) for _ in decisions])
    )


def noise_of_the_thread(patch: Patch) -> None:
    gumbel = mx.random.gumbel

    def draw(*args: Any, **named: Any) -> mx.array:
        return gumbel(*args, **named) + threading.get_native_id()

    patch.setattr(mx.random, "gumbel", draw)


def overlook_nan(patch: Patch) -> None:
    largest = mx.max

    def largest_number(array: mx.array, **named: Any) -> mx.array:
        return largest(mx.where(mx.isnan(array), mx.array(0, array.dtype), array), **named)

    patch.setattr(mx, "max", largest_number)


def mix_up_rows(patch: Patch) -> None:
    """Of three rows or more, each gets another one's logits. The probe, which has two, sees nothing of it."""
    feed = RowBatch.feed

    def feed_and_mix_up(self: RowBatch, tokens: Any, recorder: Any = None) -> dict[object, mx.array]:
        logits = feed(self, tokens, recorder)
        if len(logits) < 3:
            return logits
        lengths = {key: len(rows) for key, rows in logits.items()}
        keys = [*list(logits)[1:], next(iter(logits))]
        return {
            key: mx.repeat(logits[other][:1], lengths[key], axis=0) for key, other in zip(logits, keys, strict=True)
        }

    patch.setattr(RowBatch, "feed", feed_and_mix_up)


def see_other_rows_padding(patch: Patch) -> None:
    """A row sees what lies behind its text. The probe notices, so that texts take turns."""

    def everything(self: RowKVCache, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return mx.ones((self.offset.shape[0], 1, N, self._end), mx.bool_)

    patch.setattr(RowKVCache, "make_mask", everything)


class Disturbed(Wrapped):
    """Other logits while two models compute than while one does."""

    num_threads = 0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        num_computing = threading.active_count() - self.num_threads
        return super().__call__(inputs, cache) + (num_computing - 1)


def disturb_each_other(patch: Patch) -> None:
    patch.setattr(Disturbed, "num_threads", threading.active_count())
    load = TinySubject.load
    patch.setattr(TinySubject, "load", lambda self, role: (Disturbed(load(self, role)[0]), None))


def keep_an_array_of_each_pass(patch: Patch) -> None:
    kept: list[mx.array] = []
    feed = MLXSequence.feed

    def feed_and_keep(self: MLXSequence, *args: Any) -> mx.array | None:
        kept.append(mx.zeros((2**21,)))
        mx.eval(kept[-1])
        return feed(self, *args)

    patch.setattr(MLXSequence, "feed", feed_and_keep)


def leave_threads_at_work(patch: Patch) -> None:
    """A thread looks as if it still worked for the closed runtime."""
    patch.setattr(thread_pool, "IDLE", "outrider-target")


def take_every_failure_for_the_models(patch: Patch) -> None:
    def probe(model: Any) -> None:
        raise RuntimeError("as a model that has failed")

    patch.setattr(actors.target.target_actor, "probe", probe)


def overlook_failures(patch: Patch) -> None:
    """A pass that fails gives logits all the same."""

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model(inputs, cache=cache)

    patch.setattr(stability._Failing, "__call__", call)


def move_the_default_stream(patch: Patch) -> None:
    open_sync = runtime.open_sync

    def open_and_move(*args: Any, **named: Any) -> Any:
        mx.set_default_stream(mx.new_stream(mx.default_device()))
        return open_sync(*args, **named)

    patch.setattr(runtime, "open_sync", open_and_move)


def too_large(patch: Patch) -> None:
    patch.setattr(speed, "recommended_working_set", lambda: 10)


@pytest.fixture
def as_before() -> Iterator[None]:
    """Restores what a broken runtime leaves in this process: MLX's default stream, and names of idle threads."""
    stream = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(stream)
    for thread in thread_pool._idle:
        thread._thread.name = thread_pool.IDLE


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        (exactness.greedy_equality, accept_everything),
        (exactness.seeded_equality, forget_the_key),
        (exactness.concurrent_logits, disturb_each_other),
        (exactness.noise, noise_of_the_thread),
        (exactness.not_a_number, overlook_nan),
        (exactness.kernels, accept_everything),
        (exactness.rows, mix_up_rows),
        (exactness.rows, see_other_rows_padding),
        (stability.streams, keep_an_array_of_each_pass),
        (stability.opening, leave_threads_at_work),
        (stability.failures, overlook_failures),
        (stability.device_isolation, move_the_default_stream),
        (stability.failing_allocation, take_every_failure_for_the_models),
        (speed.models, too_large),
    ],
    ids=lambda each: each.__name__,
)
def test_a_check_fails_on_a_runtime_that_is_broken(
    check: Callable[[Subject], Finding], break_it: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        # Less is enough to see it.
        for families in ("FAMILIES", "ROW_FAMILIES"):
            patch.setattr(exactness, families, ("llama",))
        break_it(patch)
        finding = check(TINY)
    assert finding.status == "failed", finding
