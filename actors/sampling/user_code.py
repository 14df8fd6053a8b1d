"""A user's logits processors and sampler, on the models' threads: called, evaluated, and told apart from the models.

MLX computes later than it is asked to. So an error in what a processor returned would come up in the middle of a
model's pass, and look like the model's. Here the logits are evaluated before a processor gets them, outside of any
guard, and what it returns is evaluated inside of one: what fails there is the processor's, and ends its stream alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import mlx.core as mx

from protocol.errors import ProcessorError
from protocol.logits_processors import Checkpointed, LogitsProcessor, Sampler, Stateless

# States of one processor that are kept: those of what is drafted, and of the text behind it.
MOST_STATES = 256


class UserProcessors:
    """The `logits_processors` of one session, for both models."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompt_length: int) -> None:
        """In trio's thread; never waits.

        Args:
            processors: in the order in which they take effect.
            prompt_length: tokens of the session's prompt.

        Raises: ProcessorError: a processor cannot say its state. Where one is in use by another stream at the moment,
            it is asked later, on a model's thread.
        """
        self._processors = [
            _Recalled(processor, prompt_length) if isinstance(processor, Checkpointed) else processor
            for processor in processors
        ]

    def __len__(self) -> int:
        return len(self._processors)

    def __call__(self, rows: list[mx.array], histories: Sequence[tuple[int, ...]]) -> list[mx.array]:
        """Put rows of logits through all processors. Costs a synchronisation, and one more for each processor.

        Args:
            rows: n arrays (1, V), lazy or not.
            histories: (n,) the text before each row, prompt included.

        Returns: n arrays (1, V), evaluated.
        Raises: ProcessorError: a processor raised, or returned something else than logits, or logits that cannot be
            evaluated. What evaluating `rows` raises, which is the model's.
        """
        mx.eval(rows)
        texts = [mx.array(history) for history in histories]
        for processor in self._processors:
            rows = [
                _called(processor, ids, tokens, row) for ids, tokens, row in zip(histories, texts, rows, strict=True)
            ]
            evaluate_guarded(f"the logits processor {name_of(processor)}", rows)
        return rows


