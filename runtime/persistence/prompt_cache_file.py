"""Prompt cache files, as `mlx_lm.cache_prompt` writes them: what their header says. Imports no mlx.

Such a file is a safetensors file with the state of a model's caches. It has the name of the model, and neither its
fingerprint nor the tokens.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from protocol.errors import SessionFileError
from protocol.reprs import shown_path

# Most bytes of a header. One of a large model has some 100 kB.
_MAX_HEADER = 64 * 2**20

# Where the state of a cache has its number of tokens, by class; see `state` of mlx-lm's classes.
_OFFSET = {"KVCache": "2", "RotatingKVCache": "2", "QuantizedKVCache": "2", "ChunkedKVCache": "2", "CacheList": "0.0.2"}
_GROUP_SIZE, _BITS = "3", "4"


@attrs.frozen
class PromptCacheFile:
    """What the header of a prompt cache file says."""

    num_tokens: int  # in its caches; 0 if they keep no count
    model: str | None  # the path or hub id of the model that it was made with, as it was given
    tokenizer_config: Mapping[str, Any]  # with which the tokenizer was loaded
    kv_bits: int | None  # the quantisation of its caches; None if they are not quantised
    kv_group_size: int | None


def read_header(path: str | os.PathLike[str]) -> PromptCacheFile:
    """Read the header of a prompt cache file; some kilobytes, whatever its size.

    Raises: SessionFileError: it cannot be read (the system's error is the cause), or is no such file.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            return _parsed(file)
    except OSError as error:
        raise SessionFileError(
            f"cannot read the prompt cache file {shown_path(str(path))}: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise SessionFileError(
            f"{shown_path(str(path))} is no prompt cache file ({error}); give one that mlx_lm.cache_prompt of mlx-lm "
            "0.32 has written"
        ) from error


def _parsed(file: BinaryIO) -> PromptCacheFile:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > _MAX_HEADER:
        raise ValueError("its header is too long")
    header = json.loads(file.read(size))
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("it has no metadata")
    classes: list[str] = []
    while (name := metadata.get(f"1.{len(classes)}")) is not None:
        classes.append(name)
    if not classes:
        raise ValueError("it names no caches")

    def number(index: int, place: str) -> int:
        described = header[f"{index}.{place}"]
        if described["dtype"] != "I32" or described["shape"] != []:
            raise ValueError("a count in it is no number")
        file.seek(8 + size + described["data_offsets"][0])
        return int(struct.unpack("<i", file.read(4))[0])

    counted = [(i, kind) for i, kind in enumerate(classes) if kind in _OFFSET]
    quantised = classes.index("QuantizedKVCache") if "QuantizedKVCache" in classes else None
    return PromptCacheFile(
        number(counted[0][0], _OFFSET[counted[0][1]]) if counted else 0,
        metadata.get("0.model"),
        json.loads(metadata.get("0.tokenizer_config", "{}")),
        None if quantised is None else number(quantised, _BITS),
        None if quantised is None else number(quantised, _GROUP_SIZE),
    )
