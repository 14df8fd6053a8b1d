"""Outrider without an event loop: the same runtime, for scripts, notebooks and plain threads.

with runtime.open_sync("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio and the models run in threads of their own, so this also works where another event loop is running, as in a
notebook. It blocks that loop, as any long computation in a notebook does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Unpack

import trio

from protocol.argument_aliases import MISSING
from protocol.errors import WrongEventLoopError
from protocol.settings import SettingsLike, settings_from, with_overrides
from runtime.bridge.runtime import opened
from runtime.engine.opening import OPTIONS, OpenArguments, OpenArgumentsAndSettings
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion
from runtime.loading.model_sources import Source
from runtime.sync.runtime import Conversation, Runtime, SyncThread, TokenStream, run_blocking

__all__ = ["Conversation", "Runtime", "TokenStream", "generate_sync", "open_sync"]


def open_sync(target: Source = MISSING, draft: Source | None = None, **options: Unpack[OpenArguments]) -> Runtime:
    """`runtime.open` without an event loop: load the models, and serve them until the runtime is closed.

    `with runtime.open_sync(…) as rt` closes the runtime at the end of the block. `rt = runtime.open_sync(…)` leaves
    that to `rt.close()`, or to dropping the last reference to the runtime, its streams and its conversations.

    Args: as for `runtime.open`. A trace function and logits processors are called in other threads.

    Returns: a `Runtime`, which several threads may use at once.

    Raises: as `runtime.open`, and:
        WrongEventLoopError: an event loop is running in this thread, and would be blocked. A notebook's loop is an
            exception: the user of a cell waits for it in any case.

    Interrupting: a Ctrl-C while loading is raised after the load, once the models are released.
    """
    check_no_event_loop("open_sync")
    return Runtime(run_blocking(opened(SyncThread, target, draft, dict(options))))


def generate_sync(
    prompt: Prompt,
    settings: SettingsLike | None = None,
    *,
    target: Source = MISSING,
    draft: Source | None = None,
    **keywords: Unpack[OpenArgumentsAndSettings],
) -> Completion:
    """Load the models, generate one text, and release the models.

    Args:
        prompt: text, token ids or chat messages.
        settings: as for `Runtime.stream`.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open`, and settings, each of which replaces that of `settings`.

    Raises: as `runtime.open` and `Runtime.generate`, and `WrongEventLoopError` as `open_sync`.

    Interrupting: a Ctrl-C is raised once the running forward pass has finished.
    """
    check_no_event_loop("generate_sync")
    options: dict[str, Any] = {name: value for name, value in keywords.items() if name in OPTIONS}
    overrides: dict[str, Any] = {name: value for name, value in keywords.items() if name not in OPTIONS}
    settings_from(with_overrides(settings, overrides))  # before the models are loaded
    with open_sync(target, draft, **options) as runtime:
        return runtime.generate(prompt, settings, **overrides)


def check_no_event_loop(what: str) -> None:
    """Raises: WrongEventLoopError: an event loop other than a notebook's is running here, and `what` would block it."""
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


def __dir__() -> list[str]:
    return sorted(__all__)
