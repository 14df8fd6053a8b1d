"""Prompts with a common beginning, in simulated time: the beginning is read once, whichever caches the models have.

The counts are those of a system prompt that agents share: a part that is read again costs them seconds.
"""

from typing import Any

import pytest
import trio
from scripted import CACHES, ScriptedModel, continuation, every_cache, ids, pair_with, simulated, truthful
from sweeps import sweep

from runtime.generation.answers.message_format import message_starts

SYSTEM = [1 + i % 60 for i in range(300)]
QUESTIONS = [[10 + i, 20 + i, 30, 7] for i in range(4)]
ASKED: dict[str, Any] = {"max_tokens": 4, "reuse_prefix": True, "prefill_step_size": 64}

# Caches that can go back to where prompts part.
PARTING = ["can be trimmed", "recurrent"]


async def cached(simulation: Any, prompt: list[int], *, num_common: int | None = None, **changes: Any) -> int:
    """How many tokens of a prompt are not read again. Asserts that its text is right, and that its statistics say how
    many of the `num_common` tokens that a cached text has, too, are read again.
    """
    completion = await simulation.runtime.generate(prompt, **{**ASKED, **changes})
    assert ids(completion.tokens) == continuation(prompt, len(completion.tokens))
    statistics = completion.statistics
    assert num_common is None or statistics.parted_tokens == num_common - statistics.cached_tokens
    return int(statistics.cached_tokens)


@sweep("cache", PARTING)
@sweep("lookahead", [0, 3])
async def test_a_third_text_parts_where_a_second_one_has_parted(cache, lookahead, autojump_clock):
    async with simulated(*pair_with(CACHES[cache])) as simulation:
        first = [*SYSTEM, *QUESTIONS[0]]
        assert await cached(simulation, first, num_common=0, lookahead=lookahead) == 0
        second = await cached(simulation, [*SYSTEM, *QUESTIONS[1]], num_common=len(SYSTEM), lookahead=lookahead)
        assert second == len(SYSTEM) if cache == "can be trimmed" else second < len(SYSTEM)
        assert await cached(simulation, [*SYSTEM, *QUESTIONS[2]], lookahead=lookahead) == len(SYSTEM)
        # Nobody has taken the first one's sequence.
        again = [*first, *continuation(first, 4), 5, 6]
        assert await cached(simulation, again, lookahead=lookahead) >= len(first) - 1


async def test_statistics_say_what_a_larger_cache_would_have_saved(autojump_clock: Any) -> None:
    first, second, third = ([*SYSTEM[:100], *SYSTEM[10 * i : 10 * i + 50]] for i in (1, 2, 3))
    other = [61 - token for token in SYSTEM]
    # One token is one byte here, so that there is room for one of these texts.
    async with simulated(*pair_with(CACHES["can be trimmed"]), prefix_cache_bytes=310) as simulation:
        found = []
        for prompt in (first, other, second, third):
            statistics = (await simulation.runtime.generate(prompt, **ASKED)).statistics
            found.append((statistics.cached_tokens, statistics.evicted_tokens))
        # The first text had to leave for the other one. What the third has in common with the second is still there.
        assert found == [(0, 0), (0, 0), (0, 100), (100, 0)]
        assert simulation.runtime.statistics().evicted_tokens == 100
    # A text that does not fit at all is missed, too.
    async with simulated(*pair_with(CACHES["can be trimmed"]), prefix_cache_bytes=50) as simulation:
        await simulation.runtime.generate(first, **ASKED)
        assert (await simulation.runtime.generate(second, **ASKED)).statistics.evicted_tokens == 100


async def test_statistics_say_what_the_settings_do_not_allow(autojump_clock: Any) -> None:
    first, second = ([*SYSTEM, *question] for question in QUESTIONS[:2])
    async with simulated(*pair_with(CACHES["can be trimmed"]), prefix_cache_bytes=310) as simulation:

        async def why(prompt: list[int], **changes: Any) -> tuple[int, int, int, int]:
            statistics = (await simulation.runtime.generate(prompt, **{**ASKED, **changes})).statistics
            read = statistics.cached_tokens + statistics.prefilled_tokens
            assert read == statistics.prompt_tokens - 1 >= statistics.mismatched_tokens + statistics.evicted_tokens
            names = ("cached", "parted", "mismatched", "evicted")
            return tuple(getattr(statistics, f"{name}_tokens") for name in names)

        assert await why(first[:200], lookahead=3) == (0, 0, 0, 0)
        # One has a drafter and the other has none; or it is not to be reused at all.
        assert await why(second[:250], lookahead=3, reuse_prefix=False) == (0, 0, 200, 0)
        assert await why(second[:100], lookahead=0) == (0, 0, 99, 0)
        assert await why(first, lookahead=0) == (100, 0, 100, 0)
        # The text with a drafter had to leave, too, but each token is counted once.
        assert await why([*SYSTEM[:150], 7], lookahead=3) == (0, 0, 150, 0)
        assert simulation.runtime.statistics().mismatched_tokens == 200 + 99 + 100 + 150


@every_cache
async def test_one_that_comes_while_another_is_read_waits_for_what_they_share(cache, autojump_clock):
    async with simulated(*pair_with(cache)) as simulation:
        results: dict[int, int] = {}

        async def ask(number: int, after_s: float) -> None:
            await trio.sleep(after_s)
            results[number] = await cached(simulation, [*SYSTEM, *QUESTIONS[number]], lookahead=3)

        async with trio.open_nursery() as nursery:
            for number, after_s in enumerate((0.0, 3.0, 9.0)):
                nursery.start_soon(ask, number, after_s)
        if "keeps_states" in cache:
            assert results == {0: 0, 1: len(SYSTEM), 2: len(SYSTEM)}


async def test_short_beginnings_are_read_again_since_waiting_would_take_longer(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        prompts = [[*SYSTEM[:20], *question] for question in QUESTIONS]
        texts = await simulation.runtime.generate_many(prompts, **ASKED)
        assert [ids(text.tokens) for text in texts] == [continuation(prompt, 4) for prompt in prompts]
        assert sum(text.statistics.cached_tokens for text in texts) < 2 * 20


@pytest.mark.parametrize("max_bytes", [10**9, 0])
async def test_what_is_in_use_is_copied_too(max_bytes: int, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), prefix_cache_bytes=max_bytes) as simulation:
        first = simulation.runtime.stream([*SYSTEM, *QUESTIONS[0]], **{**ASKED, "max_tokens": 40})
        token = await anext(first)
        assert await cached(simulation, [*SYSTEM, *QUESTIONS[1]]) == len(SYSTEM)
        assert [token.id, *[each.id async for each in first]] == continuation([*SYSTEM, *QUESTIONS[0]], 40)


class WithMessages:
    """A tokenizer whose token 2 begins a message, token 3 ends one, and token 1 begins a text."""

    def get_added_vocab(self) -> dict[str, int]:
        return {"<s>": 1, "<m>": 2, "</m>": 3}


def test_prompts_are_likely_to_part_where_messages_begin() -> None:
    message = [2, 10, 11, 12, 3]
    prompt = [1, *message * 8, 2, 9]
    assert message_starts(WithMessages(), prompt) == (6, 11, 31, 36, 41)
    assert message_starts(WithMessages(), [1, *message]) == ()
    assert message_starts(WithMessages(), [10, 11]) == ()
