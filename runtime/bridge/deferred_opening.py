"""Opens a runtime in another thread than the caller's, which imports what that takes as well.

The models' libraries take seconds to import, and a caller's event loop must not stand still for them. So neither this
module nor what it imports at its top needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.loading.model_sources import Source


def deferred_opening(
    target: Source, draft: Source | None, options: dict[str, Any], handle: str
) -> Callable[[], AbstractAsyncContextManager[Runtime]]:
    """What opens a runtime when it is called, in trio, in any thread.

    A model that is given as `(model, tokenizer)` is evaluated at once, in the caller's thread: a lazy array can be
    evaluated in no other than the one that made it.

    Args: as for `runtime.open`, and:
        handle: the module of what the caller will hold, which is imported beforehand.
    """
    evaluate_here(target)
    evaluate_here(draft)
    return partial(_open, target, draft, options, handle)


def evaluate_here(source: Source | None) -> None:
    """Evaluate a model that is given as `(model, tokenizer)`, in the thread that made it."""
    if not isinstance(source, tuple):
        return
    # Imported by now, where this is a model. What is none is told so by `open`.
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    if source and isinstance(source[0], Module):
        mx.eval(source[0])


def _open(
    target: Source, draft: Source | None, options: dict[str, Any], handle: str
) -> AbstractAsyncContextManager[Runtime]:
    from runtime.engine import opening

    import_module(handle)
    return opening.open(target, draft, **options)
