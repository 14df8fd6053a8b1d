"""The target's hidden states of windows: computed once, and kept in files in bfloat16 as far as there is room.

A later pass over the data reads the files, and computes only the target's head. What has no file is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.layer_evaluation import evaluating_layers
from actors.trained.features import FeatureRecorder, recording
from actors.trained.kinds.target_parts import Layer, final_norm_of, head_of
from protocol.errors import ModelError

# Bytes of the disk that are left free, for checkpoints and for everybody else.
RESERVED_BYTES = 2 * 10**9
# Tokens of the text on which hidden states and head are tried.
_NUM_TRIED = 8


def check_states(target: Module, feature_layers: Sequence[int]) -> None:
    """Raises: ModelError: a target's hidden states at some layers cannot be recorded."""
    _passed(target, FeatureRecorder(target, feature_layers), mx.arange(_NUM_TRIED)[None])


class StateFiles:
    """Hidden states of windows, a file for each, by target, layers and tokens; written whole or not at all."""

    def __init__(self, folder: Path, max_bytes: int, identity: str) -> None:
        """The files in a folder, of at most `max_bytes` in all; `identity` names the target and the layers."""
        self._folder, self._identity = folder, identity
        self._partial = folder / "partial"  # one that is being written
        self._bytes_left = max_bytes - sum(file.stat().st_size for file in folder.glob("*"))

    def load(self, window: mx.array, width: int) -> mx.array | None:
        """(L, width) bfloat16 states of an (L,) window; None if there are none."""
        try:
            content = self._file(window).read_bytes()
        except OSError:
            return None
        if len(content) != 2 * window.size * width:
            return None
        return mx.array(memoryview(content).cast("H")).view(mx.bfloat16).reshape(window.size, width)  # type: ignore[arg-type]

    def keep(self, window: mx.array, states: mx.array) -> None:
        """Keep the (L, width) states of an (L,) window, if there is room for them."""
        if 2 * states.size > self._bytes_left:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free - 2 * states.size < RESERVED_BYTES:
                return
            self._partial.write_bytes(memoryview(states.astype(mx.bfloat16).view(mx.uint16)))  # type: ignore[arg-type]
            os.replace(self._partial, self._file(window))
        except OSError:
            # What is not kept is computed again. A disk that is full or cannot be written does not end the training.
            with contextlib.suppress(OSError):
                self._partial.unlink()
            self._bytes_left = 0
        self._bytes_left -= 2 * states.size

    def _file(self, window: mx.array) -> Path:
        tokens = bytes(memoryview(window.astype(mx.int32)))  # type: ignore[arg-type]
        return self._folder / hashlib.sha256(self._identity.encode() + b"\0" + tokens).hexdigest()[:32]


class HiddenStates:
    """The features and logits of a target for batches of windows. All methods run on one thread."""

    def __init__(self, target: Module, feature_layers: Sequence[int], files: StateFiles | None = None) -> None:
        """Of layers as `FeatureRecorder` has them, ascending. Without files, or if the target does more with its last
        hidden state than norm and head, all is computed each time. Raises: ModelError: there are none.
        """
        self._target = target
        self._recorder = FeatureRecorder(target, feature_layers)
        tried = mx.arange(_NUM_TRIED)[None]
        _, features, _ = _passed(target, self._recorder, tried)
        self._features_width, self._dtype = features.shape[-1], features.dtype
        self._files = None
        self._output = None if files is None else _output_of(target, tried)
        if self._output is not None:
            self._files = files
            self._recorder = FeatureRecorder(target, [*dict.fromkeys((*feature_layers, len(target.layers)))])
            _, states, _ = _passed(target, self._recorder, tried)
            self._width = states.shape[-1]
        self._computed_s, self._loaded_s = list[float](), list[float]()  # what each window took

    @property
    def are_kept(self) -> bool:
        """Whether states are kept: there are files, and reading them is no slower than computing the states."""
        is_known = bool(self._loaded_s and self._computed_s)
        return self._files is not None and not (is_known and fmean(self._loaded_s) > fmean(self._computed_s) > 0.0)

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """For (B, L) tokens, (B, L, width) features and (B, L, V) logits, which are lazy."""
        files = self._files if self.are_kept else None
        began = time.monotonic()
        loaded = [] if files is None else [files.load(window, self._width) for window in tokens]
        rows = [row for row, states in enumerate(loaded) if states is not None]
        missing = [row for row in range(tokens.shape[0]) if row not in rows]
        parts: list[tuple[mx.array, mx.array]] = []
        if rows:
            states = mx.stack([states for states in loaded if states is not None]).astype(self._dtype)
            mx.eval(states)
            self._loaded_s += [(time.monotonic() - began) / len(rows)] * len(rows)
            assert self._output is not None
            parts.append((states, self._output(states)))
        if missing:
            seconds, states, logits = _passed(self._target, self._recorder, tokens[mx.array(missing)])
            self._computed_s += [seconds / len(missing)] * len(missing)
            for row, of_window in zip(missing, states, strict=True):
                if files is not None:
                    files.keep(tokens[row], of_window)
            parts.append((states, logits))
        [(states, logits), *_] = parts
        if len(parts) > 1:
            order = mx.argsort(mx.array(rows + missing))
            states, logits = (mx.concatenate([*of_parts])[order] for of_parts in zip(*parts, strict=True))
        return states[..., : self._features_width], logits


def _passed(target: Module, recorder: FeatureRecorder, tokens: mx.array) -> tuple[float, mx.array, mx.array]:
    """A pass over (B, L) tokens: its seconds, (B, L, width) states, and (B, L, V) logits, which are lazy."""
    began = time.monotonic()
    with evaluating_layers(target), recording(recorder):
        logits = target(tokens)
    states = recorder.take((tokens.shape[0], tokens.shape[1]))
    mx.eval(states)
    return time.monotonic() - began, states, logits


def _output_of(target: Module, tokens: mx.array) -> Layer | None:
    """What makes (…, V) logits of (…, width) states that end with the last layer's result, as the target does for some
    tokens; None if the target does more there than a norm and a head.
    """
    last = FeatureRecorder(target, [len(target.layers)])
    try:
        norm, head = final_norm_of(target, "the drafter"), head_of(target, "the drafter")
        _, states, logits = _passed(target, last, tokens)
    except ModelError:
        return None
    width = states.shape[-1]

    def output(states: mx.array) -> mx.array:
        return head(norm(states[..., -width:]))

    again = output(states)
    if again.shape != logits.shape:
        return None
    is_same = mx.abs(again - logits).max() <= 1e-4 * mx.abs(logits).max()
    return output if is_same.item() else None
