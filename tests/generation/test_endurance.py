"""A runtime that lives long: finished streams leave nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
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
NUM_MEASUREMENTS = 2

# What the streams of one measurement may leave. One object a stream is 250 blocks, and 4 KiB a stream 1 MiB, each time.
# Where nothing leaks, up to a thousand blocks of other tests of this process come and go, but not each time.
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
            with pytest.warns(ResourceWarning, match="dropped unread"):
                rt.stream(PROMPT, max_tokens=50)  # no consumer


def num_tasks() -> int:
    """The number of trio tasks that have not ended, without those that look for hangs and sleep on for seconds."""
    tasks, num = [trio.lowlevel.current_root_task()], 0
    while tasks:
        task = tasks.pop()
        assert task is not None
        num += not task.name.endswith("._give_up_if_it_hangs")
        tasks += (child for nursery in task.child_nurseries for child in nursery.child_tasks)
    return num


def resident_bytes() -> int:
    """The resident memory of the process in bytes, on Linux; 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def num_sessions() -> int:
    """The number of sessions in memory. Other tests of this process may have kept some."""
    return sum(isinstance(thing, Session) for thing in gc.get_objects())


async def settled(rt: runtime.Runtime, num_idle_tasks: int) -> None:
    """Wait until the target and the drafter have ended their parts of all streams."""
    sessions = rt._sessions
    await until_in_trio(lambda: not sessions and not sessions._admitted and num_tasks() <= num_idle_tasks)
    collect_garbage()
    mx.clear_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("spare_buffers")
async def test_hundreds_of_streams_leave_no_memory_no_task_and_no_thread() -> None:
    target, draft = llama(seed=1), llama(seed=2, hidden_size=32)
    async with runtime.open((target, None), (draft, None)) as rt:
        num_idle_tasks = num_tasks()
        blocks_left, bytes_left = [], []
        for measurement in range(1 + NUM_MEASUREMENTS):
            num_blocks, resident, num_others = sys.getallocatedblocks(), resident_bytes(), num_sessions()
            for number in range(NUM_STREAMS):
                await use(rt, number)
            await settled(rt, num_idle_tasks)
            assert rt.num_streams == 0
            if measurement == 0:  # what is compiled, learnt and cached for the first streams stays
                threads, active = threading.active_count(), mx.get_active_memory()
                continue
            blocks_left.append(sys.getallocatedblocks() - num_blocks)
            bytes_left.append(resident_bytes() - resident)
            assert threading.active_count() <= threads
            # The caches of one stream have some 64 KiB, and those of the last one may still be there at either moment.
            assert mx.get_active_memory() <= active + 128 * 1024
            # The very last one may not be removed yet.
            assert num_sessions() <= num_others + 1
        assert min(blocks_left) <= MAX_BLOCKS_LEFT, blocks_left
        assert min(bytes_left) <= MAX_BYTES_LEFT, bytes_left
