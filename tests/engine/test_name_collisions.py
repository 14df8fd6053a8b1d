"""The version, and the error where a user's own file hides one of Outrider's packages."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from sweeps import sweep

import runtime

ROOT = Path(__file__).parents[2]


def script(where: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script; its own directory comes first on Python's path."""
    (where / "main.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(where / "main.py")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@sweep("name", ["protocol", "actors"])
@sweep("kind", ["file", "directory", "imported before"])
def test_a_users_file_in_the_place_of_a_package_is_named(name, kind, tmp_path):
    if kind == "directory":
        (tmp_path / name).mkdir()
        hiding = tmp_path / name
    else:
        hiding = tmp_path / f"{name}.py"
        hiding.write_text("print('mine')" if kind == "imported before" else "raise AssertionError('not to be run')")
    done = script(tmp_path, f"import {name}\nimport runtime" if kind == "imported before" else "import runtime")
    if kind == "directory":
        # A directory without __init__.py comes after every package on the path.
        assert (done.returncode, done.stderr) == (0, "")
        (hiding / "__init__.py").touch()
        done = script(tmp_path, "import runtime")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: Outrider's package {name!r} is hidden by {str(hiding)!r}, which Python finds first; "
        "rename that, or run your program from another directory"
    )


def test_the_version_is_the_packages_and_looked_up_without_mlx(tmp_path):
    assert runtime.__version__ == importlib.metadata.version("outrider")
    assert "__version__" in dir(runtime)
    look = "import sys, runtime; print('importlib.metadata' in sys.modules, runtime.__version__, 'mlx' in sys.modules)"
    done = script(tmp_path, look)
    assert (done.stdout, done.stderr) == (f"False {runtime.__version__} False\n", "")
