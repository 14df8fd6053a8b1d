"""Links: how long messages and collectives take between ranks. Rank 0 leads the measurements, the others take part.

All of this blocks, and runs MLX's collectives: it is to be called on a thread that can be abandoned.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import mlx.core as mx

from actors.distributed.rank_group import RankGroup
from protocol.errors import RankError
from protocol.rank_messages import Measure, Measured

# What is sent: one number, which measures nothing but latency, and enough to fill a link.
SMALL_BYTES, LARGE_BYTES = 4, 4 * 1024**2
# Repetitions of each, after a first one that does not count, since it waits for the slowest rank to begin.
NUM_SMALL, NUM_LARGE = 50, 6

# Backends of MLX in the order in which it tries them, each with the environment variable that says where its ranks are.
BACKENDS = {
    "nccl": "NCCL_HOST_IP",
    "ring": "MLX_HOSTFILE",
    "mpi": "OMPI_COMM_WORLD_RANK",
    "jaccl": "MLX_JACCL_COORDINATOR",
}

_BYTES_PER_NUMBER = 4  # of float32


@attrs.frozen
class Times:
    """How long something took that was repeated, in seconds."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """The times of some repetitions, at least one."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


@attrs.frozen
class SmallAndLarge:
    """Times of the same exchange with `SMALL_BYTES`, and with `LARGE_BYTES`."""

    small: Times
    large: Times


@attrs.frozen
class Links:
    """What was measured between the ranks.

    Attributes:
        descriptions: of each rank, by name.
        control: for each rank but 0: from a message of rank 0's to all others until this rank's answer. Operations are
            announced in such messages, but not answered.
        all_sum: an `mx.distributed.all_sum` over all ranks.
        links: by rank: an array to the rank that follows it in the ring, and a number back.
    """

    descriptions: tuple[dict[str, str], ...]
    control: tuple[Times, ...]
    all_sum: SmallAndLarge
    links: tuple[SmallAndLarge, ...]


def available_backends() -> tuple[str, ...]:
    """The backends of `mx.distributed` that this machine's MLX has."""
    return tuple(name for name in BACKENDS if mx.distributed.is_available(backend=name))


def chosen_backend(group: RankGroup) -> str | None:
    """The backend of MLX's group; None if MLX does not tell."""
    for name in available_backends():
        # Only for backends that MLX itself has tried: for any other it would look for ranks anew.
        if os.environ.get(BACKENDS[name]) and mx.distributed.init(backend=name).size() == group.size:
            return name
    return None


# --- rank 0 ---------------------------------------------------------------------------------------


def measure_links(group: RankGroup, description: dict[str, str]) -> Links:
    """Have all ranks measure the links between them. The others call `take_part`, with their own description.

    Raises: RankError: the group is broken; and whatever MLX raises.
    """
    others = range(1, group.size)
    group.send(Measure("description"))
    answers = dict(_answer(group) for _ in others)
    control = _time_control(group)
    all_sum = _small_and_large(partial(_lead_sums, group))
    links = [
        _small_and_large(partial(_lead_link, group, sender, (sender + 1) % group.size)) for sender in range(group.size)
    ]
    group.send(Measure("end"))
    return Links(
        descriptions=(description, *(answers[rank].description for rank in others)),
        control=tuple(Times.of(control[rank]) for rank in others),
        all_sum=all_sum,
        links=tuple(links),
    )


def _small_and_large(measure: Callable[[int, int], Sequence[float]]) -> SmallAndLarge:
    """Measure both sizes, by a function from a number of bytes and of repetitions to the seconds of each repetition."""
    return SmallAndLarge(Times.of(measure(SMALL_BYTES, NUM_SMALL)), Times.of(measure(LARGE_BYTES, NUM_LARGE)))


def _answer(group: RankGroup) -> tuple[int, Measured]:
    rank, answer = group.receive()
    if not isinstance(answer, Measured):
        raise RankError(f"rank {rank} was to take part in a measurement, and sent {type(answer).__name__}")
    return rank, answer


def _time_control(group: RankGroup) -> dict[int, list[float]]:
    seconds: dict[int, list[float]] = {rank: [] for rank in range(1, group.size)}
    for repeat in range(1 + NUM_SMALL):
        began = time.perf_counter()
        group.send(Measure("answer"))
        for _ in seconds:
            rank, _answered = _answer(group)
            if repeat > 0:
                seconds[rank].append(time.perf_counter() - began)
    return seconds


def _lead_sums(group: RankGroup, num_bytes: int, repeats: int) -> list[float]:
    group.send(Measure("sum", (num_bytes, repeats)))
    return _time_sums(group, num_bytes, repeats)


def _lead_link(group: RankGroup, sender: int, receiver: int, num_bytes: int, repeats: int) -> Sequence[float]:
    group.send(Measure("link", (sender, receiver, num_bytes, repeats)))
    own = _time_link(group, sender, receiver, num_bytes, repeats)
    return own if sender == group.rank else _answer(group)[1].seconds


# --- the others -----------------------------------------------------------------------------------


def take_part(group: RankGroup, description: dict[str, str]) -> None:
    """Take part in what rank 0 measures, until it has all.

    Raises: RankError: the group is broken, or rank 0 asks for something else; and whatever MLX raises.
    """
    while True:
        _, asked = group.receive()
        if not isinstance(asked, Measure):
            raise RankError(f"rank {group.rank} takes part in measurements, and rank 0 sent {type(asked).__name__}")
        match asked.name, asked.arguments:
            case "description", []:
                group.send(Measured(description=description))
            case "answer", []:
                group.send(Measured())
            case "sum", [num_bytes, repeats]:
                _time_sums(group, num_bytes, repeats)
            case "link", [sender, receiver, num_bytes, repeats]:
                seconds = _time_link(group, sender, receiver, num_bytes, repeats)
                if group.rank == sender:
                    group.send(Measured(tuple(seconds)))
            case "end", []:
                return
            case _:
                raise RankError(f"rank {group.rank} does not know the measurement {asked.name}{asked.arguments}")


# --- all of them ----------------------------------------------------------------------------------


def _time_sums(group: RankGroup, num_bytes: int, repeats: int) -> list[float]:
    """Add up an array over all ranks; seconds of each repetition."""
    given = _array(num_bytes)
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        mx.eval(mx.distributed.all_sum(given, group=group.mlx))
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _time_link(group: RankGroup, sender: int, receiver: int, num_bytes: int, repeats: int) -> list[float]:
    """Send an array from one rank to another, and a number back; seconds of each repetition at the sender."""
    if group.rank not in (sender, receiver):
        return []
    sent, receipt = _array(num_bytes), _array(SMALL_BYTES)
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        if group.rank == sender:
            mx.eval(mx.distributed.send(sent, receiver, group=group.mlx))
            mx.eval(mx.distributed.recv_like(receipt, receiver, group=group.mlx))
        else:
            mx.eval(mx.distributed.recv_like(sent, sender, group=group.mlx))
            mx.eval(mx.distributed.send(receipt, sender, group=group.mlx))
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _array(num_bytes: int) -> mx.array:
    array = mx.zeros((num_bytes // _BYTES_PER_NUMBER,), mx.float32)
    mx.eval(array)
    return array
