"""Interrupting a command, or a measurement, at a chosen moment."""

import signal
from typing import Any

import trio

from runtime.terminal.display import Display


class Interrupted(Display):
    """A display that sends a signal to the process when it is to show an activity that begins with `at`."""

    at = ""
    number = signal.SIGINT

    def show_activity(self, what: str) -> None:
        if what.startswith(self.at):
            signal.raise_signal(self.number)


async def cancelled_at(at: str, measured: Any, *pair: Any) -> Any:
    """The result of a measurement of a pair that is cancelled when its progress begins with `at`."""
    with trio.CancelScope() as scope:
        await measured.measure(*pair, on_progress=lambda what: scope.cancel() if what.startswith(at) else None)
    assert scope.cancelled_caught
    return measured.result()
