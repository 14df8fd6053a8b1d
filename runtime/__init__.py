"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module

from runtime.import_guards import check_packages, guard_import
from runtime.loading import mlx_environment

# Before anything is imported from these packages.
check_packages("protocol", "actors")

mlx_environment.tune()
guard_import()
if os.environ.get("OUTRIDER_BLAS"):
    from runtime.loading import blas

    blas.load_from_environment()

# Public names, which `__init__.pyi` lists, are imported when they are first used, for three reasons. The models'
# libraries take seconds to import, and `outrider --help` must not wait for them. A BLAS can only replace MLX's own
# before mlx is imported. The command line handles Ctrl-C only from `runtime/__main__.py` on, which runs after this
# module. No module of this package may have the name of a public function: importing it would replace the function.

# Where names are that can be used although the BLAS that the environment names cannot be loaded.
_WITHOUT_MODELS = ("protocol.", "runtime.loading.demo", "runtime.loading.model_spec")


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name == "__all__":
        return sorted(_homes())
    if (home := _homes().get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # This module was imported above if the environment names a BLAS; otherwise there is nothing to check.
    loaded_blas = sys.modules.get("runtime.loading.blas")
    if loaded_blas is not None and not home.startswith(_WITHOUT_MODELS):
        loaded_blas.check_environment()
    if home == __name__:
        return import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


@cache
def _homes() -> dict[str, str]:
    """The module of each public name, as the stub for type checkers imports it."""
    import ast

    stub = ast.parse(__loader__.get_data(f"{os.path.splitext(__file__)[0]}.pyi"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {alias.name: str(statement.module) for statement in imports for alias in statement.names}


def _version() -> str:
    """The version of the installed package; looked up on use, since that searches all installed packages."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0+unknown"  # run from a source tree


def __dir__() -> list[str]:
    return sorted([*_homes(), "__version__"])
