"""Guards of imports, for `runtime/__init__.py`: a user's module in place of a package, and the limit of open files.

mlx-lm sets that limit to 2048 when it is imported, and the hard limit to 4096. Under a lower hard limit, as some
containers have, its import would fail; a server whose limit is higher would lose connections.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`; importing `typing` takes a while
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def check_packages(*names: str) -> None:
    """Check that packages are the ones beside this package, without importing them.

    A script's own directory comes first on Python's path, so `import protocol` finds a `protocol.py` there. (A
    `runtime.py` there replaces this package, so it cannot be detected here.)

    Raises: ImportError: another module or package has one of the names.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in names:
        expected = os.path.join(root, name)
        spec = importlib.util.find_spec(name)  # also finds what is already imported
        found = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or f"a module {name!r}"])
        if found and not any(_same(path, expected) for path in found):
            raise ImportError(
                f"Outrider's package {name!r} is hidden by {found[0]!r}, which Python finds first; rename that, or run "
                "your program from another directory",
                name=name,
                path=found[0],
            )


def _same(path: str, expected: str) -> bool:
    if path == expected:
        return True
    try:
        return os.path.samefile(path, expected)
    except OSError:  # one does not exist, or is inside an archive
        return False


def guard_import() -> None:
    """Have the later import of mlx-lm only raise the limit of open files, as far as the hard limit allows.

    The hard limit stays. While mlx-lm is imported, no other thread may set limits of the process.
    """
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds mlx-lm where Python would, for the import system, and guards its import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "mlx_lm":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: run_guarded(run, module)  # type: ignore[method-assign]
        return spec


def run_guarded(do: Callable[..., object], *arguments: Any) -> None:
    """Call `do`, which may raise the limit of open files within the hard limit, but not lower it."""
    import resource

    set_limit = resource.setrlimit

    def set_or_raise(which: int, limits: Any) -> None:
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)
            return
        soft, hard = resource.getrlimit(which)
        wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            set_limit(which, (wanted, hard))

    resource.setrlimit = set_or_raise
    try:
        do(*arguments)
    finally:
        resource.setrlimit = set_limit
