"""The target's own texts: continuations of the beginnings of windows.

A drafter has to predict what its target writes, which differs from what people wrote. Li, Wei, Zhang and Zhang 2024,
"EAGLE", arXiv 2401.15077, section 5.3, have the target write the texts as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_options import CacheOptions

# Every second batch is greedy; the others are sampled at this temperature.
TEMPERATURE = 0.8
# The part of a window that is given, and not written by the target.
PROMPT_SHARE = 0.25


def continue_windows(target: Module, windows: mx.array, *, temperature: float, seed: int) -> mx.array:
    """(B, length) int32: the beginnings of windows, continued by the target; greedily at temperature 0."""
    length = windows.shape[1]
    num_given = max(1, int(length * PROMPT_SHARE))
    cache = CacheOptions().make_cache(target)
    tokens, given = [windows[:, :num_given]], windows[:, :num_given]
    for i in range(length - num_given):
        logits = target(given, cache=cache)[:, -1].astype(mx.float32)
        if temperature == 0:
            chosen = mx.argmax(logits, axis=-1)
        else:
            chosen = mx.random.categorical(logits / temperature, key=mx.random.key(seed * length + i))
        given = chosen[:, None].astype(mx.int32)
        mx.async_eval(given)
        tokens.append(given)
    written = mx.concatenate(tokens, axis=1)
    mx.eval(written)
    return written


class Continuations:
    """The continuations written so far, each batch in a file of its own, so that an interruption loses only one."""

    def __init__(self, folder: Path) -> None:
        """Read the batches that were written before."""
        self._folder = folder
        self.batches: list[mx.array] = []
        while (file := self._file(len(self.batches))).exists():
            loaded = mx.load(str(file))
            assert isinstance(loaded, dict)
            self.batches.append(loaded["tokens"])
        mx.eval(self.batches)

    @property
    def num_windows(self) -> int:
        """Number of windows written so far."""
        return sum(batch.shape[0] for batch in self.batches)

    def write(self, target: Module, windows: mx.array, seed: int) -> None:
        """Have the target continue the beginnings of windows (B, length), and add them as a batch."""
        index = len(self.batches)
        temperature = 0.0 if index % 2 == 0 else TEMPERATURE
        batch = continue_windows(target, windows, temperature=temperature, seed=seed + index)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / "partial.safetensors"
        mx.save_safetensors(str(partial), {"tokens": batch})
        os.replace(partial, self._file(index))
        self.batches.append(batch)

    def _file(self, index: int) -> Path:
        return self._folder / f"continuations_{index:06}.safetensors"
