"""Messages between the ranks of a target that is sharded over several processes.

Rank 0 leads: it announces each operation on the target's caches, in the order in which its own thread runs them, and
the other ranks follow. Messages carry tensors only of saved texts; passes exchange theirs by MLX's collectives.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast, get_args

import attrs
import mlx.core as mx

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
class Loaded:
    """A rank has loaded its part; digests of what all have in common, by name (`actors.distributed.sharding`)."""

    parts: dict[str, str]


@attrs.frozen
class TextEntry:
    """How many tokens one rank has fed to a sequence, and their checksum."""

    sequence: int
    length: int
    checksum: int


@attrs.frozen
class Operation:
    """An operation on the target, which each rank repeats."""

    name: str  # of a method of the model, or of a sequence
    sequence: int | None = None  # number of the sequence; None for the model
    arguments: tuple[Any, ...] = ()  # of the method; sequences are given by their numbers
    texts: tuple[TextEntry, ...] = ()  # of the sequences that a pass reads, from before the pass


@attrs.frozen
class Operations:
    """Operations that follow each other, in one message."""

    operations: tuple[Operation, ...]


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
    OpenTarget | Present | ConnectRanks | Loaded | Operations | Recorded | OperationResult | ForDrafter | CloseTarget
)
RankMessage = Beat | Broken | Hello | Welcome | _OfTarget | Describe | Description

_CODEC: Codec[RankMessage] = Codec(get_args(RankMessage), "of another rank")
encode, decode = _CODEC.encode, _CODEC.decode


# --- texts ----------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Text:
    checksums: list[int] = attrs.field(factory=lambda: [0])  # of the first 0, 1, 2, … tokens
    pending: list[mx.array] = attrs.field(factory=list)  # the tokens after those, (1,) each; may not be computed yet

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.checksums.append(zlib.crc32(token.to_bytes(8, "little", signed=True), self.checksums[-1]))

    @property
    def length(self) -> int:
        return len(self.checksums) - 1 + len(self.pending)


class TextLedger:
    """Which tokens a rank has fed to each sequence of a sharded target, by its number, as a running checksum.

    Rank 0 sends its entries with each pass; a rank that is out of step is noticed before its part is used.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def open(self, sequence: int) -> None:
        """Begin an empty text."""
        self._texts[sequence] = _Text()

    def copy(self, sequence: int, other: int) -> None:
        """Begin another text with the same tokens."""
        self._texts[other] = _Text(list(self._settled(sequence).checksums))

    def close(self, sequence: int) -> None:
        """Forget a text."""
        del self._texts[sequence]

    def feed(self, sequence: int, tokens: Sequence[int]) -> None:
        """Add tokens to a text."""
        self._settled(sequence).add(tokens)

    def feed_later(self, sequence: int, token: mx.array) -> None:
        """Add a token that may not be computed yet, (1,); it is read when the text is looked at next."""
        self._settled(sequence).pending.append(token)

    def cut(self, sequence: int, length: int) -> None:
        """Drop a text's tokens from a length on."""
        if length < self._texts[sequence].length:
            del self._settled(sequence).checksums[length + 1 :]

    def entry(self, sequence: int) -> TextEntry:
        """The text of a sequence."""
        text = self._settled(sequence)
        return TextEntry(sequence, text.length, text.checksums[-1])

    def _settled(self, sequence: int) -> _Text:
        """A text without pending tokens, which waits until they are computed."""
        text = self._texts[sequence]
        pending, text.pending = text.pending, []
        text.add([cast(int, token.item()) for token in pending])
        return text
