"""Four ways to end a generation early, each of which leaves the models free for the next one.

None of them needs clean-up code: dropping, closing or cancelling a stream ends its generation. The current forward pass
is finished, and no other one starts.
"""

import trio

import runtime

PROMPT = "class Stack:"
# A text that only ends when the context is full, so that there is something to cancel.
ENDLESS = {"max_tokens": None, "ignore_eos": True}


async def by_timeout(rt: runtime.Runtime) -> None:
    num_tokens = 0
    # Any cancel scope works: a timeout, a cancelled nursery, a server whose client has gone.
    with trio.move_on_after(0.5) as scope:
        async for _ in rt.stream(PROMPT, **ENDLESS):
            num_tokens += 1
    print(f"timeout: cancelled is {scope.cancelled_caught}, after half a second and {num_tokens} tokens")


async def by_break(rt: runtime.Runtime) -> None:
    async for token in rt.stream(PROMPT, **ENDLESS):
        if token.index == 19:
            # The loop held the only reference to the stream, so the generation ends with it.
            break
    print(f"break: enough after {token.index + 1} tokens")


async def by_leaving_a_block(rt: runtime.Runtime) -> None:
    # A stream in a variable is not dropped by `break`. Leaving the block ends it in any case, also by an exception, and
    # its statistics can still be read.
    async with rt.stream(PROMPT, **ENDLESS) as stream:
        async for token in stream:
            if token.index == 9:
                break
    print(f"async with: left after {stream.statistics().generated_tokens} tokens")


async def by_aclose(rt: runtime.Runtime) -> None:
    stream = rt.stream(PROMPT, **ENDLESS)
    first = await anext(stream)
    await stream.aclose()
    try:
        await anext(stream)
    except runtime.RuntimeClosedError as error:
        print(f"aclose: after the token {first.text!r}, {error}")


async def main() -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        for way in (by_timeout, by_break, by_leaving_a_block, by_aclose):
            await way(rt)
            completion = await rt.generate(PROMPT, max_tokens=8)
            wait_ms = 1000 * (completion.statistics.time_to_first_token or 0)
            print(f"    the next stream began to answer after {wait_ms:.0f} ms: {completion.text!r}")


trio.run(main)
