"""Messages between the ranks of a target that is sharded over several processes, as bytes and back.

Rank 0 leads: it announces each operation on the target's caches, in the order in which its own thread runs them. The
other ranks follow. The forward passes exchange tensors by MLX's own collectives; in messages travel only those of saved
texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import attrs
from attrs.validators import deep_iterable, deep_mapping, ge, instance_of

from protocol.errors import ProtocolError
from protocol.tensor import Tensor
from protocol.wire import MALFORMED, pack, unpack

# A longer message is not one of ours.
MAX_MESSAGE_BYTES = 64 * 1024**2


def _as_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(numbers)


@attrs.frozen
class Hello:
    """The first message of a rank, to rank 0.

    Attributes:
        rank: of the sender.
        size: number of ranks, as the sender knows it.
        versions: of the packages that must be the same on all ranks, by name.
    """

    rank: int = attrs.field(validator=instance_of(int))
    size: int = attrs.field(validator=instance_of(int))
    versions: dict[str, str] = attrs.field(validator=deep_mapping(instance_of(str), instance_of(str)))


@attrs.frozen
class Welcome:
    """Rank 0's answer to each `Hello`, once all ranks are there."""


@attrs.frozen
class Beat:
    """Says that the sender is alive. Sent both ways, also while a model works.

    Attributes:
        operation: which one of the target's the sender is in; None if it waits for the next one.
        seconds: for how long.
    """

    operation: str | None = attrs.field(default=None, validator=attrs.validators.optional(instance_of(str)))
    seconds: float = attrs.field(default=0.0, validator=instance_of((int, float)))


@attrs.frozen
class OpenTarget:
    """Rank 0 opens a target: each rank loads its part.

    Attributes:
        cache_options: of the target's caches, by name.
        draft_rank: the rank that holds no part of the target and drafts; None if there is none.
    """

    cache_options: dict[str, Any]
    draft_rank: int | None = None


@attrs.frozen
class Present:
    """A rank is ready for MLX's group to be made: an answer to `OpenTarget`, if it was not made before."""


@attrs.frozen
class ConnectRanks:
    """All ranks of the target are ready: each makes MLX's group now."""


@attrs.frozen
class Loaded:
    """A rank has loaded its part.

    Attributes:
        parts: digests of what all ranks have in common, by name; see `actors.distributed.sharding`.
    """

    parts: dict[str, str]


@attrs.frozen
class Operation:
    """An operation on the target, which each rank repeats.

    Attributes:
        name: of a method of the model, or of a sequence.
        sequence: number of the sequence; None for the model.
        arguments: of the method; sequences are given by their numbers.
        texts: what rank 0 believes of the sequences that a pass reads, from before the pass: (sequence, tokens,
            checksum of the tokens) of each.
    """

    name: str
    sequence: int | None = None
    arguments: tuple[Any, ...] = ()
    texts: tuple[tuple[int, int, int], ...] = ()


@attrs.frozen
class Operations:
    """Operations that follow each other, in one message."""

    operations: tuple[Operation, ...]


@attrs.frozen
class TensorChunk:
    """Bytes of a tensor of a saved text.

    Attributes:
        name: of the tensor.
        dtype, shape: of all of it; see `protocol.tensor.Tensor`.
        data: the bytes after those in earlier messages.
    """

    name: str = attrs.field(validator=instance_of(str))
    dtype: str = attrs.field(validator=instance_of(str))
    shape: tuple[int, ...] = attrs.field(
        converter=_as_tuple, validator=deep_iterable(attrs.validators.and_(instance_of(int), ge(0)))
    )
    data: bytes = attrs.field(validator=instance_of(bytes))


@attrs.frozen
class Recorded:
    """Ends the tensors that the sender had for now.

    Attributes:
        description: of the sender's part of a saved text, for JSON, if that is complete; None if more is to come.
    """

    description: Any


@attrs.frozen
class Answer:
    """A rank's answer to an operation that may fail on one rank and leave all in step.

    Attributes:
        error: a clause that says why it has failed; None if it has not.
    """

    error: str | None = attrs.field(validator=attrs.validators.optional(instance_of(str)))


@attrs.frozen
class CloseTarget:
    """Rank 0 has closed the target; the ranks release their parts."""


@attrs.frozen
class Measure:
    """Rank 0 begins a measurement of the links, in which each rank takes its part; see `actors.distributed.links`.

    Attributes:
        name: of the measurement.
        arguments: its numbers.
    """

    name: str = attrs.field(validator=instance_of(str))
    arguments: list[int] = attrs.field(factory=list, validator=deep_iterable(instance_of(int), instance_of(list)))


@attrs.frozen
class Measured:
    """What a rank has to say of a measurement.

    Attributes:
        seconds: of each repetition, if this rank was the one to time it.
        description: of the rank, by name, if that was asked for.
    """

    seconds: list[float] = attrs.field(factory=list, validator=deep_iterable(instance_of(float), instance_of(list)))
    description: dict[str, str] = attrs.field(factory=dict, validator=deep_mapping(instance_of(str), instance_of(str)))


@attrs.frozen
class DrafterFrame:
    """A part of what the two ends of a link to a drafter say; see `protocol.drafter_wire`.

    Attributes:
        data: the bytes. None at all ends the drafter.
        is_last: whether the message of the link ends with them.
    """

    data: bytes = attrs.field(validator=instance_of(bytes))
    is_last: bool = attrs.field(default=True, validator=instance_of(bool))


@attrs.frozen
class Broken:
    """The group cannot go on.

    Attributes:
        reason: a clause that names the rank whose doing it is.
    """

    reason: str


RankMessage = (
    Hello
    | Welcome
    | Beat
    | OpenTarget
    | Present
    | ConnectRanks
    | Loaded
    | Operations
    | TensorChunk
    | Recorded
    | Answer
    | CloseTarget
    | Measure
    | Measured
    | DrafterFrame
    | Broken
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(RankMessage)}


def encode(message: RankMessage) -> bytes:
    """A message as bytes."""
    if isinstance(message, Operations):
        fields: list[Any] = [[[o.name, o.sequence, o.arguments, o.texts] for o in message.operations]]
    else:
        fields = [getattr(message, field.name) for field in attrs.fields(type(message))]
    return pack(type(message).__name__, [_tensor(field) if isinstance(field, bytes) else field for field in fields])


def _tensor(data: bytes) -> Tensor:
    return Tensor("U8", (len(data),), memoryview(data))


def decode(data: bytes) -> RankMessage:
    """A message from its bytes.

    Raises: ProtocolError: these are not the bytes of a message.
    """
    try:
        name, fields = unpack(data)
        kind = _KINDS[name]
        if kind is Operations:
            (operations,) = fields
            return Operations(
                tuple(
                    Operation(name, sequence, tuple(arguments), tuple((text[0], text[1], text[2]) for text in texts))
                    for name, sequence, arguments, texts in operations
                )
            )
        message: RankMessage = kind(*(bytes(field.data) if isinstance(field, Tensor) else field for field in fields))
    except MALFORMED as error:
        raise ProtocolError(f"another rank sent {data[:80]!r}, which is no message of Outrider's") from error
    return message
