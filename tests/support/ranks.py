"""Processes that are ranks on this machine, connected over loopback.

They are forked from a server that has imported everything, which makes them start in milliseconds.
"""

import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import runtime

# Longest time for anything that a test waits for; a machine may be busy with other things.
LIMIT_S = 120.0

Program = Callable[..., Any]

_context = multiprocessing.get_context("forkserver")


def _start_server() -> None:
    """Start the server that ranks are forked from, if it does not run. It does not know this process's `sys.path`."""
    _context.set_forkserver_preload(["rank_programs"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Rank:
    """One rank's process, and the file that has its standard error."""

    def __init__(self, process: Any, results: Connection, errors: Path) -> None:
        self.process, self._results, self.errors = process, results, errors

    def result(self) -> Any:
        """The next value that the program has given; asserts that there is one."""
        assert self._results.poll(LIMIT_S), f"no result in time; {self.errors.read_text()}"
        try:
            value = self._results.recv()
        except EOFError:
            raise AssertionError(f"the rank ended without a result; {self.errors.read_text()}") from None
        assert not isinstance(value, _Unexpected), f"{value.error}; {self.errors.read_text()}"
        return value

    def join(self) -> int:
        """The exit code."""
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, "the process has not ended"
        return int(self.process.exitcode)


class _Unexpected:
    def __init__(self, error: str) -> None:
        self.error = error


@contextmanager
def ranks(
    program: Program, size: int, *args: Any, start: Callable[[int], bool] = lambda _: True
) -> Iterator[list[Rank]]:
    """Run a program on each of some ranks, and kill what is left at the end.

    Args:
        program: a function of `rank_programs`, called with `give`, which sends a result to this process, and `args`.
        start: whether a rank is started at once; `Rank.process.start()` starts it later.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(size + 1)
        hostfile = Path(folder, "hosts.json")
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:-1]]))
        started = []
        for rank in range(size):
            receiving, sending = _context.Pipe(duplex=False)
            errors = Path(folder, f"errors-{rank}")
            errors.touch()
            environment = {
                **os.environ,  # the server has that of the test that started it
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hostfile),
                "OUTRIDER_CONTROL": f"127.0.0.1:{ports[-1]}",
            }
            process = _context.Process(target=_run, args=(sending, errors, environment, program, args), daemon=True)
            started.append(Rank(process, receiving, errors))
            if start(rank):
                process.start()
        try:
            yield started
        finally:
            for each in started:
                if each.process.pid is not None:
                    each.process.kill()
                    each.process.join()


def free_ports(number: int) -> list[int]:
    """Ports at which nobody listens; not of those that a system gives to clients, which may have them again at once."""
    dice, sockets = random.SystemRandom(), []
    while len(sockets) < number:
        with suppress(OSError):  # somebody does
            sockets.append(socket.create_server(("127.0.0.1", dice.randrange(15_000, 32_000))))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _run(
    sending: Connection, errors: Path, environment: dict[str, str], program: Program, args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    with errors.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    try:
        program(sending.send, *args)
    except runtime.OutriderError as error:
        sending.send(_Unexpected(repr(error)))
        raise
