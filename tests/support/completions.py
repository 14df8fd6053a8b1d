"""Token ids of real completions and streams."""

from __future__ import annotations

import runtime


def ids(completion: runtime.Completion) -> list[int]:
    """The ids of a completion."""
    return [token.id for token in completion.tokens]


async def read_into(got: list[int], stream: runtime.TokenStream) -> None:
    """Append the ids of a stream to a list until the stream ends."""
    async for token in stream:
        got.append(token.id)
