"""For scripts and notebooks: a generation without an event loop of one's own."""

from __future__ import annotations

import inspect
from typing import Any

import trio

from runtime.engine import open
from runtime.opening import Source
from runtime.streaming import Completion
from runtime.text import Prompt

_OPTIONS = {name for name, p in inspect.signature(open).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def generate_sync(prompt: Prompt, *, target: Source, draft: Source | None = None, **keywords: Any) -> Completion:
    """Load the models, generate one text, and let go of everything again.

    Args:
        prompt: text, token ids or chat messages.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open` and settings of `Runtime.stream`.

    Raises: as those two.

    Interrupting: Ctrl-C raises KeyboardInterrupt once the forward pass that is running has finished.
    """
    options = {name: value for name, value in keywords.items() if name in _OPTIONS}
    settings = {name: value for name, value in keywords.items() if name not in _OPTIONS}

    async def main() -> Completion:
        async with open(target, draft, **options) as runtime:
            return await runtime.generate(prompt, **settings)

    return trio.run(main)
