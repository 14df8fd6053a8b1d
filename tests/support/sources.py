"""The modules of the project, and their syntax trees."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "actors", "runtime")


def modules(package: str) -> list[Path]:
    """The modules of a package, and of those below it."""
    return sorted((ROOT / package).rglob("*.py"))


EVERY_MODULE = [path for package in PACKAGES for path in modules(package)]


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module. Not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
