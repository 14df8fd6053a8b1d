"""The container of a GGUF model: metadata by key, and tensors that stay in the mapped file.

PyPI `gguf` has a reader, too. It takes ten seconds for the tokens of a common vocabulary, where this takes a tenth of a
second, and loops without end on some damaged files.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from protocol.errors import ModelError
from protocol.reprs import shown, shown_path
from runtime.loading.gguf.names import parts_of

# Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

AGAIN = "download or copy it again"


@attrs.frozen
class GGUFTensor:
    """A tensor in a mapped file."""

    name: str  # in the file, such as "blk.0.attn_q.weight"
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in MLX and numpy
    # Its bytes, with the shape of the tensor but for the last dimension.
    data: NDArray[np.uint8] = attrs.field(eq=False, repr=False)


@attrs.frozen
class Container:
    """Metadata and tensors of a GGUF model, of all its parts if it is split."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def named(self) -> str:
        """What messages call the file."""
        return shown_path(str(self.path))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, or a default; an int may stand for a float. Raises: ModelError: it is of another type."""
        if (value := self.metadata.get(key)) is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.named} has {shown(value)} as {key}, which is of another type")
        return value


def read(path: Path, *, with_tensors: bool = True) -> Container:
    """Read the metadata of a GGUF model, by any part of it, and where its tensors are. Raises: ModelError: a file is
    missing, not GGUF, cut off or damaged; the message names it, and the key or tensor.
    """
    names = parts_of(path.name)
    first = _File(path.with_name(names[0])).read(with_tensors=with_tensors)
    count = first.get("split.count", int, 1)
    if count != len(names) and count > 1:
        raise ModelError(
            f"{shown_path(str(path))} is one of {count} parts of a model, and is not named as such; name the first "
            f"as in {first.path.stem}-00001-of-{count:05}.gguf, and the others likewise, in one folder"
        )
    if len(names) == 1 or not with_tensors:
        return first
    parts = [first, *(_File(path.with_name(name)).read() for name in names[1:])]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    if (expected := first.get("split.tensors.count", int)) not in (None, len(tensors)):
        raise ModelError(f"the parts of {shown_path(str(path))} have {len(tensors)} tensors in place of {expected}")
    return attrs.evolve(first, tensors=tensors)


class _File:
    """One GGUF file while its header is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._named = path, shown_path(str(path))
        self._at, self._place = 0, "its header"
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                # Never truncated while it is mapped: whoever downloads writes a new file, and renames it.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        except OSError as error:
            raise ModelError(f"{self._named} cannot be read: {error.strerror}") from error

    def read(self, *, with_tensors: bool = True) -> Container:
        if bytes(self._bytes[:4]) != _MAGIC:
            raise ModelError(
                f"{self._named} is not a GGUF file: it begins with {bytes(self._bytes[:4])!r}; {AGAIN}, or give "
                "another file"
            )
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            big_endian = " (or is big-endian)" if version & 0xFFFF == 0 else ""
            raise ModelError(
                f"{self._named} has version {version}{big_endian} of GGUF, and versions 2 and 3 can be read; convert "
                "the model again"
            )
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        key = "the first key"
        for _ in range(num_keys):
            self._place = f"the metadata after {key}"
            key = self._string()
            self._place = f"the metadata {key}"
            metadata[key] = self._value(self._scalar("I"))
        tensors = self._tensors(num_tensors, metadata) if with_tensors else {}
        return Container(self._path, metadata, tensors)

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            self._place = f"the table of tensors after {found[-1][0] if found else 'its beginning'}"
            name = self._string()
            if (num_dimensions := self._scalar("I")) > _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
            found.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, type_number, offset in found:
            try:
                kind = GGMLQuantizationType(type_number)
            except ValueError:
                raise ModelError(
                    f"{self._named} has tensor {name} in the unknown type {type_number}; update the package gguf, or "
                    "give another quantisation of the model"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % block:
                raise self._damaged(f"tensor {name} has the shape {list(shape)}, in blocks of {block} ({kind.name})")
            row_shape = (*shape[:-1], shape[-1] // block * block_bytes)
            num_bytes = math.prod(row_shape)
            if (end := start + offset + num_bytes) > self._size:
                raise ModelError(
                    f"{self._named} is cut off: tensor {name} ends at byte {end:,}, and the file has {self._size:,}; "
                    f"{AGAIN}"
                )
            if name in tensors:
                raise self._damaged(f"there are two tensors {name}")
            data = np.frombuffer(self._bytes, np.uint8, num_bytes, start + offset).reshape(row_shape)
            tensors[name] = GGUFTensor(name, kind, shape, data)
        return tensors

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._named} is damaged: {what}; {AGAIN}")

    def _take(self, num_bytes: int) -> int:
        """Move over some bytes. Returns: where they begin."""
        begin = self._at
        if num_bytes > self._size - begin:
            raise ModelError(
                f"{self._named} is cut off or damaged: {self._place} goes on beyond its end at byte {self._size:,}; "
                f"{AGAIN}"
            )
        self._at = begin + num_bytes
        return begin

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self._bytes, self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        begin = self._take(length)
        return bytes(self._bytes[begin : begin + length]).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"{self._place} has a value of the unknown type {kind}")
        of, length = self._scalar("I"), self._scalar("Q")
        if of in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[of]}" if of != 7 else "?")
            begin = self._take(length * dtype.itemsize)
            return np.frombuffer(self._bytes, dtype, length, begin).tolist()
        if of != _STRING:
            raise self._damaged(f"{self._place} has an array of the unknown type {of}")
        self._take(8 * length)  # at least the lengths of the strings
        self._at -= 8 * length
        return [self._string() for _ in range(length)]
