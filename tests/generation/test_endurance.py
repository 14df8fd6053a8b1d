"""A runtime that lives long: finished streams leave nothing behind.

It is measured in a process of its own, since what other tests have left of theirs comes and goes.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
import trio
from garbage import collect_garbage
from models import llama
from polling import until_in_trio

import runtime
from actors.session import Session

NUM_STREAMS = 250
NUM_MEASUREMENTS = 3

# What the streams of one measurement may leave. One object a stream is 250 blocks, and 4 KiB a stream 1 MiB, each time.
# Where nothing leaks, up to three hundred blocks come and go, but not each time.
MAX_BLOCKS_LEFT = 200
MAX_BYTES_LEFT = 2**19
PROMPT = [3, 1, 4, 1, 5]


async def use(rt: runtime.Runtime, number: int) -> None:
    """Run one stream, and end it in one of the ways in which streams end."""
    match number % 5:
        case 0:
            await rt.generate(PROMPT, max_tokens=6)
        case 1:
            async for _ in rt.stream(PROMPT, max_tokens=50):
                break
        case 2:
            with trio.CancelScope() as scope:
                async for token in rt.stream(PROMPT, max_tokens=50):
                    if token.index == 2:
                        scope.cancel()
        case 3:
            async with rt.stream(PROMPT, max_tokens=50) as stream:
                await anext(stream)
        case 4:
            rt.stream(PROMPT, max_tokens=50)  # no consumer


def num_tasks() -> int:
    """The number of trio tasks that have not ended, without those that look for hangs and sleep on for seconds."""
    tasks, num = [trio.lowlevel.current_root_task()], 0
    while tasks:
        task = tasks.pop()
        num += not task.name.endswith("._give_up_if_it_hangs")
        tasks += (child for nursery in task.child_nurseries for child in nursery.child_tasks)
    return num


def resident_bytes() -> int:
    """The resident memory of the process in bytes, on Linux; 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def num_sessions() -> int:
    """The number of sessions in memory."""
    return sum(isinstance(thing, Session) for thing in gc.get_objects())


async def settled(rt: runtime.Runtime, num_idle_tasks: int) -> None:
    """Wait until the target and the drafter have ended their parts of all streams."""
    sessions = rt._sessions
    await until_in_trio(lambda: not sessions.by_id and not sessions._admitted and num_tasks() <= num_idle_tasks)
    collect_garbage()
    mx.clear_cache()


async def measured() -> dict[str, list[int]]:
    """What the streams of each measurement leave: blocks and bytes of memory, bytes of arrays, threads and sessions."""
    target, draft = llama(seed=1), llama(seed=2, hidden_size=32)
    left: dict[str, list[int]] = {}
    async with runtime.open((target, None), (draft, None)) as rt:
        num_idle_tasks = num_tasks()
        for measurement in range(1 + NUM_MEASUREMENTS):
            blocks, resident = sys.getallocatedblocks(), resident_bytes()
            arrays, threads = mx.get_active_memory(), threading.active_count()
            for number in range(NUM_STREAMS):
                await use(rt, number)
            await settled(rt, num_idle_tasks)
            if measurement == 0:  # what is compiled, learnt and cached for the first streams stays
                continue
            left.setdefault("blocks", []).append(sys.getallocatedblocks() - blocks)
            left.setdefault("bytes", []).append(resident_bytes() - resident)
            left.setdefault("arrays", []).append(mx.get_active_memory() - arrays)
            left.setdefault("threads", []).append(threading.active_count() - threads)
            left.setdefault("sessions", []).append(num_sessions())
    return left


@pytest.mark.slow
def test_hundreds_of_streams_leave_no_memory_no_task_and_no_thread():
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "support")])}
    child = subprocess.run([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, check=True)
    left = json.loads(child.stdout)
    assert min(left["blocks"]) <= MAX_BLOCKS_LEFT, left
    assert min(left["bytes"]) <= MAX_BYTES_LEFT, left
    # The caches of one stream have some 64 KiB, and those of the last one may still be there at either moment.
    assert max(left["arrays"]) <= 128 * 1024, left
    assert max(left["threads"]) <= 0, left
    # The very last one may not be removed yet.
    assert max(left["sessions"]) <= 1, left


if __name__ == "__main__":
    warnings.simplefilter("ignore", ResourceWarning)  # of streams that are dropped unread
    sys.stdout.write(json.dumps(trio.run(measured)))
