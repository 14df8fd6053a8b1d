"""Messages between the ranks of a target that is sharded over several processes, as bytes and back.

Rank 0 leads: it announces each operation on the target's caches, in the order in which its own thread runs them, and
the other ranks follow. In messages travel only tensors of saved texts; passes exchange theirs by MLX's collectives.
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
        operation: which one of the target's the sender is in, for some seconds; None if it waits for the next one.
    """

    operation: str | None = attrs.field(default=None, validator=attrs.validators.optional(instance_of(str)))
    seconds: float = attrs.field(default=0.0, validator=instance_of((int, float)))


@attrs.frozen
class OpenTarget:
    """Rank 0 opens a target: each rank loads its part, but for `draft_rank`, which holds none and drafts."""

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
    """A rank has loaded its part; digests of what all have in common, by name (`actors.distributed.sharding`)."""

    parts: dict[str, str]


@attrs.frozen
class Operation:
    """An operation on the target, which each rank repeats.

    Attributes:
        name: of a method of the model, or of a sequence.
        sequence: number of the sequence; None for the model.
        arguments: of the method; sequences are given by their numbers.
        texts: of the sequences that a pass reads, from before the pass: (sequence, tokens, checksum of the tokens).
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
    """Bytes of the tensor of this name in a saved text, after those in earlier messages."""

    name: str = attrs.field(validator=instance_of(str))
    dtype: str = attrs.field(validator=instance_of(str))
    shape: tuple[int, ...] = attrs.field(
        converter=_as_tuple, validator=deep_iterable(attrs.validators.and_(instance_of(int), ge(0)))
    )
    data: bytes = attrs.field(validator=instance_of(bytes))


@attrs.frozen
class Recorded:
    """Ends the tensors that the sender had for now; describes its part, for JSON, unless more is to come."""

    description: Any


@attrs.frozen
class Answer:
    """A rank's answer to an operation that may fail on one rank and leave all in step: why it has failed, or None."""

    error: str | None = attrs.field(validator=attrs.validators.optional(instance_of(str)))


@attrs.frozen
class CloseTarget:
    """Rank 0 has closed the target; the ranks release their parts."""


@attrs.frozen
class Measure:
    """Rank 0 begins a measurement of the links, in which each rank takes its part; see `actors.distributed.links`."""

    name: str = attrs.field(validator=instance_of(str))
    arguments: list[int] = attrs.field(factory=list, validator=deep_iterable(instance_of(int), instance_of(list)))


@attrs.frozen
class Measured:
    """What a rank has to say of a measurement: seconds of each repetition that it timed, and its description."""

    seconds: list[float] = attrs.field(factory=list, validator=deep_iterable(instance_of(float), instance_of(list)))
    description: dict[str, str] = attrs.field(factory=dict, validator=deep_mapping(instance_of(str), instance_of(str)))


@attrs.frozen
class DrafterFrame:
    """A part of a message of `protocol.drafter_wire`. No bytes at all end the drafter."""

    data: bytes = attrs.field(validator=instance_of(bytes))
    is_last: bool = attrs.field(default=True, validator=instance_of(bool))


@attrs.frozen
class Broken:
    """The group cannot go on, for a reason that names the rank whose doing it is."""

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
