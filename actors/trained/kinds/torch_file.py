"""Reads the tensors in a file of `torch.save`, without torch, and without running anything that the file names."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx

# By torch's name of a storage: the bytes of an element, as an unsigned integer, and the number format.
_STORAGES: dict[str, tuple[Literal["H", "I", "Q"], mx.Dtype]] = {
    "FloatStorage": ("I", mx.float32),
    "HalfStorage": ("H", mx.float16),
    "BFloat16Storage": ("H", mx.bfloat16),
    "IntStorage": ("I", mx.int32),
    "LongStorage": ("Q", mx.int64),
}


def load_torch_file(path: Path) -> dict[str, mx.array]:
    """The tensors, by name, of a file with a dictionary of dense ones, in the zip format of torch 1.6 and later; lazy.

    Raises: ValueError: the file is of another format, is damaged, or has anything else in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            loaded = _Unpickler(archive, name.removesuffix("data.pkl")).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a file of torch.save with tensors alone: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, mx.array) for value in loaded.values()):
        raise ValueError(f"{path.name} has something else in it than tensors by name")
    return cast(dict[str, mx.array], loaded)


class _Unpickler(pickle.Unpickler):
    """Knows what a dictionary of tensors consists of, and refuses everything else."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(archive.open(f"{folder}data.pkl"))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> mx.array:
        """A storage, as one row of elements."""
        _, kind, key, _, _ = pid
        code, dtype = _STORAGES[kind]
        content = self._archive.read(f"{self._folder}data/{key}")
        elements: Any = memoryview(content).cast(code)  # an array takes any buffer
        return mx.array(elements).view(dtype)


def _tensor(storage: mx.array, offset: int, shape: Any, strides: Any, *_: Any) -> mx.array:
    """Stands for `torch._utils._rebuild_tensor_v2`."""
    end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if offset < 0 or min((*shape, 1)) < 1 or min((*strides, 0)) < 0 or end >= storage.size:
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(shape)} lies outside of its storage")
    return mx.as_strided(storage, tuple(shape), tuple(strides), offset)


# What a file may name, and what stands for it; for a class of torch's storages, its name.
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    **{("torch", storage): storage for storage in _STORAGES},
}
