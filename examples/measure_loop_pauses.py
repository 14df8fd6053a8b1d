"""Measure the pauses of an asyncio loop while models prefill and decode beside it, with a 1 ms ticker.

Three cases are measured in turn for `--seconds` each: an idle runtime, several streams that decode, and long prompts
one after another while other streams decode. Loading is not measured, since importing and building models holds
the GIL.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import runtime

PROMPTS = ["def quicksort(items):", "class Stack:", "def read_lines(path):", "import os"]
LONG_PROMPT = "def quicksort(items):\n    return sorted(items)\n\n\n" * 60
ENDLESS = {"max_tokens": None, "ignore_eos": True}


async def ticks(seconds: float) -> list[float]:
    """Sorted delays of 1 ms ticks, in milliseconds."""
    late, end = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - now - 0.001) * 1000)
    return sorted(late)


async def stream_on(rt: runtime.aio.Runtime, prompt: str, **settings: Any) -> None:
    while True:
        async for _ in rt.stream(prompt, **settings):
            pass


@asynccontextmanager
async def beside(*coroutines) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def main(seconds: float) -> None:
    print(f"{'':>28}  ticks   median      99 %  longest   [ms late]")
    async with runtime.aio.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        await rt.generate(PROMPTS[0], max_tokens=32)
        for what, streams in {
            "nothing beside it": [],
            "4 streams decode": [stream_on(rt, prompt, **ENDLESS) for prompt in PROMPTS],
            "2 decode, long prompts come": [
                *(stream_on(rt, prompt, **ENDLESS) for prompt in PROMPTS[:2]),
                stream_on(rt, LONG_PROMPT, max_tokens=1),
            ],
        }.items():
            async with beside(*streams):
                late = await ticks(seconds)
            middle, high = late[len(late) // 2], late[len(late) * 99 // 100]
            print(f"{what:>28} {len(late):6} {middle:8.2f}  {high:8.2f} {late[-1]:8.2f}")


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each case (default: %(default)s)")
parser.add_argument("--uvloop", action="store_true", help="run on uvloop")
arguments = parser.parse_args()
if arguments.uvloop:
    import uvloop
with asyncio.Runner(loop_factory=uvloop.new_event_loop if arguments.uvloop else None) as runner:
    runner.run(main(arguments.seconds))
