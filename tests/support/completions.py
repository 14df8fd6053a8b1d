"""Token ids of real completions, and runtimes of which nothing is asked."""

from typing import Any

import runtime


def ids(completion: runtime.Completion) -> list[int]:
    return [token.id for token in completion.tokens]


async def open_and_close(*models: Any, **options: Any) -> None:
    """Open a runtime, and close it."""
    async with runtime.open(*models, **options):
        pass
