"""What holds for every test run, however it was started."""

import fcntl
import getpass
import itertools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, TextIO

import browser
import pytest

left_out: set[str] = set()
taken = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, and have child processes hear it; compile where no other process of `pytest -n` does.

    A shell starts what it puts in the background with SIGINT ignored; Python leaves it so, and children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
            f"{len(left_out)} tests of the timeline page were left out: no Chromium was found. "
            f"Install it, or say in {browser.VARIABLE} where it is; `pytest -m browser` runs these tests alone."
        )
