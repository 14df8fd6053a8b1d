"""Threads for work that would block trio's thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

Background = Callable[..., Awaitable[Any]]
"""Runs a function in the background while trio runs other tasks, as `trio.to_thread.run_sync` does."""

in_thread: Background = trio.to_thread.run_sync
