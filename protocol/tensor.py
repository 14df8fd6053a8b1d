"""A tensor: an array's bytes with their type and shape, for files and messages."""

from __future__ import annotations

from typing import Any, Final, cast

import attrs
import mlx.core as mx

# The names that safetensors uses.
_MLX_DTYPES: Final = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "U64": mx.uint64,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "C64": mx.complex64,
}
_NAMES: Final = {dtype: name for name, dtype in _MLX_DTYPES.items()}

DTYPES: Final = {name: dtype.size for name, dtype in _MLX_DTYPES.items()}
"""Bytes of one element, by the name of its type."""


@attrs.frozen
class Tensor:
    """An array's bytes, which any thread may read."""

    dtype: str  # one of `DTYPES`
    shape: tuple[int, ...]  # its dimensions, any number of them
    data: memoryview  # its elements in row-major order, little-endian: `prod(shape)` times `DTYPES[dtype]` bytes

    @classmethod
    def of(cls, array: mx.array) -> Tensor:
        """The bytes of an array as they are now, whatever is written to it later; on a thread that may evaluate it."""
        # The operation makes a copy. Without it this may be a view of a cache's buffer, and on CUDA reading the bytes
        # of a view moves the buffer, which a pass that was launched before may still be reading.
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8) | mx.array(0, mx.uint8)
        mx.eval(flat)
        return cls(_NAMES[array.dtype], tuple(array.shape), memoryview(cast(Any, flat)))

    def array(self) -> mx.array:
        """The array, evaluated."""
        dtype = _MLX_DTYPES[self.dtype]
        array = mx.zeros(self.shape, dtype)
        if len(self.data) > 0:
            array = mx.array(cast(Any, self.data)).view(dtype).reshape(self.shape)
        mx.eval(array)
        return array
