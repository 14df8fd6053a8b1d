"""The threads of Outrider in this process."""

import threading


def outrider_threads() -> list[threading.Thread]:
    """The threads of models, and the trio thread of the asyncio and blocking interfaces."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("outrider")]


def outrider_thread_names() -> list[str]:
    """The names of these threads."""
    return [thread.name for thread in outrider_threads()]
