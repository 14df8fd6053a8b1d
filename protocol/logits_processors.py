"""Logits processors and samplers: what a user may put between a model's logits and the choice of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import mlx.core as mx

LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
"""`f(tokens, logits)`: (n,) ids of the text so far, prompt included, and (1, V) logits; returns (1, V) logits."""

Sampler = Callable[["mx.array"], "mx.array"]
"""`f(logprobs)`: (1, V) log-probabilities; returns (1,) ids of tokens."""


@runtime_checkable
class Checkpointed(Protocol):
    """A processor that keeps a state, and can go back to an earlier one: what a grammar needs to be speculated with.

    Plain decoding calls a processor once a token, on a text that grows. Speculation calls it on drafted texts too,
    which may be dropped again, and for two models. So each call with n tokens is preceded by a `restore` of the state
    that was saved after the call with the first n - 1 of them, or, for the first call, of the one in which the stream
    found the object. A call may be repeated, and where a state is no longer at hand, calls are repeated with logits of
    zeros, in order to have it again. After each call the object is put back into the state in which it was found: one
    object will do for many streams, one after the other or at once, and each begins alike.

    It is called on the threads of both models, never on both at once. Saving and restoring should be cheap.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """See `LogitsProcessor`. Must take any tokens, also such as it would not have allowed."""
        ...

    def save(self) -> Any:
        """The present state, which must follow from the tokens alone, and must not change later; no lazy array."""
        ...

    def restore(self, state: Any) -> None:
        """Go back, or over, to a state that was saved; maybe not for the last time."""
        ...


@attrs.frozen
class Stateless:
    """A processor or sampler of which it is known that it keeps no state; see `stateless`."""

    function: Callable[..., mx.array]

    def __call__(self, *arguments: mx.array) -> mx.array:
        """Call the function."""
        return self.function(*arguments)


def stateless(function: Callable[..., mx.array]) -> Stateless:
    """Say of a logits processor or a sampler that it keeps no state, so that it can be speculated with; a decorator.

    What a processor returns must follow from its arguments; a sampler may also draw at random, anew in each call.
    Either may be asked about any text that a drafter comes up with, and about one that goes on behind the end.
    """
    return Stateless(function)


def can_be_speculated_with(processor: LogitsProcessor) -> bool:
    """Whether a processor may be called on texts that are never committed."""
    return isinstance(processor, (Stateless, Checkpointed))
