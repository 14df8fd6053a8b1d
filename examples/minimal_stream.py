"""Stream the continuation of a prompt, token by token, from the bundled pair of models."""

import trio

import runtime

PROMPT = "def quicksort(items):"


async def main() -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        print(PROMPT, end="")
        async for token in rt.stream(PROMPT, max_tokens=60):
            print(token.text, end="", flush=True)
        print()


trio.run(main)
