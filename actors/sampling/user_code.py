"""User code on the models' threads: calls a user's logits processors and sampler, and evaluates their results.

A processor's error must end its own stream only. But MLX is lazy, so an error in its result would come up in the middle
of a pass. So the logits are evaluated before a processor gets them, and its result right after the call.

Unmarked code is called once for each token of the text. So its last result is kept until the next token: a pass that
fails after the call, even one launched ahead, has the same token chosen again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import mlx.core as mx

from protocol.errors import ProcessorError
from protocol.logits_processors import Checkpointed, LogitsProcessor, Sampler, Stateless, can_be_speculated_with

# User code may raise anything. `sys.exit()` only ends its stream, since a thread cannot end the process.
_RAISED = (Exception, SystemExit, KeyboardInterrupt)

MAX_STATES = 256  # of one processor: those after the drafted texts, and after the text before them


class UserProcessors:
    """The `logits_processors` of one session, for both models."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompt_length: int) -> None:
        """Prepare the processors, in trio's thread; never waits.

        Raises: ProcessorError: one failed to save its state, which is saved later if another stream uses it now.
        """
        self._processors = [
            _CheckpointedProcessor(processor, prompt_length) if isinstance(processor, Checkpointed) else processor
            for processor in processors
        ]
        self._are_called_once = not all(map(can_be_speculated_with, processors))
        self._last: tuple[int, list[mx.array]] | None = None  # tokens of the text, and the result after them

    def __call__(self, rows: list[mx.array], histories: Sequence[tuple[int, ...]]) -> list[mx.array]:
        """Apply all processors to (1, V) logits after each of n texts. Synchronises once, and once for each.

        Returns: n arrays (1, V), evaluated.
        Raises: ProcessorError: a processor raised, or gave no logits. Also what the evaluation of `rows` raises:
            the model's error.
        """
        if self._last is not None and self._last[0] == len(histories[-1]):
            return self._last[1]
        mx.eval(rows)
        texts = [mx.array(history) for history in histories]
        for processor in self._processors:
            rows = [
                _call_processor(processor, ids, tokens, row)
                for ids, tokens, row in zip(histories, texts, rows, strict=True)
            ]
            evaluate_guarded(f"the logits processor {name_of(processor)}", rows)
        if self._are_called_once:
            self._last = len(histories[-1]), rows
        return rows


