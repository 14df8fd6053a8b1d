"""Messages between rank 0 and a rank that drafts for it.

Rank 0 asks: for a draft step, or for another operation on one of the drafter's texts. The drafting rank answers each
request in turn. The features that a trained drafter reads travel ahead of the request that needs them:

    OpenDrafter    ──>  load the drafter
                   <──  DrafterOpened, or DrafterNotOpened
    GivenFeatures  ──>  no answer
    DraftRequest   ──>
                   <──  DraftAnswer, or DraftFailure
    CloseDrafter   ──>  no answer
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs


def _tuple(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _optional_tuple(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


@attrs.frozen
class Array:
    """An array's bytes. They follow the message that has it, as they are.

    Attributes:
        dtype: name of its type, as safetensors has it.
        shape: its dimensions.
        data: its elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    data: bytes | memoryview = attrs.field(eq=bytes, repr=False)


@attrs.frozen
class OpenDrafter:
    """Rank 0 wants the drafter to be loaded.

    Attributes:
        cache_options: of the drafter's caches, by name.
        target_vocab_size: width of the target's logits.
    """

    cache_options: dict[str, Any]
    target_vocab_size: int


@attrs.frozen
class DrafterOpened:
    """The drafter is loaded.

    Attributes:
        vocab_size: see `Model.vocab_size`.
        context_length: see `Model.context_length`.
        feature_layers: of the target, whose inputs the drafter reads; None if it reads none.
    """

    vocab_size: int
    context_length: int | None
    feature_layers: tuple[int, ...] | None = attrs.field(converter=_optional_tuple)


@attrs.frozen
class DrafterNotOpened:
    """The drafter cannot be loaded.

    Attributes:
        kind: name of the class of the error, one of `protocol.errors`.
        reason: its message.
    """

    kind: str
    reason: str


@attrs.frozen
class GivenFeatures:
    """Features of a text, for a drafter that reads them.

    Attributes:
        sequence: number of the text.
        start: position of the first row.
        values: (n, width).
    """

    sequence: int
    start: int
    values: Array


@attrs.frozen
class DraftRequest:
    """An operation on a text of the drafter.

    Attributes:
        number: unique among the requests of a group; the answer has the same.
        name: of the operation.
        sequence: number of the text, which rank 0 gives out.
        arguments: of the operation.
    """

    number: int
    name: str
    sequence: int
    arguments: tuple[Any, ...] = attrs.field(default=(), converter=tuple)


@attrs.frozen
class TextState:
    """What rank 0 may want to know at any time of a text that is read elsewhere.

    Attributes:
        length: see `CachedSequence.length`.
        num_given, awaits_features, staleness, refreshes_at: see `FeatureInput`.
        num_foreseen: how many positions beyond `num_given` come before `FeatureInput.foreseen`; None without a bound.
    """

    length: int
    num_given: int = 0
    awaits_features: bool = False
    staleness: int = 0
    refreshes_at: int | None = None
    num_foreseen: int | None = None


def _state(value: Any) -> TextState | None:
    return value if value is None or isinstance(value, TextState) else TextState(*value)


@attrs.frozen
class DraftAnswer:
    """The result of an operation.

    Attributes:
        number: of the request.
        value: the result, in a form that the operation has agreed on.
        state: of the text afterwards; None once it is closed.
    """

    number: int
    value: Any
    state: TextState | None = attrs.field(converter=_state)


@attrs.frozen
class DraftFailure:
    """An operation has raised.

    Attributes:
        number: of the request.
        kind: name of the exception's class.
        reason: its message.
        state: of the text afterwards; None if there is no such text.
    """

    number: int
    kind: str
    reason: str
    state: TextState | None = attrs.field(default=None, converter=_state)


@attrs.frozen
class CloseDrafter:
    """Rank 0 has no more use for the drafter."""


DraftRankMessage = (
    OpenDrafter
    | DrafterOpened
    | DrafterNotOpened
    | GivenFeatures
    | DraftRequest
    | DraftAnswer
    | DraftFailure
    | CloseDrafter
)
