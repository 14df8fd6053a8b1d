"""What importing `runtime` does: MLX's variables, the limit of open files, a user's file that hides a package."""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sweep

import runtime
import runtime.aio
import runtime.sync
from runtime.import_guards import run_guarded
from runtime.loading.mlx_environment import VALUES, VARIABLE

MINE = {"MLX_MAX_OPS_PER_BUFFER": "50", "MLX_ENABLE_CACHE_THRASHING_CHECK": "1"}


@sweep(("environment", "expected"), [({}, VALUES), (MINE, VALUES | MINE), ({VARIABLE: "0"}, dict.fromkeys(VALUES))])
def test_importing_sets_variables_that_a_user_has_not_set_without_importing_mlx(environment, expected):
    inherited = {name: value for name, value in os.environ.items() if name not in (*VALUES, VARIABLE)}
    code = "import runtime, sys, os, json; assert 'mlx.core' not in sys.modules; print(json.dumps(dict(os.environ)))"
    done = subprocess.run([sys.executable, "-c", code], env=inherited | environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert {name: found.get(name) for name in VALUES} == expected


NO_LIMIT = resource.RLIM_INFINITY
MLX_LM_S = (2048, 4096)  # what mlx-lm sets


@sweep(
    ("before", "after"),
    [
        ((1024, 4096), (2048, 4096)),
        ((256, NO_LIMIT), (2048, NO_LIMIT)),  # macOS
        ((512, 1024), (1024, 1024)),
        ((20_000, 20_000), (20_000, 20_000)),
        ((NO_LIMIT, NO_LIMIT), (NO_LIMIT, NO_LIMIT)),
    ],
)
def test_an_import_raises_the_limit_as_far_as_it_may_and_sets_others(monkeypatch, before, after):
    limits = {resource.RLIMIT_NOFILE: before, resource.RLIMIT_CORE: (9, 9)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)

    def set_limits() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, MLX_LM_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    run_guarded(set_limits)
    assert limits == {resource.RLIMIT_NOFILE: after, resource.RLIMIT_CORE: (0, 0)}
    set_limits()
    assert limits[resource.RLIMIT_NOFILE] == MLX_LM_S


IMPORTS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
import runtime
import runtime.aio
import runtime.sync
import runtime.server.app
import mlx_lm
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
assert mlx_lm.__spec__.loader.get_source("mlx_lm")
"""


@pytest.mark.slow
def test_everything_is_imported_under_a_hard_limit_below_mlx_lm_s() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


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
    look = "import sys, runtime; print('importlib.metadata' in sys.modules, runtime.__version__, 'mlx' in sys.modules)"
    done = script(tmp_path, look)
    assert (done.stdout, done.stderr) == (f"False {runtime.__version__} False\n", "")


@sweep("face", [runtime, runtime.aio, runtime.sync])
def test_completion_of_a_public_module_offers_the_public_names_alone(face):
    assert set(dir(face)) - {"__version__"} == set(face.__all__)
