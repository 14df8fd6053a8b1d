"""Several streams at once: they share the two models, and each has the text that it would have alone."""

import math

import trio

import runtime

PROMPTS = {
    "stack": "class Stack:",
    "sort": "def quicksort(items):",
    "read": "def read_lines(path):",
}


async def show(label: str, prompt: str, statistics: dict[str, runtime.Statistics]) -> None:
    """Print a continuation, each line when it is complete, interleaved with other streams."""
    line = prompt
    # No runtime argument: `runtime.stream` uses the runtime that is open around this task.
    async with runtime.stream(prompt, max_tokens=48) as stream:
        async for token in stream:
            *whole_lines, line = (line + token.text).split("\n")
            for whole in whole_lines:
                print(f"{label:>5} | {whole}")
    print(f"{label:>5} | {line}")
    statistics[label] = stream.statistics()


async def main() -> None:
    statistics: dict[str, runtime.Statistics] = {}
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        async with trio.open_nursery() as nursery:
            for label, prompt in PROMPTS.items():
                nursery.start_soon(show, label, prompt, statistics)
        statistics["all"] = rt.statistics()

    print("\n        tokens  tokens/s  acceptance  tokens per round")
    for label, s in statistics.items():
        print(
            f"{label:>5} {s.generated_tokens:8} {s.generation_tps or math.nan:9.1f} "
            f"{s.acceptance_rate or 0:11.0%} {s.tokens_per_round:17.2f}"
        )


trio.run(main)
