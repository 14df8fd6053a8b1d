"""Logits processors and samplers: the interfaces of user code between a model's logits and the choice of a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from protocol.copying import Forced

if TYPE_CHECKING:
    import mlx.core as mx

LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
"""`f(tokens, logits)`: (n,) ids of the text so far, prompt included, and (1, V) logits; returns (1, V) logits."""

Sampler = Callable[["mx.array"], "mx.array"]
"""`f(logprobs)`: (1, V) log-probabilities; returns (1,) ids of tokens."""


@runtime_checkable
class Checkpointed(Protocol):
    """A processor with a state that can be saved and restored, such as a grammar: it can be speculated with.

    Speculation calls a processor for two models, and also on drafted texts, which may be dropped again. So before each
    call with n tokens, the state that was saved after the call with the first n - 1 of them is restored; before the
    first call, the state that the object had when the stream began. A call may be repeated; if a state was not kept,
    earlier calls are repeated to make it again, with logits of zeros. After each call the object is put back into the
    state that it had when the stream began. So one object serves many streams, also at once.

    It is called on the threads of both models, never on both at once. Saving and restoring should be cheap.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Must accept any tokens, also ones that it would not have allowed."""

    def save(self) -> Any:
        """The present state. It must follow from the tokens alone, must not change later, and has no lazy arrays."""

    def restore(self, state: Any) -> None:
        """Go to a state that was saved; the same state may be restored more than once."""


class ForcedText(Protocol):
    """What a processor forces in one text, which grows. It is read in the event loop, and takes microseconds."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text, which is empty after the prompt."""

    def after(self, beyond: Sequence[int]) -> list[Forced]:
        """The text that must follow the text and some drafted tokens; empty if several texts may, or none."""

    def num_allowed(self, beyond: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of some tokens, from the front, may follow the text and some drafted tokens."""


@runtime_checkable
class Forcing(Checkpointed, Protocol):
    """A processor that may leave only one text to go on with, such as a grammar: that text is drafted without a model.

    Any tokens may be drafted, since the target judges them: what is said to be forced must be likely, not certain.
    """

    def forced_text(self) -> ForcedText:
        """Of a text that begins now. Called in the event loop."""


@attrs.frozen
class Stateless:
    """A processor or sampler that is known to keep no state; see `stateless`."""

    function: Callable[..., mx.array]

    def __call__(self, *arguments: mx.array) -> mx.array:
        return self.function(*arguments)


def stateless(function: Callable[..., mx.array]) -> Stateless:
    """A decorator for a logits processor or a sampler that keeps no state, so that it can be speculated with.

    The value that a processor returns must follow from its arguments; a sampler may also draw at random in each call.
    Either may be called on any drafted text, also on one that goes on after the end of the text.
    """
    return Stateless(function)


def can_be_speculated_with(processor: LogitsProcessor) -> bool:
    """Whether a processor may be called on texts that are never committed."""
    return isinstance(processor, (Stateless, Checkpointed))
