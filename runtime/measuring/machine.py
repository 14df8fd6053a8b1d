"""The machine, and the versions of what runs on it, for reports. Imports nothing that needs mlx."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.loading import blas, mlx_environment
from runtime.loading.device import physical_memory, processor_name

PACKAGES = ("outrider", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-lm", "trio")
_PREFIXES = ("MLX_", "OUTRIDER_")
# Variables that hold secrets, or name other machines.
_PRIVATE = re.compile("KEY|TOKEN|SECRET|PASS|HOST|COORDINATOR|DEVICES")
_NVIDIA = Path("/proc/driver/nvidia/version")


def machine() -> dict[str, str]:
    """Processor, memory, system, driver, packages, and the variables of MLX and Outrider that the user has set."""
    ours = mlx_environment.set_here()
    return {
        "processor": f"{processor_name()}, {blas.num_usable_cores()} cores",
        "memory": f"{physical_memory() / 2**30:.0f} GiB",
        "system": _system(),
        **_driver(),
        "packages": ", ".join([f"Python {platform.python_version()}", *map(" ".join, versions().items())]),
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith(_PREFIXES) and name not in ours and not _PRIVATE.search(name)
        },
    }


def versions() -> dict[str, str]:
    """The versions of the installed packages that matter, by name."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _system() -> str:
    if macos := platform.mac_ver()[0]:
        return f"macOS {macos} {platform.machine()}"
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _driver() -> dict[str, str]:
    try:
        first_line = _NVIDIA.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return {}
    return {"driver": first_line.removeprefix("NVRM version:").strip()}
