"""Whether logits are numbers, by the largest of each row.

MLX's maximum is NaN where anything is NaN. So it is finite just where nothing is NaN or +inf and something is finite:
one reduction, which is evaluated together with what is read of the row anyway.
"""

from __future__ import annotations

import math
from typing import cast

import attrs
import mlx.core as mx

from protocol.errors import NotANumberError, OutriderError, ProcessorError


@attrs.frozen
class LogitCheck:
    """The largest logit of each row, lazy.

    Attributes:
        own: (n,) as the model says.
        shaped: (n,) after the processors; None where they left the rows as they were.
    """

    own: mx.array
    shaped: mx.array | None = None

    @classmethod
    def of(cls, logits: mx.array, processed: mx.array) -> LogitCheck:
        """Of rows (n, V), and of what processors made of them, which may be the same object."""
        return cls(mx.max(logits, axis=-1), None if processed is logits else mx.max(processed, axis=-1))

    def arrays(self) -> list[mx.array]:
        """All of them, to be evaluated along with something else."""
        return [self.own] if self.shaped is None else [self.own, self.shaped]

    def num_sound(self) -> int:
        """How many rows, from the first on, can be chosen from."""
        logit_check = zip(*(cast(list[float], array.tolist()) for array in self.arrays()), strict=True)
        return next((i for i, row in enumerate(logit_check) if not all(map(math.isfinite, row))), self.own.size)

    def check(self, row: int, position: int, role: str) -> None:
        """Make sure that a row can be chosen from.

        Args:
            row: its index.
            position: absolute, of the token that it is for.
            role: of the model, for the message.

        Raises: NotANumberError, ProcessorError: it cannot, because of the model or of what came after it.
        """
        if (error := self._trouble(row, position, role)) is not None:
            raise error

    def _trouble(self, row: int, position: int, role: str) -> OutriderError | None:
        own = cast(list[float], self.own.tolist())[row]
        if not math.isfinite(own):
            return NotANumberError(
                f"the {role} model gave {_named(own)} for the token at position {position}; usually numbers have "
                "overflowed in float16, or weights are damaged: load it in bfloat16 or float32, or get it anew"
            )
        if self.shaped is None or math.isfinite(shaped := cast(list[float], self.shaped.tolist())[row]):
            return None
        return ProcessorError(
            f"logits processors, penalties and logit_bias leave {_named(shaped)} for the token at position {position}; "
            "forbid tokens by -inf, and leave one at least a finite number"
        )


def _named(peak: float) -> str:
    if math.isnan(peak):
        return "logits that are not numbers (NaN)"
    return "logits that are infinite (+inf)" if peak > 0 else "no logit that is finite (all are -inf)"
