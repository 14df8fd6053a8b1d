"""The process that checks the cost of grammars, run as a script; `runtime.server.grammars.checker` starts it.

There are schemas of a hundred bytes that llguidance compiles for hours with gigabytes of memory, and nothing stops it
in a thread. So each grammar is first compiled in a process that can be killed. This one imports llguidance, indexes the
vocabulary once, and forks a child for each grammar: a fork takes milliseconds, and a new process would have to index
the vocabulary again (1.2 s for 150,000 tokens). Forking is safe because this process has one thread and imports neither
mlx nor the runtime.

The limits of a child:

- CPU time: RLIMIT_CPU, on Linux and macOS.
- Memory: a thread in the child polls its peak resident size, on both systems; it can run because llguidance releases
  Python's lock while it compiles. On Linux also RLIMIT_AS, for allocations between two polls; macOS accepts that limit
  without enforcing it.
- Wall time: none here. The server stops waiting after a timeout.

Requests arrive as lines of JSON on stdin, and results are written as lines of JSON to stdout. The end of stdin, when
the server has ended or was killed, ends this process and its children.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import llguidance

# Seconds between two polls of a child's memory.
_POLL_S = 0.02

# Address space beyond the limit of memory: threads and allocators reserve some that they do not use.
_RESERVED_BYTES = 2**29

# The exit status of a child that exceeds the limit of memory.
_TOO_MUCH_MEMORY = 3

_READ_BYTES = 2**16

# The models' threads have a higher priority.
_NICENESS = 5


class Checker:
    """The children that compile grammars, by the ids of the requests."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._unread = bytearray()
        self._children: dict[int, tuple[int, int]] = {}  # process id, and the read end of a pipe that closes with it
        self._tokenizer: Any = None
        self._cpu_s = 0
        self._memory_bytes = 0

    def run(self) -> None:
        """Handle requests until stdin ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fd != 0:
                    self._report(key.data)
                elif not self._read():
                    return

    def end(self) -> None:
        """Kill all children."""
        for pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._children.values():
            os.waitpid(pid, 0)

    def _read(self) -> bool:
        """Handle the requests that have arrived; False at the end of stdin."""
        data = os.read(0, _READ_BYTES)
        # Only the new data is searched for the end of the line: the line of a vocabulary has megabytes.
        num_searched = len(self._unread)
        self._unread += data
        while (end := self._unread.find(b"\n", num_searched)) >= 0:
            line, num_searched = bytes(self._unread[:end]), 0
            del self._unread[: end + 1]
            self._handle(json.loads(line))
        return bool(data)

    def _handle(self, request: dict[str, Any]) -> None:
        match request:
            case {"tokenizer": tokenizer, "end_tokens": end_tokens, "cpu_s": cpu_s, "memory_bytes": memory_bytes}:
                self._tokenizer = llguidance.LLTokenizer(tokenizer, eos_token=end_tokens)
                self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
            case {"check": id, "grammar": grammar}:
                self._start(id, grammar)
            case {"kill": id} if id in self._children:
                os.kill(self._children[id][0], signal.SIGKILL)

    def _start(self, id: int, grammar: str) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._compile(grammar)
        os.close(write_end)
        self._children[id] = pid, read_end
        self._selector.register(read_end, selectors.EVENT_READ, id)

    def _report(self, id: int) -> None:
        pid, pipe = self._children.pop(id)
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        result = {"id": id, "outcome": _outcome(status)}
        os.write(1, json.dumps(result).encode() + b"\n")  # short enough for a pipe to take at once

    def _compile(self, grammar: str) -> NoReturn:
        status = 1
        try:
            # llguidance writes to stderr when it crashes, and stdout is the parent's.
            null_device = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null_device, descriptor)
            self._limit()
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            matcher.compute_logit_bias()
            # Also for an invalid grammar: the server finds the error as quickly when it compiles the grammar itself.
            status = 0
        finally:
            os._exit(status)

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_s, self._cpu_s + 1))
        if sys.platform == "linux":
            with open("/proc/self/statm", encoding="ascii") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            limit = size + self._memory_bytes + _RESERVED_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        threading.Thread(target=_watch, args=(_peak_bytes() + self._memory_bytes, os.getppid()), daemon=True).start()


def _watch(max_bytes: int, parent_pid: int) -> None:
    """End this process when it exceeds the limit of memory, or when its parent has ended."""
    while os.getppid() == parent_pid:
        if _peak_bytes() > max_bytes:
            os._exit(_TOO_MUCH_MEMORY)
        time.sleep(_POLL_S)
    os._exit(1)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _outcome(status: int) -> str:
    if os.WIFSIGNALED(status):
        # Rust ends a process that cannot allocate memory with SIGABRT.
        return {signal.SIGXCPU: "time", signal.SIGABRT: "memory"}.get(signal.Signals(os.WTERMSIG(status)), "crash")
    return {0: "done", _TOO_MUCH_MEMORY: "memory"}.get(os.WEXITSTATUS(status), "crash")


def main() -> None:
    """Check grammars until stdin ends."""
    os.nice(_NICENESS)
    checker = Checker()
    try:
        checker.run()
    finally:
        checker.end()


if __name__ == "__main__":
    main()
