"""The pool of threads: however a piece of work ends, MLX's streams of a thread that ends are released."""

import queue
import threading
from collections.abc import Iterator

import mlx.core as mx
import outcome
import pytest

from actors.workers import thread_pool
from actors.workers.thread_pool import IDLE, PooledThread, run_on_thread

NAME = "a thread of these tests"


class FakeStreams:
    """MLX's functions about streams: who released them, and whether the device fails when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device_fails = False
        self.released_by: list[int] = []
        self._synchronize, self._clear = mx.synchronize, mx.clear_streams
        monkeypatch.setattr(mx, "synchronize", self.synchronize)
        monkeypatch.setattr(mx, "clear_streams", self.clear_streams)

    def synchronize(self) -> None:
        if self.device_fails:
            raise RuntimeError("[METAL] Command buffer execution failed")
        self._synchronize()

    def clear_streams(self) -> None:
        self.released_by.append(threading.get_ident())
        self._clear()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    # Threads of other tests stay out of this pool, and its threads out of theirs.
    monkeypatch.setattr(thread_pool, "_idle", [])
    monkeypatch.setattr(thread_pool, "_abandoned", [])
    fake = FakeStreams(monkeypatch)
    yield fake
    for thread in thread_pool._idle:
        thread.end()


def ended(work: thread_pool.Work) -> tuple[PooledThread, outcome.Outcome[None]]:
    """Do a piece of work on a thread of the pool: the thread, and how the work ended."""
    ends = queue.SimpleQueue[outcome.Outcome[None]]()
    thread = run_on_thread(NAME, work, ends.put)
    return thread, ends.get(timeout=30)


def joined(thread: PooledThread) -> int | None:
    thread._thread.join(30)
    assert not thread._thread.is_alive()
    return thread._thread.ident


def test_a_thread_whose_work_ends_well_serves_again_and_keeps_its_streams(streams: FakeStreams) -> None:
    first, end = ended(lambda: None)
    assert isinstance(end, outcome.Value)
    assert first._thread.name == IDLE
    second, _ = ended(lambda: None)
    assert second is first
    assert streams.released_by == []


def raises() -> None:
    raise ValueError("nothing that can be gone on from")


def test_a_thread_whose_work_raises_releases_its_streams_and_ends(streams: FakeStreams) -> None:
    thread, end = ended(raises)
    assert isinstance(end, outcome.Error)
    assert streams.released_by == [joined(thread)]
    assert thread not in thread_pool._idle


def test_the_process_waits_for_a_thread_that_reports_an_error(streams: FakeStreams) -> None:
    waited_for = queue.SimpleQueue[list[PooledThread]]()
    thread = run_on_thread(NAME, raises, lambda _: waited_for.put(list(thread_pool._abandoned)))
    assert thread in waited_for.get(timeout=30)
    joined(thread)


def test_a_device_that_fails_when_it_is_waited_for_keeps_no_streams(streams: FakeStreams) -> None:
    def work() -> None:
        mx.eval(mx.ones(4) + 1)
        streams.device_fails = True

    thread, end = ended(work)
    joined(thread)
    assert isinstance(end, outcome.Error)
    assert "Command buffer" in str(end.error)
    assert streams.released_by == [thread._thread.ident]
    assert thread not in thread_pool._idle
