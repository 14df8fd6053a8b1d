"""Opens a runtime in the trio thread, and imports there what opening needs.

The models' libraries take seconds to import, and the caller's event loop must not be blocked for that long. So neither
this module nor what it imports at its top needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.loading.model_sources import Source


def make_opener(
    target: Source, draft: Source | None, options: dict[str, Any]
) -> Callable[[], AbstractAsyncContextManager[Runtime]]:
    """A function that opens a runtime, to be called in trio, in any thread.

    A model given as `(model, tokenizer)` is evaluated now, in the caller's thread: only the thread that made a lazy
    array can evaluate it.

    Args: as for `runtime.open`.
    """
    evaluate_on_this_thread(target)
    evaluate_on_this_thread(draft)

    def open_in_trio() -> AbstractAsyncContextManager[Runtime]:
        # The caller needs the handles next. It must find them imported.
        from runtime.bridge import runtime as _  # noqa: F401
        from runtime.engine import opening

        return opening.open(target, draft, **options)

    return open_in_trio


def evaluate_on_this_thread(source: Source | None) -> None:
    """Evaluate a model that is given as `(model, tokenizer)`; called on the thread that made it."""
    if not isinstance(source, tuple):
        return
    # A caller that has a model has imported these. `open` raises ModelError for anything that is no model.
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    if source and isinstance(source[0], Module):
        mx.eval(source[0])
