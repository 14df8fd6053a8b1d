"""The processor of this machine. Imports nothing that needs mlx."""

from __future__ import annotations

import platform


def processor_name() -> str:
    """The processor's name, or its architecture if the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
