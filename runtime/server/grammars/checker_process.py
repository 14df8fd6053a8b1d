"""A process that checks the cost of grammars, one at a time, run as a script that `checker` starts.

There are schemas of a hundred bytes that llguidance compiles for hours with gigabytes of memory, and nothing stops it
in a thread. So each grammar is first compiled in a process that a grammar may end. This one imports llguidance and
indexes the vocabulary once (1.2 s for 150,000 tokens); it imports neither mlx nor the runtime.

A timer ends the process after too much CPU time. For memory, a thread polls the peak resident size; it can run because
llguidance releases Python's lock while it compiles. On Linux also RLIMIT_AS, for allocations between two polls; macOS
accepts that limit without enforcing it. The server stops waiting after a timeout of its own.

Requests arrive as lines of JSON on stdin, and each is answered by a line on stdout. The end of stdin, when the server
has ended or was killed, ends this process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading

import llguidance

# Seconds between two polls of the memory.
_POLL_S = 0.02

# Address space beyond the limit of memory: threads and allocators reserve some that they do not use.
_RESERVED_BYTES = 2**29

# The exit status of a process that exceeds the limit of memory.
TOO_MUCH_MEMORY = 3

# The models' threads have a higher priority.
_NICENESS = 5


def main() -> None:
    """Check grammars until stdin ends, or until one has left little memory to the next."""
    os.nice(_NICENESS)
    first = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(first["tokenizer"], eos_token=first["end_tokens"])
    most = _peak_bytes() + first["memory_bytes"]
    _limit_memory(first["memory_bytes"])
    # llguidance writes to stderr when it crashes.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(1, b"ready\n")
    for line in sys.stdin:
        over = threading.Event()
        threading.Thread(target=_watch, args=(most, os.getppid(), over), daemon=True).start()
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])
        # An invalid grammar is no matter here: the server finds the error as quickly when it compiles it itself.
        llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0).compute_logit_bias()
        signal.setitimer(signal.ITIMER_PROF, 0)
        over.set()
        is_last = _peak_bytes() >= most - first["memory_bytes"] // 2
        os.write(1, b"last\n" if is_last else b"done\n")
        if is_last:
            return


def _limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limit = size + num_bytes + _RESERVED_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _watch(max_bytes: int, parent_pid: int, over: threading.Event) -> None:
    """End this process when it exceeds the limit of memory, or when its parent has ended."""
    while not over.wait(_POLL_S):
        if _peak_bytes() > max_bytes:
            os._exit(TOO_MUCH_MEMORY)
        if os.getppid() != parent_pid:
            os._exit(1)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
