"""mlx-lm's parsers of calls, run in a process that can be ended: for long blocks.

On a text of many openings that are never closed, the time of their patterns grows with the square of its length: it
takes minutes for 100,000 characters. In a thread, nothing could stop the search, and no other stream would get a token.
So long blocks go to a process, which a timer of its CPU time ends; the next long block starts another.

This file is also the program of that process, which imports neither mlx nor the runtime. It reads blocks as lines of
JSON (name of the parser, text, tools), writes what the parser has returned, and ends with its stdin.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from select import POLLIN, poll
from types import ModuleType
from typing import Any

# CPU time for one block, while a thread waits: well-formed calls of 100,000 characters take a twentieth of it.
_CPU_S = 0.25
_MEMORY_BYTES = 2**30
# Wall time for one block and the start of the process, for when a busy machine gives it no CPU time.
_WALL_S = 10.0


class ParserProcess:
    """The process, which the first block starts; for any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def parse(self, name: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        """What the parser `mlx_lm.tool_parsers.NAME` returns for a block without its markers.

        None if it fails, or exceeds the limits of time and memory.
        """
        block = json.dumps([name, text, tools], default=_plain).encode()
        with self._lock:
            answer = b""
            with suppress(OSError):  # it cannot be started, or has ended
                process = self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(block + b"\n")
                process.stdin.flush()
                answers = poll()  # not `select`, which does not take high file numbers
                answers.register(process.stdout, POLLIN)
                if answers.poll(1000 * _WALL_S):
                    answer = process.stdout.readline()
            if not answer:
                self._end()
                return None
        return json.loads(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: otherwise Python would search the program's directory for modules first.
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must interrupt the caller only
            )
            atexit.register(self._end)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self._end)
        if process is not None:
            process.kill()
            with suppress(OSError):  # what was not written to it yet
                process.communicate()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def main() -> None:
    """Parse blocks until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))  # without effect on macOS
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    # In place of the package, which would import mlx.
    package = sys.modules["mlx_lm"] = ModuleType("mlx_lm")
    package.__path__ = [os.path.dirname(spec.origin)]
    for line in sys.stdin.buffer:
        name, text, tools = json.loads(line)
        parse = import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # SIGPROF ends the process
        try:
            answer = json.dumps(parse(text, tools))
        except Exception:  # of any kind, on whatever a model wrote
            answer = "null"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
