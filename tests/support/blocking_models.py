"""Models that stop in the middle of a forward pass until a test releases them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import trio
from models import Wrapped
from polling import until_in_asyncio


class BlockingModel(Wrapped):
    """A model that, after `block`, stops in the middle of a forward pass until `release`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._num_passes_left = -1
        self._when_blocked: Callable[[], object] = lambda: None
        self._is_blocked = threading.Event()
        self._is_released = threading.Event()

    def block(self, after: int = 0, when_blocked: Callable[[], object] = lambda: None) -> None:
        """Stop the next forward pass, or the one after `after` others, and call a function in it."""
        self._is_released.clear()
        self._is_blocked.clear()
        self._when_blocked = when_blocked
        self._num_passes_left = after

    def is_blocked(self) -> bool:
        return self._is_blocked.is_set()

    def wait_blocked(self) -> None:
        self._is_blocked.wait()

    async def blocked_in_asyncio(self) -> None:
        await until_in_asyncio(self._is_blocked.is_set)

    async def blocked_in_trio(self) -> None:
        await trio.to_thread.run_sync(self.wait_blocked)

    def release(self) -> None:
        self._is_released.set()

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._num_passes_left -= 1
        if self._num_passes_left == -1:
            self._is_blocked.set()
            self._when_blocked()
            self._is_released.wait()
        return super().__call__(inputs, cache)


@contextlib.contextmanager
def released_on_exit(model: BlockingModel) -> Iterator[None]:
    """Release the model on exit, so that a failing test does not hang as well."""
    try:
        yield
    finally:
        model.release()
