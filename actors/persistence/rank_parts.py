"""Parts of saved texts, sent between the ranks: each rank has a part of the caches, and rank 0 has the file."""

from __future__ import annotations

from typing import Any

from actors.distributed.rank_group import RankGroup
from actors.mlx.sequence_state import SequenceRecord, StateRecorder
from protocol.errors import RankError
from protocol.rank_messages import OperationResult, Recorded

# How long rank 0 waits for the next message about a saved text, in seconds. A rank may have to copy a layer first.
WAIT_S = 60.0


# A part of which nothing has arrived yet. A part is incomplete until it has a description.
NO_PART = SequenceRecord(None, {})


def added(part: SequenceRecord, message: Any, rank: int) -> SequenceRecord:
    """A rank's part, extended by its next message. Raises: RankError: the message has no part of a text."""
    if not isinstance(message, Recorded):
        raise RankError(f"rank {rank} has sent {type(message).__name__} and not its part of a saved text")
    return SequenceRecord(message.description, {**part.tensors, **message.tensors})


def received(group: RankGroup, waiting: set[int]) -> tuple[int, Any]:
    """The next message that rank 0 waits for. Raises: RankError: none has come in time, or the group is broken."""
    try:
        return group.receive(WAIT_S)
    except TimeoutError:
        missing = ", ".join(map(str, sorted(waiting)))
        raise group.fail(f"rank {missing} has sent nothing of a saved text for {WAIT_S:g} s") from None


def errors_of(group: RankGroup, ranks: list[int]) -> list[str]:
    """Wait for the `OperationResult` of each rank. Returns: the errors, which name the rank. Raises: as `received`."""
    errors, waiting = [], set(ranks)
    while waiting:
        rank, answer = received(group, waiting)
        assert isinstance(answer, OperationResult)
        waiting.discard(rank)
        if answer.error is not None:
            errors.append(f"on rank {rank}: {answer.error}")
    return errors


def send_record(record: SequenceRecord, group: RankGroup, *, to: int) -> None:
    """Send a rank its part, from rank 0. Raises: RankError: the group is broken."""
    for name, tensor in record.tensors.items():
        group.send(Recorded({name: tensor}), to=to)
    group.send(Recorded({}, record.description), to=to)


def receive_record(group: RankGroup) -> SequenceRecord:
    """Wait for this rank's part, from rank 0. Raises: RankError: the group is broken, or this is no such part."""
    part = NO_PART
    while part.description is None:
        part = added(part, group.receive()[1], 0)
    return part


def send_step(recorder: StateRecorder, group: RankGroup, fingerprint: dict[str, Any]) -> bool:
    """Copy the next layer of this rank's part to rank 0. True after the last, sent with the model's fingerprint."""
    record = recorder.step()
    description = None if record is None else {**record.description, "fingerprint": fingerprint}
    group.send(Recorded(recorder.pop_tensors(), description))
    return record is not None
