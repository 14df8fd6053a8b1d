"""Parts of saved texts, on their way between the ranks: each rank has a part of the caches, and rank 0 has the file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from actors.distributed.rank_group import RankGroup
from actors.mlx.sequence_state import Recorder, SequenceRecord
from protocol.errors import RankError
from protocol.rank_messages import Answer, Recorded, TensorChunk
from protocol.tensor import DTYPES, Tensor

# Bytes of a tensor in one message, which must get through within the timeout of a connection.
CHUNK_BYTES = 1 << 20

# How long rank 0 waits for the next message about a saved text, in seconds. A layer may have to be copied before.
WAIT_S = 60.0


class CollectedPart:
    """One rank's part of a saved text, as far as it has come."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._description: Any = None
        self._tensors: dict[str, tuple[str, tuple[int, ...], bytearray]] = {}  # type, shape, and what has come of each

    @property
    def is_complete(self) -> bool:
        """Whether all has come."""
        return self._description is not None

    def add(self, message: Any) -> bool:
        """Add a message. Returns: whether it is the last one for now. Raises: RankError: it has no part of a text."""
        match message:
            case TensorChunk(name, dtype, shape, data):
                self._tensors.setdefault(name, (dtype, shape, bytearray()))[2].extend(data)
                return False
            case Recorded(description):
                self._description = description
                return True
        raise RankError(f"rank {self._rank} has sent {type(message).__name__} and not its part of a saved text")

    def record(self) -> SequenceRecord:
        """All that has come. Raises: RankError: bytes are missing, or too many."""
        for dtype, shape, data in self._tensors.values():
            if len(data) != math.prod(shape) * DTYPES.get(dtype, 0):
                raise RankError(
                    f"rank {self._rank} has sent {len(data)} bytes of a saved text for a {dtype} of {shape}"
                )
        tensors = {name: Tensor(dtype, shape, memoryview(data)) for name, (dtype, shape, data) in self._tensors.items()}
        return SequenceRecord(self._description, tensors)


def received(group: RankGroup, waiting: set[int]) -> tuple[int, Any]:
    """The next message that rank 0 waits for. Raises: RankError: none has come in time, or the group is broken."""
    try:
        return group.receive(WAIT_S)
    except TimeoutError:
        missing = ", ".join(map(str, sorted(waiting)))
        raise group.fail(f"rank {missing} has sent nothing of a saved text for {WAIT_S:g} s") from None


def errors_of(group: RankGroup, ranks: list[int]) -> list[str]:
    """Wait for the `Answer` of each of some ranks. Returns: their errors, which name the rank. Raises: as
    `received`.
    """
    errors, waiting = [], set(ranks)
    while waiting:
        rank, answer = received(group, waiting)
        assert isinstance(answer, Answer)
        waiting.discard(rank)
        if answer.error is not None:
            errors.append(f"on rank {rank}: {answer.error}")
    return errors


# --- at either end --------------------------------------------------------------------------------


def send_record(record: SequenceRecord, group: RankGroup, *, to: int) -> None:
    """Send a rank its part, from rank 0. Raises: RankError: the group is broken."""
    _send_tensors(record.tensors.items(), group, to)
    group.send(Recorded(record.description), to=to)


def receive_record(group: RankGroup) -> SequenceRecord:
    """Wait for this rank's part, from rank 0. Raises: RankError: the group is broken, or this is no such part."""
    part = CollectedPart(0)
    while not part.add(group.receive()[1]):
        pass
    return part.record()


def send_step(recorder: Recorder, group: RankGroup, fingerprint: dict[str, Any]) -> bool:
    """Copy the next layer of this rank's part, and send it to rank 0, in the end with the fingerprint of its part of
    the model.

    Returns: whether that was all. Raises: RankError: the group is broken.
    """
    record = recorder.step()
    _send_tensors(recorder.pop_tensors().items(), group, to=0)
    group.send(Recorded(None if record is None else {**record.description, "fingerprint": fingerprint}))
    return record is not None


def _send_tensors(tensors: Iterable[tuple[str, Tensor]], group: RankGroup, to: int) -> None:
    for name, tensor in tensors:
        for begin in range(0, max(1, len(tensor.data)), CHUNK_BYTES):
            data = bytes(tensor.data[begin : begin + CHUNK_BYTES])
            group.send(TensorChunk(name, tensor.dtype, tensor.shape, data), to=to)
