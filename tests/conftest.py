"""What holds for every test run, however it was started."""

import fcntl
import getpass
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import browser
import mlx.core as mx
import pytest

left_out: set[str] = set()
taken = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, and have child processes hear it; compile where no other process of `pytest -n` does.

    A shell starts what it puts in the background with SIGINT ignored; Python leaves it so, and children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Without a terminal, importing readline exports COLUMNS=80 and LINES=24 to child processes, such as the workers of
    # `pytest -n`. Tests choose a width themselves.
    for variable in ("COLUMNS", "LINES"):
        os.environ.pop(variable, None)
    if hasattr(config, "workerinput"):
        config.stash[taken] = take_temporary_directory()


def take_temporary_directory() -> TextIO:
    """Have a directory for temporary files to ourselves; the next run finds in it what MLX compiled in this.

    MLX compiles for CPU into one directory, where two processes that compile the same would load what is half written.

    Returns: what has to stay open as long as the directory is ours.
    """
    directories = Path(tempfile.gettempdir()) / f"outrider-tests-of-{getpass.getuser()}"
    for number in itertools.count():
        directory = directories / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
            return lock


@pytest.fixture(autouse=True, scope="session")
def no_spare_buffers() -> Iterator[int]:
    """Have MLX keep no buffers for later on CPU, so that there are none to give back.

    Giving them back waits for every native thread that a runtime left behind. A program has a few; after some hundred
    tests it is what takes the time. Tests that are of it ask for `spare_buffers`; child processes have them anyway.

    Returns: how many bytes MLX would keep.
    """
    usual = mx.set_cache_limit(0)
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.set_cache_limit(usual)
    yield usual
    mx.set_cache_limit(usual)


@pytest.fixture
def spare_buffers(no_spare_buffers: int) -> Iterator[None]:
    """Buffers are kept and given back as in any program."""
    before = mx.set_cache_limit(no_spare_buffers)
    yield
    mx.set_cache_limit(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a browser where there is none, unless they are asked for: then they fail."""
    if browser.find() is not None or "browser" in config.option.markexpr:
        return
    needy = [item for item in items if item.get_closest_marker("browser")]
    left_out.update(item.nodeid for item in needy)
    items[:] = [item for item in items if item not in needy]
    config.hook.pytest_deselected(items=needy)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the process that `pytest -n` was called in know what was left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = sorted(left_out)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node: Any) -> None:
    """Hear of it there."""
    left_out.update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to have it."""
    if left_out:
        terminalreporter.section("no browser", sep="!")
        terminalreporter.line(
            f"{len(left_out)} tests of pages were left out: no Chromium was found. "
            f"Install it, or say in {browser.VARIABLE} where it is; `pytest -m browser` runs these tests alone."
        )
