"""The device on which both models compute, the processor and the memory. Imports mlx only where a device is chosen."""

from __future__ import annotations

import os
import platform
import subprocess

from protocol.errors import SettingsError

_SYSCTL = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")


def use_device(device: str | None, option: str = "--device") -> None:
    """Make "cpu" or "gpu" the default of MLX, and so of this process; None leaves it. Messages name the `option` that
    asked for it. Raises: SettingsError: the device is not available.
    """
    if device is None:
        return
    import mlx.core as mx

    wanted = mx.Device(mx.cpu if device == "cpu" else mx.gpu)
    if not mx.is_available(wanted):
        raise SettingsError(f"{option} {device} is not available in this MLX; leave it out for its default")
    mx.set_default_device(wanted)


def processor_name() -> str:
    """The processor's name, or its architecture if the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return _apple_chip() or platform.processor() or platform.machine()


def _apple_chip() -> str:
    """The name of the chip, such as "Apple M3 Max"; "" on another system. (`platform.processor` says "arm".)"""
    try:
        done = subprocess.run(_SYSCTL, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def physical_memory() -> int:
    """The memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
