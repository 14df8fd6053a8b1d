"""For scripts and notebooks: a generation without an event loop of one's own."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import trio

from protocol.errors import WrongEventLoopError
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

    Raises: as those two, and:
        WrongEventLoopError: an event loop is running here, which this would block. A notebook's is let pass, since
            whoever runs a cell waits for it.

    Interrupting: Ctrl-C raises KeyboardInterrupt once the forward pass that is running has finished.
    """
    check_no_event_loop("generate_sync")
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    settings = {name: value for name, value in keywords.items() if name not in OPTIONS}

    async def main() -> Completion:
        async with open(target, draft, **options) as runtime:
            return await runtime.generate(prompt, **settings)

    return trio.run(main)


def check_no_event_loop(what: str) -> None:
    """Raises: WrongEventLoopError: an event loop is running in this thread, and `what` would block it."""
    if trio.lowlevel.in_trio_run():
        name, module = "trio", "runtime"
    else:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if "ipykernel" in sys.modules:
            return
        name, module = "asyncio", "runtime.aio"
    raise WrongEventLoopError(
        f"{what} would block the event loop that is running here, {name}'s; write instead: "
        f"async with {module}.open(target, draft) as rt: completion = await rt.generate(prompt)"
    )
