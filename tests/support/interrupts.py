"""Interrupting a command at a chosen moment."""

from __future__ import annotations

import signal

from runtime.terminal.display import Display


class Interrupted(Display):
    """A display that sends a signal to the process when it is to show an activity that begins with `at`."""

    at = ""
    number = signal.SIGINT

    def show_activity(self, what: str) -> None:
        if what.startswith(self.at):
            signal.raise_signal(self.number)
