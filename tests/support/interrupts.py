"""Interrupting a command at a chosen moment."""

from __future__ import annotations

import signal

from runtime.terminal.display import Display


class Interrupted(Display):
    """Has a signal sent to the process when something is about to be done."""

    at = ""
    number = signal.SIGINT

    def show_activity(self, what: str) -> None:
        if what.startswith(self.at):
            signal.raise_signal(self.number)
