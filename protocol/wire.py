"""Messages as bytes: a line of JSON with a name and fields, and after it the bytes of the tensors among the fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol.tensor import DTYPES, Tensor

# The key of an object that stands for a tensor in the line of JSON.
_TENSOR = "__tensor__"

# What nonsense makes of the functions that read it.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


def pack(name: str, fields: Sequence[Any]) -> bytes:
    """The bytes of a message, by the name of its kind, and fields that JSON has or that are tensors."""
    tensors: list[memoryview] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"a message cannot carry {value!r}")
        tensors.append(value.data)
        return {_TENSOR: [value.dtype, value.shape, len(value.data)]}

    line = json.dumps([name, *fields], separators=(",", ":"), default=stand_in).encode()
    return b"".join((line, b"\n", *tensors)) if tensors else line


def unpack(data: bytes) -> tuple[str, list[Any]]:
    """The name and the fields that were packed; tuples among the fields are lists now.

    Raises: one of `MALFORMED`: the bytes are of no message.
    """
    # JSON without indentation has no line breaks.
    line, _, tensors = data.partition(b"\n")
    begin, rest = 0, memoryview(tensors)

    def tensor(found: dict[str, Any]) -> Any:
        nonlocal begin
        if _TENSOR not in found:
            return found
        dtype, shape, num_bytes = found[_TENSOR]
        num_elements = DTYPES[dtype]
        for size in shape:
            num_elements *= whole(size)
        if num_elements != num_bytes or begin + num_bytes > len(rest):
            raise ValueError(f"a tensor {dtype}{shape} does not have {num_bytes} bytes, or they are missing")
        begin += num_bytes
        return Tensor(dtype, tuple(shape), rest[begin - num_bytes : begin])

    name, *fields = json.loads(line, object_hook=tensor)
    if begin != len(rest) or not isinstance(name, str):
        raise ValueError("there are bytes of no tensor, or there is no name")
    return name, fields


def whole(value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """A whole number of a message, in [least, most]. Raises: ValueError: it is something else."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most} was expected, got {value!r:.80}")
    return value
