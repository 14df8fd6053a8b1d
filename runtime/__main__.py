"""The entry point of the command line: `outrider`, and `python -m runtime`.

It handles Ctrl-C before it imports almost anything: the commands' imports take a while, and an interrupt in the middle
of one would show a traceback. For the same reason `runtime/__init__.py` imports so little.
"""

# Not `signal`, which imports `enum` to wrap this module's constants.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

STATUS = 128 + signal.SIGINT


def main() -> int:
    """Run the command that the process's arguments name.

    SIGINT ends the process at once and silently, with status 130, wherever a command does not handle it: while modules
    are imported, while a prompt is read from stdin, and while the interpreter exits.

    Returns: the exit status.

    Raises: SystemExit: see `runtime.cli.main.main`.
    """
    # A shell starts background processes with SIGINT ignored; that stays as it is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))
    from runtime.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
