"""The device on which both models compute, the processor and the memory. Imports mlx only where a device is chosen."""

from __future__ import annotations

import os
import platform
import subprocess

from protocol.errors import SettingsError

# Limits of a container's memory, with version 2 of Linux's cgroups and with version 1.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The default of `memory_limit`, as a share of what `device_memory` says.
_SHARE_OF_GPU, _SHARE_OF_MACHINE = 0.9, 0.75

_SYSCTL = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")


def use_device(device: str | None, option: str = "--device") -> None:
    """Make "cpu" or "gpu" the default of MLX in this process; None leaves it. Raises: SettingsError: there is none."""
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
    """The memory of the machine, or of the container if that has less, in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for path in _CONTAINER_LIMITS if (limit := _number_in(path)) is not None)])


def runs_on_battery() -> bool:
    """Whether the machine is known to have no other power now."""
    import psutil  # takes 45 ms, which no start of a command needs

    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False


def _number_in(path: str) -> int | None:
    """The number in a file; None if there is no such file, or a word such as "max" in it."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def device_memory() -> int:
    """The memory that models may share with everything else, in bytes: the working set that Metal recommends, a GPU's
    own memory, or that of the machine or container. Imports mlx.
    """
    import mlx.core as mx

    information = mx.device_info() if mx.default_device().type == mx.DeviceType.gpu else {}
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if name in information:
            return int(information[name])
    return physical_memory()


def default_memory_limit(model_bytes: int) -> int:
    """The default of `memory_limit`. Imports mlx. A part is left to passes and to other programs; models that take
    nearly all have room for some caches, too.
    """
    import mlx.core as mx

    device = device_memory()
    share = _SHARE_OF_GPU if mx.default_device().type == mx.DeviceType.gpu else _SHARE_OF_MACHINE
    return max(int(share * device), model_bytes + device // 8)
