"""The threads of Outrider in this process."""

from __future__ import annotations

import threading


def outrider_threads() -> list[str]:
    """The names of Outrider's threads: those of models, and the trio thread."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")]
