"""The result of one check."""

from __future__ import annotations

from typing import Any, Literal

import attrs

# "failed": a promise does not hold here; "crashed" and "hung": so ended the check's process; "skipped": the check does
# not apply to this device.
Status = Literal["passed", "failed", "crashed", "hung", "skipped"]

FAILURES: tuple[Status, ...] = ("failed", "crashed", "hung")


@attrs.frozen
class Finding:
    """The result of one check.

    Attributes:
        status: how it ended.
        summary: one sentence, without paths and prompts.
        figures: what was measured, by name, as JSON has it.
    """

    status: Status
    summary: str
    figures: dict[str, Any] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return attrs.asdict(self)


def passed_if(is_right: bool, right: str, wrong: str, **figures: Any) -> Finding:
    """A finding of a check that passes or fails."""
    return Finding("passed" if is_right else "failed", right if is_right else wrong, figures)
