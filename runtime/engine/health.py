"""The health of a runtime: whether its models are alive, without a generation to find out."""

from __future__ import annotations

import attrs


@attrs.frozen
class Health:
    """Which of the actors are alive.

    Attributes:
        target: False once it has failed or the runtime was closed: no stream will begin any more.
        draft: False while the drafter hangs or is late with a proposal, and once its thread has died or the runtime was
            closed: texts are then generated undrafted. None without a drafter. A drafter that fails in one stream
            serves the next, and is alive.
    """

    target: bool
    draft: bool | None

    @property
    def ok(self) -> bool:
        """Whether the target is alive, and the drafter if there is one."""
        return self.target and self.draft is not False
