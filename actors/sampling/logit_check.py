"""The logit check: whether a token can be chosen from a row of logits, by the row's maximum.

MLX's maximum of a row is NaN if any element is. So it is finite if and only if no logit is NaN or +inf and at least one
is finite.
"""

from __future__ import annotations

import math
from typing import cast

import attrs
import mlx.core as mx

from protocol.errors import NotANumberError, ProcessorError


@attrs.define
class LogitCheck:
    """The largest logit of each row, lazy: (n,) of the model's own, and of the processed ones if these differ."""

    own: mx.array
    processed: mx.array | None = None
    _values: list[tuple[float, ...]] | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, logits: mx.array, processed: mx.array) -> LogitCheck:
        """The check of the model's rows (n, V), and of the processed rows, which may be the same object."""
        return cls(mx.max(logits, axis=-1), None if processed is logits else mx.max(processed, axis=-1))

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated together with something else."""
        return [self.own] if self.processed is None else [self.own, self.processed]

    def are_sound(self) -> list[bool]:
        """Whether a token can be chosen from each row."""
        return [all(map(math.isfinite, row)) for row in self._read()]

    def num_sound(self) -> int:
        """How many rows come before the first one from which no token can be chosen."""
        sound = self.are_sound()
        return sound.index(False) if False in sound else len(sound)

    def _read(self) -> list[tuple[float, ...]]:
        if self._values is None:
            self._values = list(zip(*(cast(list[float], each.tolist()) for each in self.arrays()), strict=True))
        return self._values

    def check(self, row: int, position: int, role: str) -> None:
        """Check that a token can be chosen from a row, for the token at an absolute position.

        Raises: NotANumberError: the model's own logits are no numbers. ProcessorError: only the processed ones are.
        """
        own, *processed = self._read()[row]
        if not math.isfinite(own):
            raise NotANumberError(
                f"the {role} model gave {_named(own)} for the token at position {position}; usually numbers have "
                "overflowed in float16, or weights are damaged: load the model in bfloat16 or float32, or download it "
                "again"
            )
        if processed and not math.isfinite(processed[0]):
            raise ProcessorError(
                f"logits processors, penalties and logit_bias leave {_named(processed[0])} for the token at position "
                f"{position}; forbid tokens with -inf, and leave at least one logit finite"
            )


def _named(maximum: float) -> str:
    if math.isnan(maximum):
        return "logits that are not numbers (NaN)"
    return "logits that are infinite (+inf)" if maximum > 0 else "no logit that is finite (all are -inf)"
