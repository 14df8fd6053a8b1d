"""What holds for every test run, however it was started."""

import signal


def pytest_configure() -> None:
    """Hear Ctrl-C, and have child processes hear it.

    A shell starts what it puts in the background with SIGINT ignored; Python leaves it so, and children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
