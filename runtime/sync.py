"""For scripts and notebooks: a generation without an event loop of one's own."""

from __future__ import annotations

from typing import Any

import trio

from runtime.opening import OPTIONS, open
from runtime.sources import Source
from runtime.streaming import Completion
from runtime.text import Prompt


def generate_sync(prompt: Prompt, *, target: Source, draft: Source | None = None, **keywords: Any) -> Completion:
    """Load the models, generate one text, and let go of everything again.

    Args:
        prompt: text, token ids or chat messages.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open` and settings of `Runtime.stream`.

    Raises: as those two.

    Interrupting: Ctrl-C raises KeyboardInterrupt once the forward pass that is running has finished.
    """
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    settings = {name: value for name, value in keywords.items() if name not in OPTIONS}

    async def main() -> Completion:
        async with open(target, draft, **options) as runtime:
            return await runtime.generate(prompt, **settings)

    return trio.run(main)
