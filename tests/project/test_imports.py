"""Import rules, sizes of folders and modules, and docstrings, checked in the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import attrs
import pytest
from sources import EVERY_MODULE, PACKAGES, ROOT, modules, parsed
from sweeps import sweep

# The packages of runtime/. Each imports only from those before it, and none from one on its own level.
ORDER = (
    {"terminal"},
    {"loading"},
    {"remote"},
    {"ranks"},
    {"generation"},
    {"tracing"},
    {"persistence"},
    {"engine"},
    {"bridge"},
    {"aio", "sync"},
    {"measuring"},
    {"bench"},
    {"doctor"},
    {"distill"},
    {"server"},
    {"cli"},
)
# Modules beside the packages: the public names, which are looked up lazily, and what the first import needs.
FACE = {"__init__", "__main__", "import_guards"}

TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")

MAX_MODULES_A_FOLDER = 12
MAX_LINES_A_MODULE = 700
# A flat package of decisions that are independent of each other's callers: a reader finds each by its name.
FLAT = {"protocol"}

# Modules that protocol/ must not use: schedules, clocks, global randomness, files.
IMPURE = {
    "asyncio", "concurrent", "datetime", "fileinput", "glob", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile",
    "threading", "time", "_thread",
}  # fmt: skip


def statements(tree: ast.AST, *, of_types: bool = True, of_functions: bool = True) -> Iterator[ast.AST]:
    """The statements of a tree, with or without those that only type checkers read, and those inside functions."""
    due = [tree]
    while due:
        node = due.pop()
        yield node
        if isinstance(node, ast.If) and not of_types and ast.unparse(node.test) in TYPE_CHECKING:
            due += node.orelse
        elif of_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            due += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def imports(statements: Iterable[ast.AST], package: str) -> set[str]:
    """The dotted names of everything that statements in a module of `package` import.

    Includes the names after `from … import`, since they may be modules.
    """
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


@cache
def imports_of(path: Path, **which: bool) -> set[str]:
    """What a module imports, with some of its statements."""
    return imports(statements(parsed(path), **which), ".".join(path.relative_to(ROOT).parent.parts))


def module_of(path: Path) -> str:
    """The dotted name of a module; a package's `__init__` has the name of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in EVERY_MODULE}


def a_cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Names that import each other in a circle; empty if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def misplaced(package: str, imported: str) -> bool:
    """Whether a package of runtime/ imports one that does not stand before it."""
    levels = {name: level for level, names in enumerate(ORDER) for name in names}
    return package != imported and levels[imported] >= levels[package]


def importers(*names: str) -> set[str]:
    """Modules that import one of these, or a module below it."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in EVERY_MODULE
        if any(found == name or found.startswith(name + ".") for found in imports_of(path) for name in names)
    }


def draws_without_a_key(tree: ast.AST) -> Iterator[str]:
    """Calls of MLX's random functions that would use its global state."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "key" for keyword in node.keywords):
            continue
        match node.func:
            case ast.Attribute(ast.Attribute(_, "random"), attr) if attr != "key":
                if (name := ast.unparse(node.func)).startswith(("mx.", "mlx.core.")):
                    yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize(
    ("package", "forbidden"), [("protocol", {"actors", "runtime"}), ("actors", {"runtime"})], ids=["protocol", "actors"]
)
def test_imports_run_one_way(package, forbidden):
    for path in modules(package):
        assert not forbidden & {name.split(".")[0] for name in imports_of(path)}, path


def test_the_order_names_every_package_of_the_runtime():
    folders = {path.name for path in (ROOT / "runtime").iterdir() if (path / "__init__.py").exists()}
    assert folders == {name for names in ORDER for name in names}
    assert {path.stem for path in (ROOT / "runtime").glob("*.py")} == FACE
    assert all(len(modules(package)) > 3 for package in PACKAGES)


def test_packages_of_the_runtime_import_only_from_those_before_them():
    found = []
    for path in modules("runtime"):
        package = path.relative_to(ROOT).parts[1]
        if path.stem in FACE and path.parent == ROOT / "runtime":
            continue
        # `from a import b` names the module a.b if there is one; otherwise b is defined in a.
        for name in imports_of(path, of_types=False) & MODULES.keys():
            top, *rest = name.split(".")
            if top == "runtime" and rest and rest[0] not in FACE and misplaced(package, rest[0]):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    assert found == []


