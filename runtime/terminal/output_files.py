"""Files that a command writes beside stdout."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import SettingsError
from protocol.reprs import shown_path


def check_place(name: str, path: Path) -> Path:
    """The path of a file to write, checked before any work.

    Raises: SettingsError: it is a directory, or in no directory that exists.
    """
    if path.is_dir():
        raise SettingsError(f"{name} {shown_path(str(path))} is a directory; name a file in it")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"{name} {shown_path(str(path))} is in no directory that exists; make {path.parent} first")
    return path
