"""Saving what models have cached of a text, and loading it, as conversations do, but without messages."""

from collections.abc import Sequence
from typing import Any

from protocol.settings import Settings


async def save_text(rt: Any, file: Any, text: Sequence[int]) -> None:
    """Save a text that is in the prefix caches."""
    await rt._models().save(file, [], tuple(text), None, Settings())


async def load_text(rt: Any, file: Any, *, any_draft: bool = False) -> None:
    """Put what was saved into the prefix caches, as for a session with a drafter, if the runtime has one."""
    models = rt._models()
    session = await models.read(file, any_draft=any_draft)
    await models.fill(file, session, rt._draft is not None)