def _called(processor: LogitsProcessor | _Recalled, ids: tuple[int, ...], tokens: mx.array, row: mx.array) -> mx.array:
    shape = row.shape
    try:
        result = processor(ids, tokens, row) if isinstance(processor, _Recalled) else processor(tokens, row)
    except ProcessorError:
        raise
    # Somebody else's code: whatever it raises belongs to this stream, and not to the models.
    except Exception as error:
        raise ProcessorError(
            f"the logits processor {name_of(processor)} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, mx.array) or result.shape != shape:
        got = f"shape {result.shape}" if isinstance(result, mx.array) else f"a {type(result).__name__}"
        hint = "; has it a return?" if result is None else ""
        raise ProcessorError(
            f"the logits processor {name_of(processor)} must return logits of shape {shape}, got {got}{hint}"
        )
    if not mx.issubdtype(result.dtype, mx.floating):
        raise ProcessorError(
            f"the logits processor {name_of(processor)} must return floating-point logits, got {result.dtype}; "
            "convert them with astype(logits.dtype)"
        )
    return result


class UserSampler:
    """The `sampler` of one session, for both models."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._named = f"the sampler {name_of(sampler)}"

    def __call__(self, logits: mx.array) -> mx.array:
        """Choose a token by each row, the first row first. Costs two synchronisations.

        Args:
            logits: (n, V) processed, lazy or not.

        Returns: (n,) ids, evaluated; 0 for a row that is not of numbers, by which nothing can be chosen.
        Raises: ProcessorError: the sampler raised, or returned something else than an id. What evaluating `logits`
            raises, which is the model's.
        """
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        are_sound = mx.isfinite(mx.max(logits, axis=-1))
        mx.eval(logprobs, are_sound)
        chosen = [
            self._chosen(logprobs[i : i + 1]) if is_sound else mx.array([0])
            for i, is_sound in enumerate(cast(list[bool], are_sound.tolist()))
        ]
        evaluate_guarded(self._named, chosen)
        ids = [cast(int, token.item()) for token in chosen]
        for id in ids:
            if not 0 <= id < logits.shape[-1]:
                raise ProcessorError(f"{self._named} must return ids in [0, {logits.shape[-1] - 1}], got {id}")
        return mx.array(ids)

    def _chosen(self, logprobs: mx.array) -> mx.array:
        try:
            token = self._sampler(logprobs)
        # Somebody else's code, as a processor is.
        except Exception as error:
            raise ProcessorError(f"{self._named} raised {type(error).__name__}: {error}") from error
        if not isinstance(token, mx.array) or token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
            is_array = isinstance(token, mx.array)
            got = f"shape {token.shape} of {token.dtype}" if is_array else f"a {type(token).__name__}"
            raise ProcessorError(
                f"{self._named} must return an array of one whole number, the id of a token, got {got}"
            )
        return token


def evaluate_guarded(who: str, arrays: list[mx.array]) -> None:
    """Evaluate what somebody else's code returned.

    Args:
        who: whose code it is, for the message.
        arrays: what depends on that code, and on nothing else that is not evaluated.

    Raises: ProcessorError: it cannot be evaluated.
    """
    try:
        mx.eval(arrays)
    # Somebody else's code, which MLX carries out only now.
    except Exception as error:
        hint = ""
        if "There is no Stream" in str(error):
            hint = "; an array that was made in another thread must be evaluated there, with mx.eval, before it is used"
        raise ProcessorError(
            f"{who} returned an array that cannot be evaluated: {type(error).__name__}: {error}{hint}"
        ) from error


def name_of(code: object) -> str:
    """The name of a processor or sampler, which asks nothing of it that may fail."""
    if isinstance(code, _Recalled):
        return name_of(code.processor)
    if isinstance(code, Stateless):
        return name_of(code.function)
    return str(getattr(code, "__qualname__", type(code).__qualname__))


# --- processors with a state ----------------------------------------------------------------------


class _Shared:
    """A processor, and a lock that all streams which use it have in common: it is one object, on two models' threads.

    Attributes:
        processor: by its identity it is found again, so it must live as long as this.
        lock: held while the processor is used, which may take as long as it likes: so trio's thread never waits for it.
    """

    def __init__(self, processor: Checkpointed) -> None:
        self.processor = processor
        self.lock = threading.Lock()


# By the processor's identity, for as long as some stream uses it; several event loops may be there.
_shared: WeakValueDictionary[int, _Shared] = WeakValueDictionary()
_shared_lock = threading.Lock()  # of the registry alone, never held while a processor is used


class _Recalled:
    """A processor that keeps a state, called on texts in any order, by both models, and for several streams."""

    def __init__(self, processor: Checkpointed, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.processor = processor
        with _shared_lock:
            self._shared = _shared.get(id(processor)) or _Shared(processor)
            _shared[id(processor)] = self._shared
        # The state in which this stream found the processor. `self` stands for "not known yet": a model's thread may
        # hold the lock through a whole call, for another stream, and between calls the state is always the owner's.
        self._initial: Any = self
        if self._shared.lock.acquire(blocking=False):
            try:
                self._initial = self._save()
            finally:
                self._shared.lock.release()
        # By what was generated: the state after the call with it.
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, ids: tuple[int, ...], tokens: mx.array, logits: mx.array) -> mx.array:
        """The processor's result for a text, whatever it was called with before."""
        generated = ids[self._prompt_length :]
        with self._shared.lock:
            # Whatever text it is asked about, the object is left as its owner left it: the next stream begins there.
            outside = self._save()
            if self._initial is self:
                self._initial = outside
            try:
                known = self._go_to(generated)
                for length in range(known, len(generated)):
                    self.processor(tokens[: self._prompt_length + length], mx.zeros_like(logits))
                    self._keep(generated[:length])
                result = self.processor(tokens, logits)
                self._keep(generated)
            finally:
                self.processor.restore(outside)
        return result

    def _save(self) -> Any:
        try:
            return self.processor.save()
        # Somebody else's code, as in `_called`.
        except Exception as error:
            name = name_of(self.processor)
            raise ProcessorError(f"{name} raised {type(error).__name__} in save(): {error}") from error

    def _go_to(self, generated: tuple[int, ...]) -> int:
        """Restore the state after the longest text before this one that is known; returns the next text's length."""
        for length in range(len(generated) - 1, -1, -1):
            state = self._states.get(generated[:length], self)
            if state is not self:
                self._states.move_to_end(generated[:length])
                self.processor.restore(state)
                return length + 1
        self.processor.restore(self._initial)
        return 0

    def _keep(self, generated: tuple[int, ...]) -> None:
        self._states[generated] = self._save()
        self._states.move_to_end(generated)
        if len(self._states) > MOST_STATES:
            self._states.popitem(last=False)
