"""Token ids of real completions."""

from __future__ import annotations

import runtime


def ids(completion: runtime.Completion) -> list[int]:
    return [token.id for token in completion.tokens]
