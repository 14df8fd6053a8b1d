"""Several sessions share the drafter's passes: texts stay right, and what one does wrong costs that one its drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
import trio
from scripted import (
    FailingTogether,
    ScriptedModel,
    Simulation,
    agreeing,
    continuation,
    forget_all,
    priced,
    run,
    simulated,
    truthful,
)
from sweeps import sweep

from actors.model import Feed, feed_each
from protocol.trace import Instant, Span

PROMPTS = [[5, 6, 7], [9, 2], [1, 1, 3, 8], [4]]
NUM_TOKENS = 24
PRICE = priced(prefill=0.0)  # all begin at once
EXPECTED = [continuation(prompt, NUM_TOKENS) for prompt in PROMPTS]


def shared_steps(simulation: Simulation) -> list[Span]:
    return [span for span in simulation.spans("draft") if span.shares]


async def texts(simulation: Simulation, **settings: Any) -> list[list[int]]:
    completions = await simulation.runtime.generate_many(PROMPTS, max_tokens=NUM_TOKENS, **settings)
    return [[token.id for token in completion.tokens] for completion in completions]


@sweep("lookahead", [1, 4, "auto"])
@sweep("agreement", [0.0, 0.7, 1.0])
@sweep("schedule", range(3))
async def test_sessions_share_draft_steps_and_their_texts_are_right(
    lookahead: Any, agreement: float, schedule: int, autojump_clock: Any
) -> None:
    draft = ScriptedModel(agreeing(agreement))
    async with simulated(ScriptedModel(truthful), draft, price=PRICE, schedule=schedule) as simulation:
        assert await texts(simulation, lookahead=lookahead) == EXPECTED
        assert max(len(span.shares) for span in shared_steps(simulation)) >= 3
        if lookahead != "auto":  # where some rest, the others draft alone
            # Most tokens are drafted in steps that others share, until the first texts end.
            drafted = [span for span in simulation.spans("draft") if span.kind == "draft"]
            assert sum(len(span.shares) for span in shared_steps(simulation)) > len(drafted) / 2


@pytest.mark.parametrize("num_tokens", [3, 8, 20])
async def test_a_session_that_makes_a_shared_step_fail_loses_its_drafter_and_no_other_does(
    num_tokens: int, autojump_clock: Any
) -> None:
    draft = FailingTogether(agreeing(0.7), PROMPTS[0][0], num_tokens)
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        assert await texts(simulation, lookahead=3) == EXPECTED
        left = [e.session for e in simulation.events if isinstance(e, Instant) and e.kind == "withdraw"]
        assert left == [0]
        assert simulation.runtime.statistics().draft_failures == 1


def test_the_others_share_steps_at_once() -> None:
    prompts = [[index, index + 1] for index in range(12)]

    async def sessions_per_step(culprit: int | None) -> float:
        agrees = agreeing(0.7)
        draft = ScriptedModel(agrees) if culprit is None else FailingTogether(agrees, culprit, 12)
        async with simulated(ScriptedModel(truthful), draft, price=PRICE) as simulation:
            completions = await simulation.runtime.generate_many(prompts, max_tokens=40, lookahead=2)
            for prompt, completion in zip(prompts, completions, strict=True):
                assert [token.id for token in completion.tokens] == continuation(prompt, 40)
            steps = [span for span in simulation.spans("draft") if span.kind == "draft"]
            return sum(len(span.sessions) for span in steps) / len(steps)

    undisturbed = run(sessions_per_step, None)
    assert run(sessions_per_step, 3) > 2 / 3 * undisturbed


class TooMuch(ScriptedModel):
    """A model without the memory for steps of more than some sessions."""

    def __init__(self, most: int) -> None:
        super().__init__(agreeing(0.7))
        self.most, self.num_failures = most, 0

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:  # type: ignore[override]
        if len(feeds) > self.most:
            self.num_failures += 1
            raise MemoryError(f"no room for {len(feeds)} sessions")
        return feed_each(feeds)

    def abandon_shared(self) -> None:
        forget_all(self)


@pytest.mark.parametrize("most", [1, 3])
async def test_steps_that_there_is_too_little_memory_for_are_shared_by_fewer_and_rarely_tried_again(
    most: int, autojump_clock: Any
) -> None:
    draft = TooMuch(most)
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        completions = await simulation.runtime.generate_many(PROMPTS, max_tokens=100, lookahead=3)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert [token.id for token in completion.tokens] == continuation(prompt, 100)
            assert completion.statistics.accepted > 20
    assert 0 < draft.num_failures < 15


@sweep("at", [1.0, 5.0, 9.5, 13.25, 17.0, 33.0])
async def test_a_session_that_is_cancelled_at_any_moment_leaves_the_others_their_drafter(
    at: float, autojump_clock: Any
) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.7))) as simulation:
        rt = simulation.runtime
        found: dict[int, list[int]] = {}

        async def read(index: int) -> None:
            completion = await rt.generate(PROMPTS[index], max_tokens=NUM_TOKENS, lookahead=3)
            found[index] = [token.id for token in completion.tokens]

        async with trio.open_nursery() as nursery:
            for index in range(1, len(PROMPTS)):
                nursery.start_soon(read, index)
            with trio.move_on_after(at):
                await read(0)
        assert {index: found[index] for index in range(1, len(PROMPTS))} == dict(enumerate(EXPECTED[1:], start=1))
        assert rt.statistics().draft_failures == 0
