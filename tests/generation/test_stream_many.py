"""The tokens of many prompts as they come: complete, in order, and nothing more once the reader is gone."""

from __future__ import annotations

import gc
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import trio
from scripted import ScriptedModel, agreeing, continuation, simulated, truthful
from sweeps import sweep
from ways_to_cancel import Way, by_break, by_scope_around_what_is_kept

import runtime

PROMPTS = [[5, 6, 7], [1, 2], [9, 8, 7, 6], [4], [3, 3, 3]]


def pair() -> tuple[ScriptedModel, ScriptedModel]:
    return ScriptedModel(truthful), ScriptedModel(agreeing(0.6))


async def read(streams: Any) -> tuple[list[int], dict[int, list[runtime.Token]]]:
    """The order of the prompts' tokens, and the tokens of each prompt."""
    order, tokens = [], defaultdict(list)
    async for index, token in streams:
        order.append(index)
        tokens[index].append(token)
    return order, tokens


@sweep("max_concurrent", [1, 2, 5, 100])
async def test_each_prompt_has_all_its_tokens_in_order(max_concurrent: int, autojump_clock: Any) -> None:
    async with simulated(*pair()) as simulation:
        streams = simulation.runtime.stream_many(PROMPTS, max_concurrent=max_concurrent, max_tokens=12)
        order, tokens = await read(streams)
        for index, prompt in enumerate(PROMPTS):
            assert [token.id for token in tokens[index]] == continuation(prompt, 12)
            assert [token.index for token in tokens[index]] == list(range(12))
            assert [token.finish_reason for token in tokens[index]] == [None] * 11 + ["length"]
        # One after another, or side by side.
        assert (order == sorted(order)) == (max_concurrent == 1)
        assert [item async for item in streams] == []
        assert simulation.runtime.num_streams == 0


async def test_the_first_tokens_come_long_before_the_last(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        began, at = trio.current_time(), []
        async for _ in simulation.runtime.stream_many(PROMPTS, max_tokens=50):
            at.append(trio.current_time() - began)
        assert at[0] < at[-1] / 10


async def test_a_prompt_may_have_settings_of_its_own(autojump_clock: Any) -> None:
    async with simulated(*pair()) as simulation:
        asked = [[1], ([2], {"max_tokens": 3})]
        _, tokens = await read(simulation.runtime.stream_many(asked, max_tokens=5))
        assert [len(tokens[index]) for index in (0, 1)] == [5, 3]
        with pytest.raises(runtime.SettingsError, match=r"prompts\[1\]: max_tokens"):
            simulation.runtime.stream_many([[1], ([2], {"max_tokens": 0})])


@sweep("way", [by_scope_around_what_is_kept, by_break])
async def test_whatever_ends_the_reading_ends_all_generations(way: Way, autojump_clock: Any) -> None:
    async with simulated(*pair()) as simulation:
        scope, due = trio.CancelScope(), trio.Event()

        async def end() -> None:
            await trio.sleep(9.5)
            scope.cancel()
            due.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            kept = await way(partial(simulation.runtime.stream_many, PROMPTS, max_tokens=400), scope, due)
        gc.collect()
        if kept is not None:
            with pytest.raises(runtime.RuntimeClosedError, match="begin others with"):
                await anext(kept)
        await trio.sleep(100)
        assert simulation.runtime.num_streams == 0
        simulation.assert_all_closed()


async def test_a_reader_who_stops_reading_stops_the_models(autojump_clock: Any) -> None:
    async with simulated(*pair()) as simulation:
        streams = simulation.runtime.stream_many(PROMPTS, max_concurrent=2, max_tokens=2000)
        await anext(streams)
        await trio.sleep(1000)
        num_events = len(simulation.events)
        await trio.sleep(1000)
        assert len(simulation.events) == num_events
        await streams.aclose()