def _call_processor(
    processor: LogitsProcessor | _CheckpointedProcessor, ids: tuple[int, ...], tokens: mx.array, row: mx.array
) -> mx.array:
    """A processor's result for one row of logits (1, V), checked; lazy or not."""
    shape, named = row.shape, f"the logits processor {name_of(processor)}"
    try:
        if isinstance(processor, _CheckpointedProcessor):
            result = processor(ids, tokens, row)
        else:
            result = processor(tokens, row)
    except ProcessorError:
        raise
    except _RAISED as error:
        raise ProcessorError(f"{named} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, mx.array) or result.shape != shape:
        got = f"shape {result.shape}" if isinstance(result, mx.array) else f"a {type(result).__name__}"
        hint = "; is a return statement missing?" if result is None else ""
        raise ProcessorError(f"{named} must return logits of shape {shape}, got {got}{hint}")
    if not mx.issubdtype(result.dtype, mx.floating):
        raise ProcessorError(
            f"{named} must return floating-point logits, got {result.dtype}; convert them with astype(logits.dtype)"
        )
    return result


class UserSampler:
    """The `sampler` of one session, for both models."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._named = f"the sampler {name_of(sampler)}"
        self._is_called_once = not isinstance(sampler, Stateless)
        self._last: tuple[int, mx.array] | None = None  # a position, and what was chosen for it

    def __call__(self, logits: mx.array, start: int) -> mx.array:
        """Choose a token for each row of (n, V) shaped logits, for positions from `start` on. Synchronises twice.

        Returns: (n,) ids, evaluated; 0 for a row from which no token can be chosen. Raises: as `UserProcessors`.
        """
        if self._last is not None and self._last[0] == start:
            return self._last[1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        are_sound = mx.isfinite(mx.max(logits, axis=-1))
        mx.eval(logprobs, are_sound)
        chosen = [
            self._choose(logprobs[i : i + 1]) if is_sound else mx.array([0])
            for i, is_sound in enumerate(cast(list[bool], are_sound.tolist()))
        ]
        evaluate_guarded(self._named, chosen)
        ids = [cast(int, token.item()) for token in chosen]
        for id in ids:
            if not 0 <= id < logits.shape[-1]:
                raise ProcessorError(f"{self._named} must return ids in [0, {logits.shape[-1] - 1}], got {id}")
        tokens = mx.array(ids)
        if self._is_called_once:
            self._last = start, tokens
        return tokens

    def _choose(self, logprobs: mx.array) -> mx.array:
        try:
            token = self._sampler(logprobs)
        except _RAISED as error:
            raise ProcessorError(f"{self._named} raised {type(error).__name__}: {error}") from error
        if not isinstance(token, mx.array) or token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
            is_array = isinstance(token, mx.array)
            got = f"shape {token.shape} of {token.dtype}" if is_array else f"a {type(token).__name__}"
            raise ProcessorError(
                f"{self._named} must return an array of one whole number, the id of a token, got {got}"
            )
        return token


def evaluate_guarded(who: str, arrays: list[mx.array]) -> None:
    """Evaluate arrays that user code, named `who`, returned. Raises: ProcessorError: one cannot be evaluated."""
    try:
        mx.eval(arrays)
    # MLX carries out the user's computations only now, and they may raise anything.
    except Exception as error:
        hint = ""
        if "There is no Stream" in str(error):
            hint = "; an array that was made in another thread must be evaluated there, with mx.eval, before it is used"
        raise ProcessorError(
            f"{who} returned an array that cannot be evaluated: {type(error).__name__}: {error}{hint}"
        ) from error


def name_of(code: object) -> str:
    """The name of a processor or sampler. Calls none of its code that may fail."""
    if isinstance(code, _CheckpointedProcessor):
        return name_of(code.processor)
    if isinstance(code, Stateless):
        return name_of(code.function)
    return str(getattr(code, "__qualname__", type(code).__qualname__))


# --- processors with a state ----------------------------------------------------------------------


# Locks by the id of their processors. A lock lives, as the processor does, for as long as some stream uses it, and is
# held during calls, which come from the threads of both models. A call may take any time, so trio's thread never waits
# for a lock. Several event loops may use this registry at once.
_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_registry_lock = threading.Lock()  # never held while a processor is used


class _CheckpointedProcessor:
    """A processor with a state, which may be called on texts in any order, by both models, and for several streams."""

    def __init__(self, processor: Checkpointed, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.processor = processor
        with _registry_lock:
            self._lock = _locks.setdefault(id(processor), threading.Lock())
        # The state in which this stream found the processor, and in which it is between calls. `self` stands for "not
        # known yet": a model's thread may hold the lock throughout a call for another stream.
        self._initial: Any = self
        if self._lock.acquire(blocking=False):
            try:
                self._initial = self._save()
            finally:
                self._lock.release()
        # Generated tokens → the state after the call with them; least recently used first.
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, ids: tuple[int, ...], tokens: mx.array, logits: mx.array) -> mx.array:
        """The processor's result for a text, prompt included, whatever it was called with before."""
        generated = ids[self._prompt_length :]
        with self._lock:
            # Whatever text it is called with, the object is returned to this state, in which the next stream begins.
            owners_state = self._save()
            if self._initial is self:
                self._initial = owners_state
            try:
                for length in range(self._restore_nearest(generated), len(generated)):
                    self.processor(tokens[: self._prompt_length + length], mx.zeros_like(logits))
                    self._keep_state(generated[:length])
                result = self.processor(tokens, logits)
                self._keep_state(generated)
            finally:
                self.processor.restore(owners_state)
        return result

    def _save(self) -> Any:
        try:
            return self.processor.save()
        except _RAISED as error:
            name = name_of(self.processor)
            raise ProcessorError(f"{name} raised {type(error).__name__} in save(): {error}") from error

    def _restore_nearest(self, generated: tuple[int, ...]) -> int:
        """Restore the state after a text's longest prefix that has one. Returns: how many tokens to call with next."""
        for length in range(len(generated) - 1, -1, -1):
            state = self._states.get(generated[:length], self)
            if state is not self:
                self._states.move_to_end(generated[:length])
                self.processor.restore(state)
                return length + 1
        self.processor.restore(self._initial)
        return 0

    def _keep_state(self, generated: tuple[int, ...]) -> None:
        self._states[generated] = self._save()
        self._states.move_to_end(generated)
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
