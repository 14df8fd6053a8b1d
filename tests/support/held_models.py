"""Models whose forward passes wait until a test lets them go on."""

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
    while not holds():  # noqa: ASYNC110 (what it waits for happens in other threads)
        await asyncio.sleep(0)


class Held(Wrapped):
    """A model whose forward pass, once that is asked for, stops in the middle until it is let go on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._holds_after = -1
        self._is_in = threading.Event()
        self._may_go_on = threading.Event()

    def hold(self, after: int = 0) -> None:
        """Stop the next forward pass, or one after so many others."""
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
    """Have a test that fails not hang as well."""
    try:
        yield
    finally:
        held.let_go_on()
