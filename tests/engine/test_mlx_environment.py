"""The environment variables of MLX: set when `runtime` is imported, but not over a user's own, nor if switched off."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from models import llama

import runtime
from runtime.loading import mlx_environment
from runtime.loading.mlx_environment import VALUES, VARIABLE

# Imports what `code` says, in a fresh process, and prints MLX's variables.
SHOW = "import os, json; print(json.dumps({{name: os.environ.get(name) for name in {names!r}}}))"


def variables_after(code: str, **environment: str) -> dict[str, str | None]:
    inherited = {name: value for name, value in os.environ.items() if name not in (*VALUES, VARIABLE)}
    script = f"{code}\n{SHOW.format(names=tuple(VALUES))}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | environment, capture_output=True, text=True, check=True
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_importing_the_runtime_sets_them_without_importing_mlx() -> None:
    assert variables_after("import runtime, sys; assert 'mlx.core' not in sys.modules") == VALUES


def test_what_a_user_has_set_is_kept() -> None:
    mine = {"MLX_MAX_OPS_PER_BUFFER": "50", "MLX_ENABLE_CACHE_THRASHING_CHECK": "1"}
    assert variables_after("import runtime", **mine) == VALUES | mine


def test_none_is_set_where_the_environment_says_so() -> None:
    assert variables_after("import runtime", **{VARIABLE: "0"}) == dict.fromkeys(VALUES)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which none of them is set."""
    monkeypatch.setattr(mlx_environment, "_set_here", {})
    for name in (*VALUES, VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("untuned")
async def test_opening_without_tuning_removes_what_was_set_here_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "77")
    mlx_environment.tune()
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "55")  # the user's own, since then
    async with runtime.open((llama(), None), tune_mlx=False):
        found = {name: os.environ.get(name) for name in VALUES}
    assert found == dict.fromkeys(VALUES) | {"MLX_MAX_MB_PER_BUFFER": "77", "MLX_MAX_OPS_PER_BUFFER": "55"}


async def test_whether_to_tune_is_a_yes_or_a_no() -> None:
    with pytest.raises(runtime.SettingsError, match="tune_mlx must be True or False, got 'no'"):
        async with runtime.open((llama(), None), tune_mlx="no"):  # type: ignore[arg-type]
            raise AssertionError("should not be reached")
