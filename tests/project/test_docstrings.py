"""Public methods have docstrings, except where they override a method that has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import attrs
from sources import EVERY_MODULE, ROOT, parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen
class Class:
    """A class of the tree, as its source has it."""

    where: str
    bases: tuple[str, ...]
    methods: dict[str, Function]

    @property
    def is_interface(self) -> bool:
        return not {"Protocol", "ABC"}.isdisjoint(self.bases)


@cache
def classes() -> dict[str, list[Class]]:
    found: dict[str, list[Class]] = {}
    for path in EVERY_MODULE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                names = tuple(ast.unparse(base).rpartition(".")[2] for base in bases)
                methods = {each.name: each for each in node.body if isinstance(each, Function)}
                found.setdefault(node.name, []).append(Class(f"{path.relative_to(ROOT)}:{node.name}", names, methods))
    return found


def overrides(method: str, bases: tuple[str, ...]) -> bool:
    """Whether a base class has the method; one from elsewhere may have any."""
    known = classes()
    return any(
        any(method in each.methods or overrides(method, each.bases) for each in known[base])
        if base in known
        else base not in ("object", "ABC", "Generic", "Protocol", "TypedDict", "NamedTuple", "Enum", "Exception")
        for base in bases
    )


def without_docstring() -> Iterator[tuple[str, str]]:
    interfaces = {name for each in classes().values() for one in each if one.is_interface for name in one.methods}
    for name, each in classes().items():
        for one in each if not name.startswith("_") else ():
            for method, node in one.methods.items():
                is_described = (
                    ast.get_docstring(node)
                    or overrides(method, one.bases)
                    or method in interfaces - set(one.methods if one.is_interface else ())
                )
                if not method.startswith("_") and not is_described:
                    yield one.where, method


def test_every_public_method_that_overrides_none_has_a_docstring() -> None:
    assert list(without_docstring()) == []
