"""Quantised blocks of ggml's, as MLX's affine quantisation: q * scale + bias in groups of 32, or as floats.

Source: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray

from protocol.errors import ModelError
from runtime.loading.gguf.container import GGUFTensor

GROUP_SIZE = 32

_FLOATS = {Type.F32: mx.float32, Type.F16: mx.float16, Type.BF16: mx.bfloat16}

# Some operations of numpy's on bytes have a wider type in its annotations.
Bytes = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Unpacked = tuple[Bytes, Floats, Floats]  # (..., 32) values of each group, scales and biases


@attrs.frozen
class Packed:
    """A quantised tensor as MLX has it: values of `bits` bits in `weight`, and a scale and a bias for each group."""

    bits: int
    weight: mx.array
    scales: mx.array
    biases: mx.array


def floats_of(tensor: GGUFTensor, dtype: mx.Dtype) -> mx.array:
    """The values of a tensor of any type. Raises: ModelError: PyPI `gguf` cannot dequantise its type."""
    if tensor.type in _FLOATS:
        raw = mx.array(np.ascontiguousarray(tensor.data)).view(_FLOATS[tensor.type])
        return raw.reshape(tensor.shape).astype(dtype)
    try:
        values = dequantize(tensor.data, tensor.type)
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {tensor.name} is of type {tensor.type.name}, which cannot be read; give another quantisation of "
            "the model"
        ) from error
    return mx.array(values.reshape(tensor.shape)).astype(dtype)


def packed(tensor: GGUFTensor, dtype: mx.Dtype) -> Packed | None:
    """A quantised tensor, but for rounding scales and biases to `dtype`; None if MLX cannot express it."""
    if (unpack := _UNPACK.get(tensor.type)) is None:
        return None
    bits, block_bytes, values_of = unpack
    blocks = tensor.data.reshape(*tensor.shape[:-1], -1, block_bytes)
    values, scales, biases = values_of(blocks)
    weight = _pack(values.reshape(*tensor.shape[:-1], -1), bits)
    group_shape = (*tensor.shape[:-1], -1)
    rounded = [mx.array(each.reshape(group_shape)).astype(dtype) for each in (scales, biases)]
    return Packed(bits, mx.array(weight), *rounded)


def _pack(values: Bytes, bits: int) -> NDArray[np.uint32]:
    """Values along the last axis, packed from the lowest bit on."""
    packed: Bytes
    if bits == 8:
        packed = values
    elif bits == 4:
        packed = values[..., ::2] | values[..., 1::2] << 4
    else:
        # Eight values of 5 bits fill the lower 5 bytes of a word.
        words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), "<u8")
        for i in range(8):
            words |= values[..., i::8].astype(np.uint64) << np.uint64(bits * i)
        packed = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits].reshape(*words.shape[:-1], -1)
    return np.ascontiguousarray(packed).view(np.uint32)


# --- a function for each type: blocks (..., bytes) to values (..., 32 each), scales and biases --------


def _half(blocks: Bytes, begin: int) -> Floats:
    return np.ascontiguousarray(blocks[..., begin : begin + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Of bytes, the lower halves of all, then the upper ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _small_blocks(bits: int, has_minimum: bool, blocks: Bytes) -> Unpacked:
    """Blocks of 32 values: the scale, the minimum if there is one, fifth bits if there are 5, and the other four."""
    scales, begin = _half(blocks, 0), 4 if has_minimum else 2
    biases = _half(blocks, 2) if has_minimum else -(2 ** (bits - 1)) * scales
    if bits == 4:
        return _nibbles(blocks[..., begin:]), scales, biases
    fifth = blocks[..., begin : begin + 4, None] >> np.arange(8, dtype=np.uint8) & 1
    return _nibbles(blocks[..., begin + 4 :]) | fifth.reshape(*blocks.shape[:-1], 32) << 4, scales, biases


def _q8_0(blocks: Bytes) -> Unpacked:
    scales = _half(blocks, 0)
    return blocks[..., 2:] ^ 128, scales, -128 * scales


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the eight groups in a block of 256, each of six bits times a factor of the whole block."""
    low, mid, high = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate((low & 63, high & 15 | low >> 6 << 4), axis=-1)
    offsets = np.concatenate((mid & 63, high >> 4 | mid >> 6 << 4), axis=-1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * offsets


def _large_blocks(bits: int, blocks: Bytes) -> Unpacked:
    """Blocks of 256 values: scales and minima of eight groups, fifth bits if there are 5, and the other four."""
    pairs = blocks[..., -128:].reshape(*blocks.shape[:-1], 4, 32)  # the nibbles of two groups
    values = np.stack((pairs & 15, pairs >> 4), axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    if bits == 5:
        values = values | (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return values, *_six_bits(blocks)


# Bits of a value, bytes of a block, and the function, of each type that MLX can express.
_UNPACK: dict[Type, tuple[int, int, Callable[[Bytes], Unpacked]]] = {
    Type.Q4_0: (4, 18, partial(_small_blocks, 4, False)),
    Type.Q4_1: (4, 20, partial(_small_blocks, 4, True)),
    Type.Q5_0: (5, 22, partial(_small_blocks, 5, False)),
    Type.Q5_1: (5, 24, partial(_small_blocks, 5, True)),
    Type.Q8_0: (8, 34, _q8_0),
    Type.Q4_K: (4, 144, partial(_large_blocks, 4)),
    Type.Q5_K: (5, 176, partial(_large_blocks, 5)),
}
