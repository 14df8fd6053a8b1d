"""The threads of Outrider in this process."""

from __future__ import annotations

import threading


def outrider_threads() -> list[str]:
    """Their names: those of models and of trio."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")]
