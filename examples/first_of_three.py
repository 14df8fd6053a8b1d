"""Three answers race: the first that is finished wins, and the others are cancelled in the middle of theirs.

    python examples/first_of_three.py

Each runner is a task in one nursery, and whoever is through cancels the nursery. That is all: the generations of the
others end with their tasks, and the models are free for what comes next.
"""

import trio

import runtime

PROMPT = "def quicksort(items):"
# It is finished where something else would begin.
SETTINGS = {"temperature": 0.7, "stop": ("\ndef ", "\nclass "), "max_tokens": 200}
SEEDS = (1, 2, 7)


class Race:
    """Who has got how far, and who was first."""

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
        # Another may be through before it hears that it was cancelled.
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
