"""Who may import what, read from the source: runtime → actors → protocol, and each trade in one module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "actors", "runtime")

# What protocol/ may not touch: schedules, clocks, global randomness, files.
IMPURE = {
    "asyncio", "concurrent", "datetime", "fileinput", "glob", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile",
    "threading", "time", "_thread",
}  # fmt: skip


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


EVERY_MODULE = [path for package in PACKAGES for path in modules(package)]

every_module = pytest.mark.parametrize("path", EVERY_MODULE, ids=lambda path: path.relative_to(ROOT).as_posix())
every_protocol_module = pytest.mark.parametrize("path", modules("protocol"), ids=lambda path: path.name)


def imports(tree: ast.AST, package: str) -> set[str]:
    """Dotted names of all that a module of `package` imports, wherever in it the import stands.

    What follows `from … import` is included, since it may be a module.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> set[str]:
    return imports(parsed(path), ".".join(path.relative_to(ROOT).parent.parts))


def importers(*names: str) -> set[str]:
    """Modules that import one of these, or something below it."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in EVERY_MODULE
        if any(found == name or found.startswith(name + ".") for found in imports_of(path) for name in names)
    }


def draws_without_a_key(tree: ast.AST) -> Iterator[str]:
    """Calls of MLX's random functions that would use its global state."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_random = name.startswith(("mx.random.", "mlx.core.random."))
            if is_random and not name.endswith(".key") and not any(k.arg == "key" for k in node.keywords):
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import trio", {"trio"}),
        ("import mlx.nn as nn, os.path", {"mlx.nn", "os.path"}),
        ("from mlx import nn", {"mlx", "mlx.nn"}),
        ("from actors.workers.worker import Job", {"actors.workers.worker", "actors.workers.worker.Job"}),
        ("from . import books", {"protocol", "protocol.books"}),
        ("from .books import Books", {"protocol.books", "protocol.books.Books"}),
        ("def f():\n    import time", {"time"}),
        ("if TYPE_CHECKING:\n    from runtime import Runtime", {"runtime", "runtime.Runtime"}),
    ],
)
def test_every_kind_of_import_is_seen(source, expected):
    assert imports(ast.parse(source), "protocol") == expected


def test_a_draw_from_the_global_state_is_seen():
    source = "mx.random.uniform()\nmx.random.normal((2,), key=k)\nmx.random.key(3)\nmx.random.seed(1)"
    assert list(draws_without_a_key(ast.parse(source))) == ["line 1: mx.random.uniform", "line 4: mx.random.seed"]


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_something_to_look_at(package):
    assert len(modules(package)) > 3


@pytest.mark.parametrize(
    ("package", "forbidden"), [("protocol", {"actors", "runtime"}), ("actors", {"runtime"})], ids=["protocol", "actors"]
)
def test_imports_run_one_way(package, forbidden):
    for path in modules(package):
        assert not forbidden & {name.split(".")[0] for name in imports_of(path)}, path


@every_protocol_module
def test_protocol_knows_no_schedules_clocks_files_or_layers(path):
    found = imports_of(path)
    roots = {name.split(".")[0] for name in found}
    assert not roots & IMPURE
    # Beside the standard library: values and arrays.
    assert roots - sys.stdlib_module_names <= {"attrs", "mlx", "protocol"}
    assert {name for name in found if name.split(".")[0] == "mlx"} <= {"mlx.core"}


@every_protocol_module
def test_protocol_opens_and_prints_nothing(path):
    called = {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


@every_module
def test_every_random_number_has_a_key(path):
    assert list(draws_without_a_key(parsed(path))) == []


def test_three_modules_know_threads_and_some_mind_that_there_are_several():
    threads = importers("threading", "_thread", "queue", "concurrent", "multiprocessing")
    makers = {"actors/workers/thread_pool.py", "actors/workers/worker.py", "runtime/bridge/trio_thread.py"}
    minders = {
        "actors/sampling/user_code.py",
        "runtime/aio/thread.py",
        "runtime/engine/drafter_slot.py",
        "runtime/engine/runtime.py",
        "runtime/generation/grammar.py",
        "runtime/server/grammars/checker_process.py",  # the program of another process
        "runtime/sync/iteration.py",
        "runtime/sync/thread.py",
    }
    assert threads == makers | minders


def test_only_the_bridge_knows_asyncio():
    assert importers("asyncio") == {
        "runtime/aio/iteration.py",
        "runtime/aio/many_prompts.py",
        "runtime/aio/token_stream.py",
        "runtime/aio/thread.py",
        "runtime/sync/__init__.py",
    }


def test_three_modules_talk_to_mlx_lms_caches():
    assert importers("mlx_lm.models") == {
        "actors/mlx/cache_options.py",
        "actors/mlx/cache_rewind.py",
        "actors/mlx/cache_state.py",
    }


@every_module
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(parsed(path))
