"""The exchange of a pass: the collectives that it runs, timed without its computations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


def _zeros(value: Any) -> Any:
    """Zeros in the place of an array: its values do not matter, and would keep memory."""
    return mx.zeros(value.shape, value.dtype) if isinstance(value, mx.array) else value


def time_exchange(sequence: MLXSequence, width: int, repeats: int) -> Exchange:
    """Run a pass of `width` tokens over an empty sequence, and then its collectives alone, `repeats` times, on all
    ranks at the same time. Closes the sequence.
    """
    with _recording() as (names, collectives):
        mx.eval(sequence.feed((1,) * width, width))
    sequence.close()
    given = [value for each in collectives for value in (*each.args, *each.keywords.values())]
    arrays = [value for value in given if isinstance(value, mx.array)]
    mx.eval(arrays)
    seconds = []
    for _ in range(1 + repeats):
        began, results = time.perf_counter(), []
        for collective in collectives:
            results.append(collective())
            # Submitted one by one: MLX evaluates many at once in an order of its own, and all ranks need the same one.
            mx.async_eval(results[-1])
        mx.eval(results)
        seconds.append(time.perf_counter() - began)
    # The first one has waited for the slowest rank to begin.
    return Exchange(dict(Counter(names)), sum(array.nbytes for array in arrays), tuple(seconds[1:]))


@contextmanager
def _recording() -> Iterator[tuple[list[str], list[partial[mx.array]]]]:
    """While in force, note each collective that is called in this process, by whatever model: its name, and the call
    with zeros for its arrays.
    """
    names: list[str] = []
    calls: list[partial[mx.array]] = []

    def record(name: str, *args: Any, **keywords: Any) -> mx.array:
        zeros = {keyword: _zeros(value) for keyword, value in keywords.items()}
        names.append(name)
        calls.append(partial(own[name], *map(_zeros, args), **zeros))
        return own[name](*args, **keywords)

    own: dict[str, Callable[..., mx.array]] = {name: getattr(mx.distributed, name) for name in _COLLECTIVES}
    for name in own:
        setattr(mx.distributed, name, partial(record, name))
    try:
        yield names, calls
    finally:
        for name, call in own.items():
            setattr(mx.distributed, name, call)
