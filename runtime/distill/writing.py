"""Files that are written whole or not at all, so that neither a full disk nor a crash harms those before them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import SettingsError
from protocol.reprs import shown_path


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Make the folder of a file, which is written inside the block. Raises: SettingsError: it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError is what mlx raises
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SettingsError(
            f"{shown_path(str(file))} cannot be written: {reason}; once it can, the same call goes on from there"
        ) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path to write to, which takes the file's place at the end. Raises: SettingsError: it cannot."""
    partial = file.with_name(f"partial-{file.name}")
    with writing(file):
        try:
            yield partial
            os.replace(partial, file)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
