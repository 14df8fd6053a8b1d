"""Garbage collection in a process with several threads."""

import gc
import threading
from typing import Any


def collect_garbage() -> None:
    """Collect all garbage; `gc.collect` collects none while another thread is collecting."""
    ident, collected = threading.get_ident(), False

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal collected
        collected |= (phase, info["generation"], threading.get_ident()) == ("stop", 2, ident)

    gc.callbacks.append(note)
    try:
        while not collected:
            gc.collect()
    finally:
        gc.callbacks.remove(note)
