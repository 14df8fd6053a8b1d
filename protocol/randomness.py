"""Every random number of a session, as a function of seed, purpose, position and the text before it.

So the schedule does not matter, and work may be repeated. If a dropped node of the lookahead tree were drafted again
with fresh randomness, a policy could drop it *because of* the token that was drawn, and the rejection rule would not be
exact. No two decisions about one position share a purpose, so they are independent of each other.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import mlx.core as mx

_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What a random number is for."""

    NOISE = 1  # the Gumbel noise that target and draft share under the coupled match rule
    DRAFT = 2  # a token drawn from the draft's distribution
    ACCEPT = 3  # the uniform number that decides whether a drafted token is accepted
    RECOVER = 4  # a token drawn from the residual, or the bonus token
    XTC = 5  # whether XTC removes the top choices, for target and draft alike


def key_for(seed: int, purpose: Purpose, position: int, trail: int = 0) -> mx.array:
    """A random key for a decision about the token at an absolute position; `trail`: see `further`, or 0."""
    return mx.random.key(_number(seed, purpose, position, trail))


def keys_for(purpose: Purpose, decisions: Sequence[tuple[int, int] | tuple[int, int, int]]) -> mx.array:
    """The keys, (n, 2) for `mx.vmap`, of decisions (seed, position) or (seed, position, trail), as of `key_for`."""
    numbers = [_number(seed, purpose, *place) for seed, *place in decisions]
    return mx.array([[number >> 32, number & 0xFFFFFFFF] for number in numbers], dtype=mx.uint32)


def _number(seed: int, purpose: Purpose, position: int, trail: int = 0) -> int:
    mixed = _mix(_mix(_mix(seed) ^ int(purpose)) ^ position)
    return _mix(mixed ^ trail) if trail else mixed


def seed_of_text(seed: int, number: int) -> int:
    """The seed of text `number`, >= 0, of several that are generated with one seed; the first has that seed itself."""
    return seed if number == 0 else _mix(_mix(seed) ^ _mix(number))


def seed_of_prediction(seed: int, prediction: Sequence[int]) -> int:
    """A seed for a text with a prediction, in [0, 2**64), where drafted tokens are judged by random numbers.

    The copies of a prediction must be independent of those numbers. An earlier answer of the same seed is not, if its
    random numbers are used again.
    """
    digest = blake2b(array("q", prediction), digest_size=8).digest()
    return _mix(_mix(seed) ^ int.from_bytes(digest, "little"))


def further(trail: int, token: int) -> int:
    """The trail of a text with one more token. A trail is a hash of a text, in [0, 2**64); of the empty text it is 0.

    Without it, two branches of the lookahead tree would draw at one position with the same noise, and the drafter's
    behaviour after one draw could reveal something about the other.
    """
    return _mix(trail ^ (token + 1))


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection that spreads neighbouring values."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
