"""The logit check: whether a token can be chosen from a row of logits, by the row's maximum.

MLX's maximum of a row is NaN if any element is. So the maximum is finite if and only if no logit is NaN or +inf and at
least one is finite. That is one reduction, which is evaluated together with the token of the row.
"""

from __future__ import annotations

import math
from typing import Any, cast

import attrs
import mlx.core as mx

from protocol.errors import NotANumberError, OutriderError, ProcessorError


@attrs.define
class SharedValues:
    """The values of a lazy array (n,), of which several texts read parts. It is read back once."""

    array: mx.array
    _values: list[Any] | None = attrs.field(default=None, init=False)

    def part(self, rows: slice) -> list[Any]:
        """Some of the values. Evaluates the array if that was not done yet."""
        if self._values is None:
            self._values = cast(list[Any], self.array.tolist())
        return self._values[rows]


@attrs.frozen
class LogitCheck:
    """The largest logit of each row, lazy.

    Attributes:
        own: (n,) of the model's own logits.
        processed: (n,) of the processed logits; None if no processor changed them.
        rows: which of them are this text's.
    """

    own: SharedValues
    processed: SharedValues | None = None
    rows: slice = slice(None)

    @classmethod
    def of(cls, logits: mx.array, processed: mx.array) -> LogitCheck:
        """The check of the model's rows (n, V), and of the processed rows, which may be the same object."""
        own = SharedValues(mx.max(logits, axis=-1))
        return cls(own, None if processed is logits else SharedValues(mx.max(processed, axis=-1)))

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated together with something else."""
        return [self.own.array] if self.processed is None else [self.own.array, self.processed.array]

    def num_sound(self) -> int:
        """How many rows come before the first one from which no token can be chosen."""
        own = self.own.part(self.rows)
        processed = own if self.processed is None else self.processed.part(self.rows)
        maxima = zip(own, processed, strict=True)
        return next((i for i, row in enumerate(maxima) if not all(map(math.isfinite, row))), len(own))

    def check(self, row: int, position: int, role: str) -> None:
        """Raise an error if no token can be chosen from a row.

        Args:
            row: index of the row.
            position: absolute, of the token that the row is for.
            role: of the model, for the message.

        Raises:
            NotANumberError: the model's own logits are not numbers.
            ProcessorError: processors, penalties or `logit_bias` left no finite logit.
        """
        if (error := self._error(row, position, role)) is not None:
            raise error

    def _error(self, row: int, position: int, role: str) -> OutriderError | None:
        own = self.own.part(self.rows)[row]
        if not math.isfinite(own):
            return NotANumberError(
                f"the {role} model gave {_named(own)} for the token at position {position}; usually numbers have "
                "overflowed in float16, or weights are damaged: load the model in bfloat16 or float32, or download it "
                "again"
            )
        if self.processed is None or math.isfinite(processed := self.processed.part(self.rows)[row]):
            return None
        return ProcessorError.of(
            "logits processors, penalties and {logit_bias} leave {maximum} for the token at position {position}; "
            "forbid tokens with -inf, and leave at least one logit finite",
            maximum=_named(processed),
            position=position,
        )


def _named(maximum: float) -> str:
    if math.isnan(maximum):
        return "logits that are not numbers (NaN)"
    return "logits that are infinite (+inf)" if maximum > 0 else "no logit that is finite (all are -inf)"
