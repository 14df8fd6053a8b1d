"""A pass that fails empties the caches of all rows of its batch, also of those that had no part in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
import trio
from scripted import (
    VOCAB_SIZE,
    Script,
    ScriptedModel,
    ScriptedSequence,
    Simulation,
    agreeing,
    continuation,
    hashed,
    priced,
    run,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep

from actors.model import Feed, feed_each

PROMPTS = [5, 6, 7, 8], [9, 10, 11, 12]


class RowSequence(ScriptedSequence):
    """A text that is a row of its model's batch from when it shares a pass until it is fed by itself."""

    model: Rows

    @property
    def is_row(self) -> bool:
        return self in self.model.rows

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self.model.rows.pop(self, None)
        return super().feed(tokens, num_logits)

    def close(self) -> None:
        self.model.rows.pop(self, None)
        super().close()


class Rows(ScriptedModel):
    """A model with a batch. A pass over any of its rows computes all of them, and fails where that is wanted.

    Attributes:
        fails: of the number of such a pass, from 1, and the rows that it computes.
    """

    kind = RowSequence

    def __init__(self, script: Script, fails: Callable[[int, int], bool] = lambda num_passes, num_rows: False) -> None:
        super().__init__(script)
        self.fails = fails
        self.rows: dict[Any, None] = {}
        self.num_passes = self.num_failures = 0

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        rows = self._joined([feed.sequence for feed in feeds if not feed.alone])
        logits = feed_each(feeds)
        self.rows |= rows
        return logits

    def feed_ahead(self, sequences: Sequence[Any], tokens: mx.array) -> mx.array:
        self._joined(sequences)
        return super().feed_ahead(sequences, tokens)

    def read_together(self, sequences: Sequence[Any], tokens: Sequence[tuple[int, ...]]) -> None:
        super().read_together(sequences, tokens)
        self.rows |= dict.fromkeys(sequences)

    def _joined(self, sequences: Sequence[Any]) -> dict[Any, None]:
        if len(sequences) < 2 and not any(sequence in self.rows for sequence in sequences):
            return {}
        self.rows |= dict.fromkeys(sequences)
        self.num_passes += 1
        if self.fails(self.num_passes, len(self.rows)):
            self.num_failures += 1
            raise MemoryError("no room for these rows")
        return dict.fromkeys(sequences)

    def abandon_shared(self) -> None:
        rows, self.rows = self.rows, {}
        for sequence in rows:
            sequence.forget()


