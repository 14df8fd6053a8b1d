"""Every random number of a session, as a function of (seed, purpose, position) and of the text before alone.

A number that depends on where it is used, and not on how many were drawn before, makes the schedule
irrelevant: work thrown away, repeated or done in another order changes nothing. For the rejection
rule it does more. Were a dropped node of the lookahead tree drafted again with fresh randomness, a
policy could drop it *because of* the token drawn, and the output would be biased; here drafting it
again draws the same token.

No two decisions about one position share a purpose, so they are independent of each other.
"""

from __future__ import annotations

import enum

import mlx.core as mx

_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What a random number is for."""

    NOISE = 1  # the Gumbel noise that target and draft share under the coupled match rule
    DRAFT = 2  # a token drawn from the draft's distribution
    ACCEPT = 3  # the uniform number against which a drafted token is judged
    RECOVER = 4  # a token drawn from the residual, or the bonus token
    XTC = 5  # whether XTC leaves out the top choices, for target and draft alike


def key_for(seed: int, purpose: Purpose, position: int, trail: int = 0) -> mx.array:
    """A random key for one decision.

    Args:
        seed: of the session, in [0, 2**64).
        purpose: what the key is for.
        position: absolute position of the token it is for, 0 being the prompt's first; >= 0.
        trail: see `further`; 0 where the text before does not matter.

    Returns: an MLX random key.
    """
    mixed = _mix(_mix(_mix(seed) ^ int(purpose)) ^ position)
    return mx.random.key(_mix(mixed ^ trail) if trail else mixed)


def further(trail: int, token: int) -> int:
    """The trail of a text with one more token: a number in [0, 2**64) that tells texts apart, from 0 on.

    Two branches of the lookahead tree draw at the same position. With the same key their draws would be the same
    noise, and what the one let the drafter do could tell something of the other.
    """
    return _mix(trail ^ (token + 1))


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection that spreads near values."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
