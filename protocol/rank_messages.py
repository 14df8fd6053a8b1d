"""Messages between the ranks of a target that is sharded over several processes.

Rank 0 leads: it announces each operation on the target's caches, in the order in which its own thread runs them, and
the other ranks follow. Messages carry tensors only of saved texts; passes exchange theirs by MLX's collectives.
"""

from __future__ import annotations

from typing import Any, get_args

import attrs

from protocol.tensor import Tensor
from protocol.wire import Codec


@attrs.frozen
class Beat:
    """Says that the sender is alive. Sent both ways, also while a model works."""

    operation: str | None = None  # of the target, which the sender is in; None if it waits for one
    seconds: float = 0.0  # for how long


@attrs.frozen
class Broken:
    """The group cannot go on; the reason names the rank that caused it."""

    reason: str


@attrs.frozen
class Hello:
    """The first message of a rank, to rank 0."""

    rank: int
    size: int
    versions: dict[str, str]  # of the packages that must be the same on all ranks, by name


@attrs.frozen
class Welcome:
    """Rank 0's answer to each `Hello`, once all ranks are there."""


@attrs.frozen
class OpenTarget:
    """Rank 0 opens a target: each rank loads its part, except `draft_rank`, which has none and drafts."""

    cache_options: dict[str, Any]
    draft_rank: int | None = None


@attrs.frozen
class Present:
    """A rank is ready for MLX's group to be made: an answer to `OpenTarget`, if it was not made before."""


@attrs.frozen
class ConnectRanks:
    """All ranks of the target are ready: each makes MLX's group now."""


@attrs.frozen
class RankLoaded:
    """A rank has loaded its part; digests of what all have in common, by name (`actors.distributed.sharding`)."""

    parts: dict[str, str]


@attrs.frozen
class TextEntry:
    """How many tokens one rank has fed to a sequence, and their checksum."""

    sequence: int
    length: int
    checksum: int


@attrs.frozen
class RankOperation:
    """An operation on the target, which each rank repeats."""

    name: str  # of a method of the model, or of a sequence
    sequence: int | None = None  # number of the sequence; None for the model
    arguments: tuple[Any, ...] = ()  # of the method; sequences are given by their numbers
    texts: tuple[TextEntry, ...] = ()  # of the sequences that a pass reads, from before the pass


@attrs.frozen
class RankOperations:
    """Operations that follow each other, in one message."""

    operations: tuple[RankOperation, ...]


@attrs.frozen
class Recorded:
    """Tensors of a saved text, by name; the last message has a description of the sender's part, a value for JSON."""

    tensors: dict[str, Tensor]
    description: Any = None


@attrs.frozen
class OperationResult:
    """A rank's answer to an operation whose failure on one rank leaves all in step: why it has failed, or None."""

    error: str | None


@attrs.frozen
class ForDrafter:
    """A message of `protocol.drafter_wire`, to the rank that drafts or from it. One without bytes ends the drafter."""

    data: bytes


@attrs.frozen
class CloseTarget:
    """Rank 0 has closed the target; the ranks release their parts."""


@attrs.frozen
class Describe:
    """Rank 0 asks each rank for a `Description`."""


@attrs.frozen
class Description:
    """Host, device and system of the rank that sends it."""

    of_rank: dict[str, str]


_OfTarget = (
    OpenTarget
    | Present
    | ConnectRanks
    | RankLoaded
    | RankOperations
    | Recorded
    | OperationResult
    | ForDrafter
    | CloseTarget
)
RankMessage = Beat | Broken | Hello | Welcome | _OfTarget | Describe | Description

_CODEC: Codec[RankMessage] = Codec(get_args(RankMessage), "of another rank")
encode, decode = _CODEC.encode, _CODEC.decode
