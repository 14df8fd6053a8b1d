"""The exchange of a pass: the collectives that it runs, timed without its computations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.core as mx

from actors.mlx.sequence import MLXSequence

_COLLECTIVES = ("all_sum", "all_max", "all_min", "all_gather", "sum_scatter", "send", "recv", "recv_like")


@attrs.frozen
class Exchange:
    """What a pass exchanges with the other ranks."""

    collectives: dict[str, int]  # how many a pass runs, by name
    num_bytes: int  # of their arrays at this rank
    seconds: tuple[float, ...]  # of all of them, one after the other, in each repetition


@attrs.frozen
class _Collective:
    """A call of a collective, with zeros for its arrays: their values do not matter, and would keep memory."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def arrays(self) -> list[mx.array]:
        return [value for value in (*self.args, *self.keywords.values()) if isinstance(value, mx.array)]

    def __call__(self) -> mx.array:
        result: mx.array = getattr(mx.distributed, self.name)(*self.args, **self.keywords)
        return result


def _zeros(value: Any) -> Any:
    return mx.zeros(value.shape, value.dtype) if isinstance(value, mx.array) else value


def time_exchange(sequence: MLXSequence, width: int, repeats: int) -> Exchange:
    """Run a pass of `width` tokens over an empty sequence, and then its collectives alone, `repeats` times, on all
    ranks at the same time. Closes the sequence.
    """
    with _recording() as collectives:
        mx.eval(sequence.feed((1,) * width, width))
    sequence.close()
    mx.eval([collective.arrays for collective in collectives])
    seconds = []
    for _ in range(1 + repeats):
        began, results = time.perf_counter(), []
        for collective in collectives:
            results.append(collective())
            # Submitted one by one: MLX evaluates many at once in an order of its own, and all ranks need the same one.
            mx.async_eval(results[-1])
        mx.eval(results)
        seconds.append(time.perf_counter() - began)
    num_bytes = sum(array.nbytes for collective in collectives for array in collective.arrays)
    # The first one has waited for the slowest rank to begin.
    return Exchange(dict(Counter(collective.name for collective in collectives)), num_bytes, tuple(seconds[1:]))


@contextmanager
def _recording() -> Iterator[list[_Collective]]:
    """While in force, note each collective that is called in this process, by whatever model."""
    found: list[_Collective] = []

    def recorded(name: str, call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def record(*args: Any, **keywords: Any) -> mx.array:
            zeros = {keyword: _zeros(value) for keyword, value in keywords.items()}
            found.append(_Collective(name, tuple(map(_zeros, args)), zeros))
            return call(*args, **keywords)

        return record

    own = {name: getattr(mx.distributed, name) for name in _COLLECTIVES}
    for name, call in own.items():
        setattr(mx.distributed, name, recorded(name, call))
    try:
        yield found
    finally:
        for name, call in own.items():
            setattr(mx.distributed, name, call)
