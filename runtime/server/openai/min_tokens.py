"""The logits processor that keeps an answer from ending before it has a number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from protocol.logits_processors import Stateless, stateless


def min_tokens(length: int, ends: Iterable[int]) -> Stateless:
    """A logits processor that forbids tokens which end a text, until the text has a length.

    Drafter and target apply it to the same texts, so what is proposed is judged by the same rule. Where nothing else is
    allowed, as after JSON that is complete, the text may end.

    Args:
        length: in tokens, prompt included.
        ends: ids of the tokens; those beyond the model's vocabulary do not matter.
    """
    ids = sorted(ends)

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        known = [id for id in ids if id < logits.shape[-1]]
        if tokens.size >= length or not known:
            return logits
        masked = mx.put_along_axis(logits, mx.array([known]), mx.array(-mx.inf, logits.dtype), axis=-1)
        return mx.where(mx.max(masked) == -mx.inf, logits, masked)

    return stateless(forbid)
