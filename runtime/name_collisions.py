"""Whether a file of a user's has the name of one of Outrider's packages, and is imported in its place."""

from __future__ import annotations

import importlib.util
import os
import sys


def check_packages(*names: str) -> None:
    """Look whether packages are those that stand beside this one; imports none of them.

    A script's own directory comes first on Python's path, so that a `protocol.py` there is what `import protocol`
    finds. (A `runtime.py` there keeps all of this package from running, and cannot be noticed here.)

    Raises: ImportError: another module or package has such a name; it says which, and what to rename.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in names:
        expected = os.path.join(root, name)
        found = _places(name)
        if found and not any(_same(place, expected) for place in found):
            raise ImportError(
                f"Outrider's package {name!r} is hidden by {found[0]!r}, which Python finds first; rename that, or run "
                "your program from another directory",
                name=name,
                path=found[0],
            )


def _places(name: str) -> list[str]:
    """Where a module is, or would be imported from: its file, or a package's directories; none if nowhere."""
    if name in sys.modules:
        module = sys.modules[name]
        if hasattr(module, "__path__"):
            return list(module.__path__)
        return [getattr(module, "__file__", None) or f"a module {name!r} without a file"]
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return list(spec.submodule_search_locations or [spec.origin or f"a module {name!r} without a file"])


def _same(place: str, expected: str) -> bool:
    if place == expected:
        return True
    try:
        return os.path.samefile(place, expected)
    except OSError:  # one is not there, or within an archive
        return False
