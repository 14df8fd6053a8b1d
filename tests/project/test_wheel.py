"""The wheel: it has every file that an installed Outrider needs, and works where no source tree is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "protocol", "runtime")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.split()) - set(zipfile.ZipFile(wheel).namelist()) == set()


@pytest.mark.slow
def test_what_the_wheel_has_generates_text_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    # Before everything else on the path, so that no source tree is found; its dependencies are those of this process.
    script = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import runtime; "
        f"assert runtime.__file__.startswith({str(installed)!r}), runtime.__file__; "
        "pair = {'target': runtime.DEMO_TARGET, 'draft': runtime.DEMO_DRAFT}; "
        "print(runtime.generate_sync('import os', **pair, max_tokens=8).text)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(done.stdout) > 1
