"""Models whose forward passes wait until a test releases them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from models import Wrapped


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 (the condition changes in other threads)
        await asyncio.sleep(0)


class Held(Wrapped):
    """A model that stops in the middle of a chosen forward pass until it is released."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._holds_after = -1
        self._is_in = threading.Event()
        self._may_go_on = threading.Event()

    def hold(self, after: int = 0) -> None:
        """Stop the next forward pass, or the one after `after` others."""
        self._holds_after = after

    async def is_in(self) -> None:
        """Wait until a forward pass has been stopped."""
        await until(self._is_in.is_set)

    def let_go_on(self) -> None:
        self._may_go_on.set()

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._holds_after -= 1
        if self._holds_after == -1:
            self._is_in.set()
            self._may_go_on.wait()
        return super().__call__(inputs, cache)


@contextlib.asynccontextmanager
async def let_go_on_after(held: Held) -> AsyncIterator[None]:
    """Release the model on exit, so that a failing test does not hang as well."""
    try:
        yield
    finally:
        held.let_go_on()
