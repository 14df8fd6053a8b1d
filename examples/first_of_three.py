"""Three answers race: the first that is complete wins, and the others are cancelled.

    python examples/first_of_three.py

Each answer is a task in one nursery, and the first complete one cancels the nursery. The generations of the others end
with their tasks, and the models are free for the next request.
"""

import trio

import runtime

PROMPT = "def quicksort(items):"
# An answer is complete where the next definition would begin.
SETTINGS = {"temperature": 0.7, "stop": ("\ndef ", "\nclass "), "max_tokens": 200}
SEEDS = (1, 2, 7)


class Race:
    """The texts so far, and the seed of the winner."""

    def __init__(self) -> None:
        self.texts = dict.fromkeys(SEEDS, "")
        self.winner: int | None = None

    async def run(self, rt: runtime.Runtime) -> None:
        async with trio.open_nursery() as nursery:
            for seed in SEEDS:
                nursery.start_soon(self.answer, rt, seed, nursery.cancel_scope)

    async def answer(self, rt: runtime.Runtime, seed: int, race: trio.CancelScope) -> None:
        async for token in rt.stream(PROMPT, seed=seed, **SETTINGS):
            self.texts[seed] += token.text
        # Another answer may complete before its cancellation takes effect.
        if self.winner is None:
            self.winner = seed
            race.cancel()


async def main() -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        race = Race()
        await race.run(rt)
        assert race.winner is not None
        for seed, text in race.texts.items():
            outcome = "wins" if seed == race.winner else "was cancelled"
            print(f"the answer of seed {seed} {outcome}, after {len(text)} characters")
        print(PROMPT + race.texts[race.winner])

        completion = await rt.generate(PROMPT, max_tokens=8)
        wait_ms = 1000 * (completion.statistics.time_to_first_token or 0)
        print(f"the models were free: the next answer began after {wait_ms:.0f} ms")


trio.run(main)