# In the first two, a text that had to be read again was once both in the queue of prompts and in that of rounds.
@sweep("seed, every", [(6, 3), (8, 3), (0, 11), (7, 5)])
def test_texts_whose_shared_passes_fail_now_and_then_are_complete(seed: int, every: int) -> None:
    dice = random.Random(seed)

    async def main() -> None:
        target = Rows(truthful, lambda num_passes, num_rows: num_passes % every == 0)
        price = priced(prefill=dice.choice((0.0, 1.0, 4.0)), draft=0.25)
        async with (
            simulated(target, ScriptedModel(agreeing(0.7)), price=price, schedule=seed) as simulation,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(detach, simulation)
            for number in range(6):
                nursery.start_soon(read, simulation, number)
        assert target.num_failures > 0

    async def read(simulation: Simulation, number: int) -> None:
        prompt, got = [number, *range(3, 3 + dice.choice((3, 20, 40)))], list[int]()
        settings = {"lookahead": dice.choice((3, "auto", 0)), "prefill_step_size": dice.choice(("auto", 8, 16))}
        async for token in simulation.runtime.stream(prompt, max_tokens=40, **settings):
            got.append(token.id)
            if dice.random() < 0.1:
                await trio.sleep(dice.choice((1.0, 30.0)))
        assert got == continuation(prompt, 40)

    async def detach(simulation: Simulation) -> None:
        await trio.sleep(dice.choice((20.0, 50.0, 100.0)))
        await simulation.runtime.detach_draft()

    run(main)


@sweep("draft, lookahead", [(None, 0), ("ngram", 3), ("model", 3)])
def test_a_pass_over_one_text_that_fails_beside_idle_rows_is_repeated_alone(draft: Any, lookahead: int) -> None:
    num_failures = 0

    async def main(at: int) -> None:
        nonlocal num_failures
        is_full = False

        def fails(num_passes: int, num_rows: int) -> bool:
            return is_full and num_rows > 1

        target, drafter = Rows(truthful, fails), Rows(agreeing(0.8), fails)
        async with simulated(target, drafter if draft == "model" else draft) as simulation:
            idle, stream = (simulation.runtime.stream(each, max_tokens=80, lookahead=lookahead) for each in PROMPTS)
            first, got = await anext(idle), list[int]()
            async for token in stream:  # whose consumer goes on, and the other does not
                got.append(token.id)
                is_full = len(got) >= at
            assert got == continuation(PROMPTS[1], 80)
            is_full = False
            assert [first.id, *[token.id async for token in idle]] == continuation(PROMPTS[0], 80)
            assert stream.statistics().draft_failures == 0
        num_failures += target.num_failures + drafter.num_failures

    for at in range(10, 40, 3):
        run(main, at)
    assert num_failures > 5


async def test_a_text_whose_company_leaves_during_a_pass_that_fails_goes_on(autojump_clock: Any) -> None:
    is_full = False
    target = Rows(truthful, lambda num_passes, num_rows: is_full and num_rows > 1)
    async with simulated(target, price=priced(verify=8.0)) as simulation:
        left, stream = (simulation.runtime.stream(each, max_tokens=40) for each in PROMPTS)
        got = [(await anext(stream)).id for _ in range(3)]
        is_full = True
        await trio.sleep(4.0)  # into the next pass
        await left.aclose()
        got += [token.id async for token in stream]
        assert got == continuation(PROMPTS[1], 40)
    assert target.num_failures == 1


@sweep("reuse_prefix", [False, True])
def test_a_text_to_score_that_is_lost_in_a_pass_of_others_is_read_again(reuse_prefix: bool) -> None:
    prompt, scored = [1, 2, 3, 4], [13, 14, 15, 16, 17]
    num_failures = 0

    async def main(at: int) -> None:
        nonlocal num_failures
        target = Rows(hashed("target", 3.0), lambda num_passes, num_rows: num_passes == at)
        async with simulated(target) as simulation:
            rt = simulation.runtime
            async with rt.stream([30], max_tokens=60) as stream, trio.open_nursery() as nursery:
                for _ in range(3):
                    await anext(stream)
                # Its prompt is read together with that of the score, and then shares a pass with the first text.
                nursery.start_soon(text_of, simulation, PROMPTS[0])
                found = await rt.score(prompt, scored, reuse_prefix=reuse_prefix)
            expected = await rt.score(prompt, scored, reuse_prefix=False)
            assert found.logprob == pytest.approx(expected.logprob)
        num_failures += target.num_failures

    for at in range(1, 4):
        run(main, at)
    assert num_failures > 0


def test_unmarked_code_is_called_once_for_each_token_also_if_a_pass_fails() -> None:
    num_tokens, found = 12, dict[int, list[list[int]]]()

    async def main(at: int) -> None:
        target = Rows(hashed("target", 3.0), lambda num_passes, num_rows: num_passes == at)
        async with simulated(target) as simulation, trio.open_nursery() as nursery:
            texts = found[at] = [[] for _ in PROMPTS]
            nursery.start_soon(read, simulation, PROMPTS[0], texts[0], {"logits_processors": [Counting(favour)]})
            nursery.start_soon(read, simulation, PROMPTS[1], texts[1], {"sampler": Counting(choose)})
        assert target.num_failures == (at > 0)

    async def read(simulation: Simulation, prompt: list[int], text: list[int], settings: dict[str, Any]) -> None:
        text += await text_of(simulation, prompt, max_tokens=num_tokens, **settings)
        (code,) = settings.get("logits_processors") or [settings["sampler"]]
        assert code.num_calls == num_tokens

    for at in range(10):
        run(main, at)
        assert found[at] == found[0]


class Counting:
    """Unmarked code whose result depends on how often it was called."""

    def __init__(self, result: Callable[..., mx.array]) -> None:
        self.result, self.num_calls = result, 0

    def __call__(self, *arguments: mx.array) -> mx.array:
        self.num_calls += 1
        return self.result(self.num_calls, *arguments)


def favour(num_calls: int, tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + 5.0 * (mx.arange(VOCAB_SIZE) == 7 * num_calls % VOCAB_SIZE)


def choose(num_calls: int, logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[:, -1 - num_calls % 3]
