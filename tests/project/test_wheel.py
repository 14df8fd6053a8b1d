"""The wheel has every file that an installed Outrider needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "protocol", "runtime")


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "wheel"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True)
    (built,) = target.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.split()) - set(zipfile.ZipFile(built).namelist()) == set()
