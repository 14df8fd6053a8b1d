"""Token ids of real completions."""

from __future__ import annotations

import runtime


def ids(completion: runtime.Completion) -> list[int]:
    """The ids of a completion's tokens."""
    return [token.id for token in completion.tokens]
