"""The package: what its wheel has, its version, and that type checkers find it from a program elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "protocol", "runtime")
PROGRAM = """\
from typing import assert_type

import runtime
import runtime.aio


async def main() -> None:
    async with runtime.open("target", draft="ngram") as rt:
        assert_type(rt, runtime.Runtime)
        async for token in rt.stream("Hello", max_tokens=8, temperature=0.5):
            assert_type(token, runtime.Token)
        async for index, completion in rt.generate_many(["Hello"]):
            assert_type(completion.text, str)
    async with runtime.aio.open("target") as other:
        assert_type(await other.generate("Hello"), runtime.Completion)
        async for _, found in other.generate_many(["Hello"], on_error="return"):
            assert_type(found, runtime.Completion | Exception)


with runtime.open_sync("target") as third:
    assert_type(third.generate_many(["Hello"]), list[runtime.Completion])
    assert_type(third.conversation("Be kind.").generate("Hello"), runtime.Completion)
    third.stream("Hello", max_tokens="8")  # wrong: not a number
"""
WRONG = len(PROGRAM.splitlines())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with empty files in place of weights, which would be compressed for seconds."""
    source = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def copy(file: str, to: str) -> object:
        return Path(to).touch() if file.endswith(".safetensors") else shutil.copy(file, to)

    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored, copy_function=copy)
    return source


def pip(python: Path, command: str, *arguments: object) -> None:
    """Run pip on an environment, which also builds packages: one of its own for each would take seconds."""
    asked = [sys.executable, "-m", "pip", "--python", str(python), command, "--quiet", *map(str, arguments)]
    subprocess.run(asked, check=True)


@pytest.fixture(scope="module")
def python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with an editable install of the copy, what builds it, and the dependencies of this one."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip(python, "install", *tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"])
    pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", source)
    (packages,) = environment.glob("lib/python*/site-packages")
    dependencies = {path for path in (*sys.path, *site.getsitepackages()) if path.endswith("site-packages")}
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    return python


# What the types in the program consist of; mypy would look at everything else for half a minute.
FOLLOWED = """\
[mypy]
follow_imports = skip
[mypy-attr.*,attrs.*,protocol.*,runtime.*,trio.*]
follow_imports = normal
"""


def lines_of_mypy(python: Path, program: Path) -> list[int]:
    (program.parent / "mypy.ini").write_text(FOLLOWED)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line]


def lines_of_pyright(python: Path, program: Path) -> list[int]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [each["range"]["start"]["line"] + 1 for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("lines_of", [lines_of_mypy, lines_of_pyright])
def test_a_checker_finds_the_types_of_an_editable_install_from_a_program_elsewhere(
    lines_of: Callable[[Path, Path], list[int]], python: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert lines_of(python, program) == [WRONG]


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(python: Path, source: Path, tmp_path: Path) -> None:
    pip(python, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (built,) = tmp_path.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.split()) - set(zipfile.ZipFile(built).namelist()) == set()


def test_the_newest_version_in_the_changelog_is_the_packages() -> None:
    versions = re.findall(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    package = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert versions[0] == package["version"]
    assert len(versions) == len(set(versions))
