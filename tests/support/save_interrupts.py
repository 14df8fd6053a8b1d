"""Cancelling a save or a load at a chosen moment."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from actors.persistence import saved_sequence


def cancel_at(scope: trio.CancelScope, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel `scope` at the `step`-th point of a save or load: jobs of a model, calls in a thread, checks in it."""
    count = -1

    def count_up() -> None:
        nonlocal count
        count += 1
        if count == step:
            scope.cancel()

    run, run_sync, check = saved_sequence._run, trio.to_thread.run_sync, trio.from_thread.check_cancelled

    async def noted_run(*args: Any) -> Any:
        count_up()
        return await run(*args)

    async def noted_run_sync(*args: Any) -> Any:
        count_up()
        return await run_sync(*args)

    def noted_check() -> None:
        trio.from_thread.run_sync(count_up)
        check()

    monkeypatch.setattr(saved_sequence, "_run", noted_run)
    monkeypatch.setattr(trio.to_thread, "run_sync", noted_run_sync)
    monkeypatch.setattr(trio.from_thread, "check_cancelled", noted_check)
