"""Whether a runtime is still at work, for whoever has to know without asking it for a text."""

from __future__ import annotations

import attrs


@attrs.frozen
class Health:
    """Which of the actors are alive.

    Attributes:
        target: False once it has failed, or the runtime was closed: no stream will ever begin again.
        draft: False once its thread has died, while it hangs or is late with a proposal, once the runtime was closed:
            texts come, but undrafted. None where the runtime was opened without a drafter. A drafter that fails in one
            stream is there for the next, and alive.
    """

    target: bool
    draft: bool | None

    @property
    def ok(self) -> bool:
        """Whether all that there should be is alive."""
        return self.target and self.draft is not False
