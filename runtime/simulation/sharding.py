"""A target that is sharded over several machines: what a pass computes on each, and what they exchange.

Tensor parallel, as mlx-lm shards a model: each rank computes its part of every layer, and two all-reduces a layer, of
one hidden state a row, add the parts up. More ranks make the computation shorter, but not the exchange.
"""

from __future__ import annotations

import attrs

from protocol.options import option
from protocol.validation import integer, number, one_of

MAX_RANKS = 1024
ALL_REDUCES = ("ring", "mesh", "tree")

# The least share of a measured large all-reduce that counts as sending.
MIN_SENDING_SHARE = 0.1

# After the attention, and after the feed-forward part.
_ALL_REDUCES_PER_LAYER = 2
_BYTES_PER_NUMBER = 2  # of bfloat16

# Layers and hidden size of some models, by name.
SHAPES = {
    "llama-8b": (32, 4096),
    "llama-70b": (80, 8192),
    "llama-405b": (126, 16384),
    "qwen3-235b": (94, 4096),
    "deepseek-v3": (61, 7168),
}


@attrs.frozen
class Sharding:
    """A target's ranks, and the links between them.

    A latency includes that of the software. "ring" passes parts around in 2(N − 1) steps, as MLX's ring does; in "mesh"
    each rank sends everything to each other rank at once, over a link for each pair, as JACCL does on a mesh; "tree"
    goes up and down a binary tree.

    Attributes:
        ranks: machines, in [1, 1024].
        pass_time: T_v(1) in milliseconds: the time in which one machine decodes a token, or would if it could.
        link_latency: microseconds that a small message takes from one rank to the next.
        link_bandwidth: bandwidth of a link in gigabits per second, in each direction.
        layers: number of layers of the target.
        hidden_size: hidden size of the target.
        all_reduce: algorithm of the all-reduces: ring, mesh or tree.

    Raises: SettingsError: a value is out of its range.
    """

    ranks: int = attrs.field(validator=integer(1, MAX_RANKS))
    pass_time: float = attrs.field(validator=number(above=0), metadata=option("MS"))
    link_latency: float = attrs.field(validator=number(0), metadata=option("US"))
    link_bandwidth: float = attrs.field(validator=number(above=0), metadata=option("GBIT"))
    layers: int = attrs.field(validator=integer(1), metadata=option("N"))
    hidden_size: int = attrs.field(validator=integer(1), metadata=option("N"))
    all_reduce: str = attrs.field(
        default="ring", validator=one_of(*ALL_REDUCES, spelled="ring, mesh or tree"), metadata=option("KIND")
    )

    def exchange_ms(self, rows: int) -> float:
        """Milliseconds of all all-reduces of a pass over so many rows."""
        if self.ranks == 1:
            return 0.0
        num_bytes = rows * self.hidden_size * _BYTES_PER_NUMBER
        steps, times_sent = _steps(self.all_reduce, self.ranks)
        sending_us = times_sent * num_bytes * 8 / (self.link_bandwidth * 1e3)
        return self.layers * _ALL_REDUCES_PER_LAYER * (steps * self.link_latency + sending_us) / 1e3

    def pass_seconds(self, alone: float, rows: int) -> float:
        """Time of a pass over so many rows that takes `alone` on one machine, in units of T_v(1)."""
        return alone / self.ranks + self.exchange_ms(rows) / self.pass_time


def links_of(all_reduce: str, ranks: int, small: float, large: float, num_bytes: int) -> tuple[float, float]:
    """The links with which all-reduces over `ranks` take the measured times.

    Args:
        small: seconds of an all-reduce of a few bytes, > 0.
        large: seconds of one of `num_bytes`.

    Returns: `Sharding.link_latency` in microseconds, and `Sharding.link_bandwidth` in gigabits per second.
    """
    steps, times_sent = _steps(all_reduce, ranks)
    # On links as fast as memory, noise may make the larger all-reduce the faster one.
    sending = max(large - small, MIN_SENDING_SHARE * large)
    return small * 1e6 / steps, times_sent * num_bytes * 8 / sending / 1e9


def _steps(all_reduce: str, ranks: int) -> tuple[int, float]:
    """Messages of one all-reduce that wait for each other, and how many times all its bytes each rank sends."""
    match all_reduce:
        case "ring":
            return 2 * (ranks - 1), 2 * (ranks - 1) / ranks
        case "mesh":
            return 1, 1.0
        case _:
            depth = (ranks - 1).bit_length()
            return 2 * depth, 2.0


def described_sharding(sharding: Sharding, ranks: str) -> str:
    """A sharding in one line, with `ranks` for its number of ranks."""
    return (
        f"ranks {ranks}, {sharding.all_reduce} of links with "
        f"{sharding.link_latency:g} µs and {sharding.link_bandwidth:g} Gbit/s, {sharding.layers} layers of "
        f"{sharding.hidden_size}, T_v(1) {sharding.pass_time:g} ms on one machine"
    )
