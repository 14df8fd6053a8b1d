"""The drafter works while the target verifies: a text takes only the time of its verify passes.

All times are simulated, and made of powers of two, so they are compared with ==.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from scripted import (
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    continuation,
    never,
    priced,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep

from protocol.settings import MAX_LOOKAHEAD
from runtime.engine.sessions import BUFFERED_ROUNDS

PROMPT = [5, 6, 7, 8, 9]
VERIFY = 32.0
PREFILL = 4.0
LOOKAHEADS = [1, 2, 3, 7]


def free_draft(lookahead: int) -> float:
    """A price at which the drafter gets as far ahead as it may within one verify pass; a power of two."""
    price = VERIFY
    while price * (2 * lookahead + 1) > VERIFY:
        price /= 2
    return price


def sizes_of(lookahead: int, max_tokens: int) -> list[int]:
    """The number of tokens in each proposal, if every guess is right and the target never waits for drafting."""
    sizes, left = [], max_tokens
    while left > 0:
        sizes.append(min(lookahead, left - 1))
        left -= sizes[-1] + 1
    return sizes


@sweep("max_tokens", [1, 2, 24, 25])
@sweep("lookahead", LOOKAHEADS)
async def test_with_every_guess_right_a_text_takes_the_time_of_its_verifies_alone(
    lookahead: Any, max_tokens: int, autojump_clock: Any
) -> None:
    draft_price = free_draft(lookahead)
    sizes = sizes_of(lookahead, max_tokens)
    price = priced(prefill=PREFILL, draft=draft_price, verify=VERIFY)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=max_tokens, lookahead=lookahead)
        took = trio.current_time()

    assert took == PREFILL + sizes[0] * draft_price + len(sizes) * VERIFY
    assert [instant.num_tokens for instant in simulation.instants("proposal")] == sizes
    verifies = simulation.spans("target", "verify")
    assert all(before.ended == after.began for before, after in itertools.pairwise(verifies))
    # In each round except the last, the text after the verdict was already drafted.
    assert completion.statistics.lookahead_hits == len(sizes) - 1
    assert completion.statistics.lookahead_misses == 0
    assert completion.statistics.bonus == sum(size > 0 for size in sizes)


@pytest.mark.parametrize("draft_price", [0.25, 1.0, 4.0])
async def test_a_right_and_quick_drafter_never_lets_a_lone_target_wait(draft_price: float, autojump_clock: Any) -> None:
    price = priced(prefill=PREFILL, draft=draft_price, verify=VERIFY)
    # Draft steps end at the same moments as verifies; in this schedule they are reported first.
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price, schedule=0) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=80)
    verifies, drafts = simulation.spans("target", "verify"), simulation.spans("draft", "draft")
    assert all(before.ended == after.began for before, after in itertools.pairwise(verifies))
    # It waited for the first proposal only, and committed as many tokens per round as with a lookahead of 4.
    assert verifies[0].began == PREFILL + simulation.instants("proposal")[0].num_tokens * draft_price
    assert len(verifies) <= 80 / 5 + 1
    assert completion.statistics.lookahead_misses == completion.statistics.rejected == 0
    first = simulation.instants("proposal")[0].num_tokens
    assert all(verifies[0].began <= draft.began for draft in drafts[first:])


@sweep("lookahead", [1, 2, 3, 5, 8, "auto"])
async def test_a_drafter_rests_once_it_is_far_enough_ahead(lookahead: Any, autojump_clock: Any) -> None:
    # A whole proposal, the token after it, and another whole proposal are the most that can be needed next.
    horizon = 2 * (MAX_LOOKAHEAD if lookahead == "auto" else lookahead) + 1
    price = priced(draft=1.0, verify=1024.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=1000, lookahead=lookahead)
        await trio.sleep(500)
        num_drafts = len(simulation.spans("draft", "draft"))
        assert 8 < num_drafts <= horizon if lookahead == "auto" else num_drafts == horizon
        await trio.sleep(500)
        assert len(simulation.spans("draft", "draft")) == num_drafts
        await stream.aclose()


async def test_a_drafter_that_is_always_wrong_costs_one_draft_a_round(autojump_clock: Any) -> None:
    # The verdict finds the drafter resting, so the target waits for exactly what the next proposal needs.
    price = priced(prefill=PREFILL, draft=1.0, verify=VERIFY)
    for lookahead in (1, 2, 3):
        draft = ScriptedModel(agreeing(0.0))
        async with simulated(ScriptedModel(truthful), draft, price=price) as simulation:
            began = trio.current_time()
            assert await text_of(simulation, PROMPT, max_tokens=20, lookahead=lookahead) == continuation(PROMPT, 20)
            # In the last rounds fewer tokens remain.
            waits = sum(min(lookahead, 19 - round) for round in range(20))
            assert trio.current_time() - began == PREFILL + 20 * VERIFY + waits


async def test_with_drafting_dearer_than_verifying_the_target_waits_for_drafts_and_for_nothing_else(
    autojump_clock: Any,
) -> None:
    price = priced(prefill=PREFILL, draft=8.0, verify=1.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price) as simulation:
        await text_of(simulation, PROMPT, max_tokens=20, lookahead=1)
        drafts = simulation.spans("draft", "draft")
        # Two tokens per round. The drafter drafts all of them, one after the other, without a pause.
        assert all(before.ended == after.began for before, after in itertools.pairwise(drafts))
        assert trio.current_time() == PREFILL + 19 * 8.0 + 1.0


async def test_a_running_draft_is_of_use_if_the_verdict_agrees(
    autojump_clock: Any,
) -> None:
    # Drafts end at 3, 6, 9. The first is proposed at 3, and its verdict comes at 7: it commits the token that the
    # second draft guessed, and the third continues from there.
    price = priced(prefill=0.0, draft=3.0, verify=4.0)
    draft = ScriptedModel(truthful)
    async with simulated(ScriptedModel(truthful), draft, price=price) as simulation:
        assert await text_of(simulation, PROMPT, max_tokens=30, lookahead=1) == continuation(PROMPT, 30)
        drafts = simulation.spans("draft", "draft")
        assert any(d.began < hit.at < d.ended for d in drafts for hit in simulation.instants("hit"))
        assert [instant.at for instant in simulation.instants("proposal")][:3] == [3.0, 9.0, 15.0]
        # No token was drafted twice.
        assert all(d.num_tokens == 1 for d in drafts)
        assert draft.sequences[0].rewinds == []


@pytest.mark.parametrize("cannot", ["target", "draft"])
async def test_single_steps_overlap_too(cannot: str, autojump_clock: Any) -> None:
    target = ScriptedModel(truthful, undo=never) if cannot == "target" else ScriptedModel(truthful)
    draft = ScriptedModel(truthful, undo=never) if cannot == "draft" else ScriptedModel(truthful)
    price = priced(prefill=PREFILL, draft=1.0, verify=VERIFY)
    async with simulated(target, draft, price=price) as simulation:
        await text_of(simulation, PROMPT, max_tokens=20, lookahead=3)
        took = trio.current_time()
    if cannot == "target":
        # The target waits for the first proposal; every other one is there already.
        assert took == PREFILL + 3 * 1.0 + 20 * VERIFY
    else:
        # A guess at one token beyond the committed text needs the verdict first, so the target waits for it.
        assert took == PREFILL + 10 * (1.0 + VERIFY)


# --- a slow consumer ------------------------------------------------------------------------------


async def until_it_rests(simulation: Simulation) -> tuple[int, int]:
    """Let the models work until they rest; returns the numbers of rounds and drafts so far."""
    await trio.sleep(50_000)
    before = len(simulation.events)
    await trio.sleep(50_000)
    assert len(simulation.events) == before
    return len(simulation.rounds()), len(simulation.spans("draft", "draft"))


@sweep("lookahead", [3, "auto"])
async def test_the_models_wait_for_a_consumer_that_does_not_read(lookahead: Any, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.7))) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=150, lookahead=lookahead)
        num_verifies, num_drafts = await until_it_rests(simulation)
        # The buffer, and the round that waits to enter it.
        assert num_verifies == BUFFERED_ROUNDS + 1
        tokens = []
        for num_rounds in (1, 2):
            before = stream.statistics().rounds
            while stream.statistics().rounds == before:
                tokens.append((await anext(stream)).id)
            # One round was taken out, so one more goes in.
            assert (await until_it_rests(simulation))[0] == BUFFERED_ROUNDS + 1 + num_rounds
        assert num_drafts < (await until_it_rests(simulation))[1]
        assert tokens + await collect(stream) == continuation(PROMPT, 150)


async def test_a_consumer_that_does_not_read_holds_up_nobody_else(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful)) as simulation:
        unread = simulation.runtime.stream(PROMPT, max_tokens=150, lookahead=2)
        await until_it_rests(simulation)
        began = trio.current_time()
        assert await text_of(simulation, [1, 2], max_tokens=30, lookahead=2) == continuation([1, 2], 30)
        # As if it were alone: a prefill of one token, two drafts, ten verifies.
        assert trio.current_time() - began == 4.0 + 2 * 0.5 + 10 * 8.0
        assert await collect(unread) == continuation(PROMPT, 150)
