"""Name collisions: detects a user's module that is imported in place of one of Outrider's packages."""

from __future__ import annotations

import importlib.util
import os


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
