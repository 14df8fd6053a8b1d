"""What holds for every test run, however it was started."""

import signal

import browser
import pytest

left_out: list[str] = []


def pytest_configure() -> None:
    """Hear Ctrl-C, and have child processes hear it.

    A shell starts what it puts in the background with SIGINT ignored; Python leaves it so, and children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a browser where there is none, unless they are asked for: then they fail."""
    if browser.find() is not None or "browser" in config.option.markexpr:
        return
    needy = [item for item in items if item.get_closest_marker("browser")]
    left_out.extend(item.nodeid for item in needy)
    items[:] = [item for item in items if item not in needy]
    config.hook.pytest_deselected(items=needy)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to have it."""
    if left_out:
        terminalreporter.section("no browser", sep="!")
        terminalreporter.line(
            f"{len(left_out)} tests of pages were left out: no Chromium was found. "
            f"Install it, or say in {browser.VARIABLE} where it is; `pytest -m browser` runs these tests alone."
        )