def test_no_modules_import_each_other():
    assert a_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    graph = {
        name: imports_of(path, of_types=False, of_functions=False) & MODULES.keys() for name, path in MODULES.items()
    }
    assert a_cycle(graph) == []


def test_no_folder_has_more_than_a_dozen_modules():
    sizes: dict[str, int] = {}
    for path in EVERY_MODULE:
        folder = path.parent.relative_to(ROOT).as_posix()
        sizes[folder] = sizes.get(folder, 0) + (path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES_A_FOLDER and folder not in FLAT} == {}


def test_no_module_is_longer_than_can_be_read_in_one_go():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES_A_MODULE} == {}


def test_no_two_classes_or_types_share_a_name():
    """But for a runtime on each kind of event loop, whose faces have the same names."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in () if name.startswith(("runtime.bridge", "runtime.aio", "runtime.sync")) else parsed(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            named = [node.name] if isinstance(node, ast.ClassDef) else [ast.unparse(target) for target in targets]
            for each in named:
                if re.fullmatch("[A-Z][A-Za-z]*[a-z][A-Za-z]*", each):
                    found.setdefault(each, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


@sweep("path", modules("protocol"))
def test_protocol_knows_no_schedules_clocks_files_or_layers_and_opens_and_prints_nothing(path):
    found = imports_of(path)
    roots = {name.split(".")[0] for name in found}
    assert not roots & IMPURE
    # Besides the standard library: values and arrays.
    assert roots - sys.stdlib_module_names <= {"attrs", "mlx", "protocol"}
    assert {name for name in found if name.split(".")[0] == "mlx"} <= {"mlx.core"}
    called = {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


@sweep("path", EVERY_MODULE)
def test_every_module_says_what_it_is_and_every_random_number_has_a_key(path):
    assert ast.get_docstring(parsed(path))
    assert list(draws_without_a_key(parsed(path))) == []


@pytest.mark.parametrize("api", ["openai", "responses", "anthropic"])
def test_only_the_application_knows_the_servers_apis(api):
    outside = {path for path in importers(f"runtime.server.{api}") if not path.startswith(f"runtime/server/{api}/")}
    assert outside == {"runtime/server/app.py"}


def test_three_modules_know_threads_and_some_mind_that_there_are_several():
    threads = importers("threading", "_thread", "queue", "concurrent", "multiprocessing")
    makers = {"actors/workers/thread_pool.py", "actors/workers/thread_worker.py", "runtime/bridge/portal.py"}
    minders = {
        "actors/distributed/connection.py",
        "actors/distributed/draft_rank_link.py",
        "actors/distributed/rank_group.py",
        "actors/mlx/layer_evaluation.py",
        "actors/mlx/memory.py",
        "actors/sampling/user_code.py",
        "runtime/remote/draft_process.py",  # the program of another process
        "actors/workers/core_sharing.py",
        "runtime/aio/__init__.py",
        "runtime/aio/thread.py",
        "runtime/bridge/runtime.py",
        "runtime/engine/drafter_slot.py",
        "runtime/engine/memory.py",
        "runtime/engine/sessions.py",
        "runtime/generation/grammar.py",
        "runtime/server/grammars/checker_process.py",  # the program of another process
        "runtime/server/responses/store.py",
        "runtime/sync/__init__.py",
    }
    assert threads == makers | minders


def test_only_the_bridge_knows_asyncio():
    assert importers("asyncio") == {
        "runtime/aio/__init__.py",
        "runtime/aio/thread.py",
        "runtime/sync/__init__.py",
    }


def test_what_knows_of_mlx_lms_caches_is_where_caches_are():
    assert importers("mlx_lm.models") == {
        "actors/mlx/cache_kinds.py",
        "actors/mlx/cache_options.py",
        "actors/mlx/row_caches.py",
        "actors/mlx/sliding_window.py",
        "actors/trained/drafter_files.py",  # names of mlx-lm's families
        "actors/prompt_cache.py",
        "actors/trained/kinds/eagle3.py",  # layers of mlx-lm's
        "actors/trained/kinds/dflash.py",  # likewise
        "actors/trained/kinds/gemma4_assistant.py",  # likewise
        "actors/trained/kinds/mtp.py",  # likewise
        "runtime/bench/small_models.py",  # wraps models of mlx-lm's, caches and all
    }


# --- docstrings -----------------------------------------------------------------------------------

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
