"""What MLX keeps is given back, by the function of its own that does not hold Python's lock."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest

from actors.mlx import memory as mlx_memory

pytestmark = pytest.mark.usefixtures("spare_buffers")


def keep_something() -> None:
    mx.eval(mx.ones((256, 256)) + 1)


def test_what_mlx_keeps_is_given_back() -> None:
    keep_something()
    mlx_memory.release_buffers()
    assert mx.get_cache_memory() == 0
    # With nothing to give back, too.
    mlx_memory.release_buffers()


def test_where_the_function_is_not_found_pythons_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_memory, "_without_the_lock", lambda: None)
    keep_something()
    mlx_memory.release_buffers()
    assert mx.get_cache_memory() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only there the wait was seen")
def test_the_function_is_found() -> None:
    assert mlx_memory._without_the_lock() is not None
