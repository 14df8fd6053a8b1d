"""A process that tries out grammars for the server, run as a script; `runtime.server.grammars.checker` starts it.

There are schemas of a hundred bytes for which llguidance takes hours and gigabytes, and in a thread nothing stops it.
So each grammar is first compiled in a process that can be killed. This one imports llguidance, indexes the vocabulary
once, and forks a child for each grammar: a fork takes milliseconds, where a fresh process would index the vocabulary
again (1.2 s for 150,000 tokens). It has one thread and imports neither mlx nor the runtime, so that forking is safe.

What bounds a child:

- CPU time: RLIMIT_CPU, on Linux and macOS.
- Memory: a thread of its own that looks at the peak resident size (llguidance does not hold Python's lock while it
  compiles), on both. On Linux RLIMIT_AS as well, for what is allocated between two looks; macOS takes that limit and
  does not enforce it.
- Wall time: not here. Whoever asks stops waiting, and says so.

Requests come as lines of JSON on stdin, answers go as lines of JSON to stdout. The end of stdin (the server has ended,
or was killed) ends this process and its children.
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

# Between two looks at a child's memory.
_LOOK_S = 0.02

# Of address space, beside the memory that a child may take: what threads and allocators reserve and do not use.
_RESERVED_BYTES = 2**29

# A child's exit status where it needs too much memory.
_TOO_MUCH_MEMORY = 3

_MOST_AT_ONCE = 2**16

# The models come first.
_NICENESS = 5


class Checker:
    """Children that try out grammars, by the ids of the requests."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._unread = bytearray()
        self._children: dict[int, tuple[int, int]] = {}  # pid, and a pipe that ends with it
        self._tokenizer: Any = None
        self._cpu_s = 0
        self._memory_bytes = 0

    def run(self) -> None:
        """Until stdin ends."""
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
        """Do what stdin says; False at its end."""
        data = os.read(0, _MOST_AT_ONCE)
        # Only what is new can have the end of a line: a vocabulary has megabytes.
        searched = len(self._unread)
        self._unread += data
        while (end := self._unread.find(b"\n", searched)) >= 0:
            line, searched = bytes(self._unread[:end]), 0
            del self._unread[: end + 1]
            self._do(json.loads(line))
        return bool(data)

    def _do(self, request: dict[str, Any]) -> None:
        match request:
            case {"tokenizer": tokenizer, "end_tokens": ends, "cpu_s": cpu_s, "memory_bytes": memory_bytes}:
                self._tokenizer = llguidance.LLTokenizer(tokenizer, eos_token=ends)
                self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
            case {"check": id, "grammar": grammar}:
                self._begin(id, grammar)
            case {"kill": id} if id in self._children:
                os.kill(self._children[id][0], signal.SIGKILL)

    def _begin(self, id: int, grammar: str) -> None:
        take, hold = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._try_out(grammar)
        os.close(hold)
        self._children[id] = pid, take
        self._selector.register(take, selectors.EVENT_READ, id)

    def _report(self, id: int) -> None:
        """A child has ended."""
        pid, pipe = self._children.pop(id)
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status, usage = os.wait4(pid, 0)
        answer = {"id": id, "outcome": _outcome(status), "cpu_s": usage.ru_utime + usage.ru_stime}
        os.write(1, json.dumps(answer).encode() + b"\n")  # shorter than what a pipe takes at once

    def _try_out(self, grammar: str) -> NoReturn:
        """Compile a grammar, in a child, which ends."""
        status = 1
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            # What llguidance says as it dies is no news; and nobody is to take a child's stdout for its parent's.
            for number in (0, 1, 2):
                os.dup2(nothing, number)
            self._limit()
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            matcher.compute_logit_bias()
            # Also where the grammar is in error: that is found as quickly by whoever compiles it next.
            status = 0
        finally:
            os._exit(status)

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_s, self._cpu_s + 1))
        if sys.platform == "linux":
            with open("/proc/self/statm", encoding="ascii") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            most = size + self._memory_bytes + _RESERVED_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        threading.Thread(target=_watch, args=(_peak_bytes() + self._memory_bytes, os.getppid()), daemon=True).start()


def _watch(most_bytes: int, parent: int) -> None:
    """End this process where it takes too much memory, or its parent is not there any more."""
    while os.getppid() == parent:
        if _peak_bytes() > most_bytes:
            os._exit(_TOO_MUCH_MEMORY)
        time.sleep(_LOOK_S)
    os._exit(1)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _outcome(status: int) -> str:
    if os.WIFSIGNALED(status):
        # By SIGABRT, Rust ends a process that cannot allocate.
        return {signal.SIGXCPU: "time", signal.SIGABRT: "memory"}.get(signal.Signals(os.WTERMSIG(status)), "crash")
    return {0: "done", _TOO_MUCH_MEMORY: "memory"}.get(os.WEXITSTATUS(status), "crash")


def main() -> None:
    """Try out grammars until stdin ends."""
    os.nice(_NICENESS)
    checker = Checker()
    try:
        checker.run()
    finally:
        checker.end()


if __name__ == "__main__":
    main()
