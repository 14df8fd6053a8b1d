"""The runtime in an asyncio program: concurrent streams beside other work, a timeout, and many prompts."""

import asyncio

import runtime

PROMPTS = {"stack": "class Stack:", "sort": "def quicksort(items):"}


async def show(rt: runtime.aio.Runtime, label: str, prompt: str) -> None:
    """Print a continuation, each line when it is complete, interleaved with other streams."""
    line = prompt
    async with rt.stream(prompt, max_tokens=48) as stream:
        async for token in stream:
            *whole_lines, line = (line + token.text).split("\n")
            for whole in whole_lines:
                print(f"{label:>5} | {whole}")
    print(f"{label:>5} | {line}")


async def count_turns(of_the_loop: list[int]) -> None:
    while True:
        await asyncio.sleep(0.001)
        of_the_loop[0] += 1


async def main() -> None:
    async with runtime.aio.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        turns = [0]
        counting = asyncio.create_task(count_turns(turns))
        async with asyncio.TaskGroup() as group:
            for label, prompt in PROMPTS.items():
                group.create_task(show(rt, label, prompt))
        counting.cancel()
        print(f"meanwhile, the loop was free for other work {turns[0]} times")

        num_tokens = 0
        try:
            async with asyncio.timeout(0.5):
                async for _ in rt.stream("class Stack:", max_tokens=None, ignore_eos=True):
                    num_tokens += 1
        except TimeoutError:
            print(f"timeout: after half a second and {num_tokens} tokens")

        async for index, completion in rt.generate_many(list(PROMPTS.values()), max_tokens=8):
            print(f"prompt {index}: {len(completion.tokens)} tokens")


asyncio.run(main())
