"""The buffers that MLX keeps for later use are freed, and Python's other threads run meanwhile."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest
from sweeps import sweep

from actors.mlx import memory as mlx_memory

pytestmark = pytest.mark.usefixtures("spare_buffers")


def fill_buffer_cache() -> None:
    """Have MLX keep a buffer that nobody uses."""
    mx.eval(mx.ones((256, 256)) + 1)
    mx.synchronize()  # MLX's thread refers to the buffer until it is done
    assert mx.get_cache_memory() >= 256 * 256 * 4


@sweep("is_found", [True, False])
def test_buffers_that_mlx_keeps_are_freed_even_if_mlxs_function_is_not_found(
    is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_found:
        monkeypatch.setattr(mlx_memory, "_clear_cache_without_gil", lambda: None)
    fill_buffer_cache()
    for _ in range(2):  # the second time, nothing is left to free
        mlx_memory.release_buffers()
        assert mx.get_cache_memory() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="mx.clear_cache was seen to wait for other threads on Linux only")
def test_mlxs_function_is_found() -> None:
    assert mlx_memory._clear_cache_without_gil() is not None


# MLX evaluates an array that it reads from a Python file on a thread of its own, and calls `readinto` there. `readinto`
# waits for a thread that begins to run when `release_buffers` is about to be called. So `release_buffers` waits for the
# evaluation, the evaluation for that thread, and that thread for the GIL. If `release_buffers` held the GIL, it would
# never return.
GIL_PROGRAM = """
    import faulthandler, io, sys, threading

    import mlx.core as mx
    import numpy as np

    from actors.mlx import memory

    class WaitingFile(io.BytesIO):
        def readinto(self, buffer):
            if memoryview(buffer).nbytes == array.nbytes:  # not the header
                is_evaluating.set()
                has_run.wait()
            return super().readinto(buffer)

    def load():
        with mx.stream(mx.cpu):
            loaded.append(mx.load(file, format="npy"))

    def count():
        global num_runs
        is_calling.wait()
        num_runs += 1
        has_run.set()

    array, num_runs, loaded = np.ones((64, 64), np.float32), 0, []
    is_evaluating, is_calling, has_run = threading.Event(), threading.Event(), threading.Event()
    saved = io.BytesIO()
    np.save(saved, array)
    file = WaitingFile(saved.getvalue())
    mx.set_default_device(mx.cpu)
    mx.eval(mx.ones((256, 256)) + 1)
    mx.synchronize()
    assert mx.get_cache_memory() > 0

    faulthandler.dump_traceback_later(60, exit=True)  # a deadlock ends as a failure
    threads = [threading.Thread(target=load), threading.Thread(target=count)]
    for thread in threads:
        thread.start()
    is_evaluating.wait()
    # From here on, this thread gives up the GIL only where it waits, and the other one cannot run before the call.
    sys.setswitchinterval(1000)
    is_calling.set()
    assert num_runs == 0
    memory.release_buffers()
    assert num_runs == 1
    for thread in threads:
        thread.join()
    assert mx.array_equal(loaded[0], mx.array(array))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mx.clear_cache was seen to wait for other threads on Linux only")
def test_other_threads_run_while_buffers_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(GIL_PROGRAM)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
