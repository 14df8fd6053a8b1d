"""The training corpus of the demo pair, and its held-out part.

It is the source of the running interpreter's standard library (PSF licence).
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from pathlib import Path

SEED = 7  # seed of the choice of prompts


def corpus_files() -> tuple[list[Path], list[Path]]:
    """The standard library's source files, split into (training, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "encodings", "pydoc_data", "__pycache__", "data"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not skipped & set(path.relative_to(root).parts) and path.stat().st_size < 150_000
    )
    return (
        [path for path in files if not is_held_out(path.relative_to(root))],
        [path for path in files if is_held_out(path.relative_to(root))],
    )


def is_held_out(relative: Path) -> bool:
    return hashlib.sha256(relative.as_posix().encode()).digest()[0] % 20 == 0


def read_source(path: Path) -> str:
    # A few test files have unusual encodings on purpose; their invalid bytes are dropped.
    return path.read_text(encoding="utf-8", errors="ignore")


def held_out_prompts(count: int) -> list[str]:
    """The first lines of randomly chosen top-level definitions in held-out files."""
    _, files = corpus_files()
    found = []
    for path in files:
        source = read_source(path)
        for match in re.finditer(r"^(?:def|class) .*(?:\n[ \t]+.*|\n){3}", source, flags=re.MULTILINE):
            found.append(match.group())
    return random.Random(SEED).sample(found, count)
