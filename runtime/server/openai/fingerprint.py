"""The fingerprint of the server in its responses."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def fingerprint() -> str:
    """What the text of a seed may depend on beside the model: the server's version."""
    return f"outrider-{importlib.metadata.version('outrider')}"
