"""MLX's default device, on which both models compute. Imports mlx only where a device is chosen."""

from __future__ import annotations

from protocol.errors import SettingsError


def use_device(device: str | None) -> None:
    """Make a device the default of MLX, and so of this process.

    Args:
        device: "cpu" or "gpu"; None leaves MLX's own default.

    Raises: SettingsError: the device is not available.
    """
    if device is None:
        return
    import mlx.core as mx

    wanted = mx.Device(mx.cpu if device == "cpu" else mx.gpu)
    if not mx.is_available(wanted):
        raise SettingsError(f"--device {device} is not available in this MLX; leave it out for its default")
    mx.set_default_device(wanted)
