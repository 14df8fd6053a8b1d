"""Jobs that several sessions shared, and that failed."""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.define(eq=False)
class Suspects:
    """The sessions whose parts may have made a shared job fail. Each part is repeated alone: one that fails alone was
    the cause. If none does, all of them together were too much.
    """

    num_left: int
    _on_all_acquitted: Callable[[], None]

    def acquit(self) -> None:
        """Count a session that has succeeded alone."""
        self.num_left -= 1
        if self.num_left == 0:
            self._on_all_acquitted()
