"""Arrays that are read back while a launched step may still read them have buffers of their own.

On CUDA, reading an array that is a view copies its buffer to the host and frees it (mlx/backend/cuda/allocator.cpp). A
step that was launched before, and reads the same buffer, would then read freed memory.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from sweeps import sweep

from actors.drafters.draft_steps import guesses_by_match
from actors.sampling.logits_pipeline import LogitCheck
from protocol.settings import Settings
from protocol.tensor import DTYPES, Tensor


def extent(array: mx.array) -> range:
    """The addresses of an array's bytes."""
    first = np.array(array, copy=False).__array_interface__["data"][0]
    return range(first, first + array.nbytes)


def overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def test_the_next_steps_choice_is_no_view_of_what_is_read_back() -> None:
    logits = mx.random.normal((1, 64), key=mx.random.key(3))
    lazy = guesses_by_match(logits, LogitCheck.of(logits, logits), Settings(), [(0, 5)], 64)
    mx.eval(*lazy.arrays())
    assert not overlap(extent(lazy.choices), extent(lazy.confidences))
    assert lazy.choices.tolist() == [guess.token for guess in lazy.read()]


def arrays() -> Iterator[mx.array]:
    buffer = mx.random.uniform(-100, 100, (2, 8, 6), key=mx.random.key(0))
    mx.eval(buffer)
    for dtype in (mx.float32, mx.bfloat16, mx.float16, mx.int8, mx.uint32):
        cast = buffer.astype(dtype)
        mx.eval(cast)
        yield cast  # contiguous
        yield cast[:1]  # a view of the first bytes
        yield cast[:, :3]  # a view with gaps, as of a cache with room for more tokens
        yield cast.transpose(0, 2, 1)
    yield mx.array([], mx.float32)
    yield mx.array(3.5)


@sweep("array", list(arrays()))
def test_the_bytes_of_a_tensor_are_a_copy(array: mx.array) -> None:
    mx.eval(array)
    tensor = Tensor.of(array)
    assert len(tensor.data) == array.size * DTYPES[tensor.dtype]
    assert mx.array_equal(tensor.array(), array)
    if array.size and array.dtype != mx.bfloat16:  # numpy has no bfloat16
        first = np.frombuffer(tensor.data, np.uint8).__array_interface__["data"][0]
        assert not overlap(range(first, first + len(tensor.data)), extent(array))
