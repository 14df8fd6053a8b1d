"""The target's own texts: continuations of the beginnings of windows. A drafter has to predict what its target writes,
which differs from what people wrote.

Source: Li, Wei, Zhang and Zhang 2024, "EAGLE", arXiv 2401.15077, section 5.3.
"""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_options import CacheOptions
from runtime.distill.writing import replacing

# Every second batch is greedy; the others are sampled at this temperature.
TEMPERATURE = 0.8
# Tokens of each beginning that are read in a pass: a cancellation waits for it.
NUM_READ_AT_ONCE = 8
# The part of a window that is given, and not written by the target.
PROMPT_SHARE = 0.25


class Continuing:
    """Beginnings of windows that the target is continuing, a token of each at a time; greedily at temperature 0."""

    def __init__(self, target: Module, windows: mx.array, *, temperature: float, seed: int) -> None:
        """Continue the beginnings of (B, length) windows to their length."""
        self._length = windows.shape[1]
        given = windows[:, : max(1, int(self._length * PROMPT_SHARE))]
        self._target, self._temperature, self._seed = target, temperature, seed
        self._cache = CacheOptions().make_cache(target)
        self._tokens, self._unread = [given], given
        self._num_to_write = self._num_left = self._length - given.shape[1]

    @property
    def share(self) -> float:
        """The part that is written, in [0, 1]."""
        return 1.0 - self._num_left / self._num_to_write

    def write(self, seconds: float) -> mx.array | None:
        """Write until so many seconds have passed. Returns: (B, length) int32, once they are whole."""
        ends = time.monotonic() + seconds
        while self._num_left > 0:
            read, self._unread = self._unread[:, :NUM_READ_AT_ONCE], self._unread[:, NUM_READ_AT_ONCE:]
            logits = self._target(read, cache=self._cache)[:, -1]
            if self._unread.size > 0:
                mx.eval([layer.state for layer in self._cache if not layer.empty()])
            else:
                self._unread = self._chosen(logits.astype(mx.float32))[:, None]
                mx.async_eval(self._unread)
                self._tokens.append(self._unread)
                self._num_left -= 1
                # The token before: the device computes this one while Python prepares the next.
                mx.eval(read)
            if time.monotonic() >= ends:
                return None
        written = mx.concatenate(self._tokens, axis=1)
        mx.eval(written)
        return written

    def _chosen(self, logits: mx.array) -> mx.array:
        if self._temperature == 0:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        key = mx.random.key(self._seed * self._length + self._num_to_write - self._num_left)
        return mx.random.categorical(logits / self._temperature, key=key).astype(mx.int32)


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
        """How many were written so far."""
        return sum(batch.shape[0] for batch in self.batches)

    @property
    def temperature(self) -> float:
        """Of the next batch."""
        return 0.0 if len(self.batches) % 2 == 0 else TEMPERATURE

    def add(self, batch: mx.array) -> None:
        """Add a batch of windows (B, length), and keep it. Raises: SettingsError: it cannot be written."""
        with replacing(self._file(len(self.batches))) as partial:
            mx.save_safetensors(str(partial), {"tokens": batch})
        self.batches.append(batch)

    def _file(self, index: int) -> Path:
        return self._folder / f"continuations_{index:06}.safetensors"
