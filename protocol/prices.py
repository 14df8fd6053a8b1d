"""What a forward pass costs, measured as the passes go by."""

from __future__ import annotations

import attrs


@attrs.define
class WidthPrice:
    """Seconds of a forward pass as an affine function of its width, fitted to the recent ones.

    An exponentially weighted least-squares line. Machines, caches and neighbours change, so what was measured
    `memory` passes ago counts for 1/e.

    Attributes:
        memory: in passes, > 1.
    """

    memory: float = 50.0
    _weight: float = attrs.field(default=0.0, init=False)
    _width: float = attrs.field(default=0.0, init=False)
    _seconds: float = attrs.field(default=0.0, init=False)
    _width_squared: float = attrs.field(default=0.0, init=False)
    _product: float = attrs.field(default=0.0, init=False)

    def observe(self, width: int, seconds: float) -> None:
        """Take note of a pass of `width` tokens."""
        keep = 1.0 - 1.0 / self.memory
        self._weight = keep * self._weight + 1.0
        share = 1.0 / self._weight
        self._width += share * (width - self._width)
        self._seconds += share * (seconds - self._seconds)
        self._width_squared += share * (width * width - self._width_squared)
        self._product += share * (width * seconds - self._product)

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs, >= 0; 0 until passes of two widths were seen."""
        spread = self._width_squared - self._width**2
        if spread <= 1e-9:
            return 0.0
        return max(0.0, (self._product - self._width * self._seconds) / spread)

    def __call__(self, width: int) -> float:
        """Seconds that a pass of `width` tokens is expected to take, >= 0; 0 before the first."""
        return max(0.0, self._seconds + self.per_token * (width - self._width))
