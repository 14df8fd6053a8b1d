"""mlx-lm's import, and the limit of open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from sweeps import sweep

from runtime.loading.file_limit import run_guarded

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
def test_an_import_raises_the_limit_as_far_as_it_may_and_sets_others(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int]
) -> None:
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
import runtime.server.app
import mlx_lm
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
assert mlx_lm.__spec__.loader.get_source("mlx_lm")
"""


@pytest.mark.slow
def test_everything_is_imported_under_a_hard_limit_below_mlx_lm_s() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
