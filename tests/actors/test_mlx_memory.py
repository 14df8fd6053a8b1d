"""The buffers that MLX keeps for later use are freed without touching the streams of other threads."""

import threading

import mlx.core as mx
import pytest
from sweeps import sweep

from actors.mlx import memory

pytestmark = pytest.mark.usefixtures("spare_buffers")

needs_cpu_build = pytest.mark.skipif(
    mx.metal.is_available() or mx.cuda.is_available(), reason="only a build for CPUs synchronises all streams"
)


def fill_buffer_cache() -> None:
    """Have MLX keep a buffer that nobody uses."""
    mx.eval(mx.ones((256, 256)) + 1)
    mx.synchronize()  # MLX's thread refers to the buffer until it is done
    assert mx.get_cache_memory() >= 256 * 256 * 4


def no_error() -> None:
    """What MLX's function does when nothing has failed."""


def of_another_thread() -> None:
    raise RuntimeError("[cudaFree] an illegal memory access was encountered")


@sweep("clear_cache", [no_error, of_another_thread])
def test_a_gpu_frees_its_buffers_and_an_error_met_meanwhile_is_not_raised(clear_cache, monkeypatch):
    num_calls = 0

    def counting() -> None:
        nonlocal num_calls
        num_calls += 1
        clear_cache()

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "clear_cache", counting)
    memory.release_buffers()
    assert num_calls == 1


@needs_cpu_build
def test_a_failure_of_one_threads_stream_is_raised_in_that_thread_alone() -> None:
    raised: list[str] = []
    is_launched, is_released = threading.Event(), threading.Event()

    def fail() -> None:
        singular = mx.linalg.inv(mx.zeros((64, 64)), stream=mx.cpu)
        mx.async_eval(singular)
        is_launched.set()
        is_released.wait()
        try:
            mx.eval(singular)
        except RuntimeError as error:
            raised.append(str(error))
        mx.clear_streams()

    thread = threading.Thread(target=fail)
    fill_buffer_cache()
    thread.start()
    is_launched.wait()
    try:
        memory.release_buffers()
    finally:
        is_released.set()
        thread.join()
    assert len(raised) == 1
    assert "factorization failed" in raised[0]
