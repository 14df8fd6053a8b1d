"""A drafter that is late or hangs costs speed only: the target waits as long as that pays, and continues alone."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from scripted import (
    VOCAB_SIZE,
    Price,
    ScriptedModel,
    agreeing,
    continuation,
    ids,
    markov,
    priced,
    read_into,
    run,
    simulated,
    text_of,
    texts_of,
    truthful,
)
from sweeps import sweep

import runtime
from actors.workers.worker import Job
from protocol.deadlines import (
    MIN_PROMPT_WAIT_S,
    MIN_PROPOSAL_WAIT_S,
    PROPOSAL_FACTOR,
    UNPRICED_PROPOSAL_WAIT_S,
    prompt_wait_s,
    proposal_wait_s,
)
from protocol.pass_price import PassPrice
from protocol.prices import Prices

PROMPT = [5, 6, 7, 8, 9]
DECODE_S = 8.0  # see `scripted.PRICES`
FOREVER_S = 2e5


def drafter() -> ScriptedModel:
    return ScriptedModel(agreeing(0.7))


def hanging(kind: str, nth: int, seconds: float = FOREVER_S) -> Price:
    """The usual prices, except for the n-th job of a kind."""
    usual, num_jobs = priced(), 0

    def price(job: Job[Any]) -> float:
        nonlocal num_jobs
        num_jobs += job.kind == kind
        return seconds if job.kind == kind and num_jobs == nth else usual(job)

    return price


# --- in simulated time ----------------------------------------------------------------------------


@sweep("settings", [{"lookahead": 2}, {}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.7}])
def test_a_drafter_that_hangs_in_any_step_does_not_stop_the_text(settings: Any) -> None:
    async def hang_in(nth: int) -> None:
        price = hanging("draft", nth)
        async with simulated(ScriptedModel(truthful), drafter(), draft_price=price, schedule=nth) as simulation:
            stream = simulation.runtime.stream(PROMPT, max_tokens=40, **settings)
            got: list[int] = []
            await read_into(got, stream)
            statistics = stream.statistics()
            assert len(got) == 40
            if settings.get("temperature", 0) == 0:
                assert got == continuation(PROMPT, 40)
            # Forty passes at most, and one long wait.
            assert trio.current_time() < 41 * DECODE_S + max(UNPRICED_PROPOSAL_WAIT_S, PROPOSAL_FACTOR * 64 * 0.5) + 10
            if stream.statistics().draft_timeouts:
                assert statistics.draft_timeouts == 1
                assert len(simulation.instants("overdue", "target")) == 1
                assert simulation.runtime.health() == runtime.Health(target=True, draft=False)
            # A later stream is served as well, while the drafter still hangs.
            assert await text_of(simulation, [1, 2], max_tokens=12, lookahead=2) == continuation([1, 2], 12)
            assert trio.current_time() < FOREVER_S

    for nth in (1, 13) if "temperature" in settings else (2, 5):
        run(hang_in, nth)


@pytest.mark.parametrize("lookahead", [2, "auto"])
async def test_a_drafter_that_hung_catches_up_and_drafts_again(lookahead: Any, autojump_clock: Any) -> None:
    price = hanging("draft", 6, seconds=500.0)
    async with simulated(ScriptedModel(truthful), drafter(), draft_price=price) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=120, lookahead=lookahead)
        assert ids(completion.tokens) == continuation(PROMPT, 120)
        (overdue,) = simulation.instants("overdue", "target")
        (rejoin,) = simulation.instants("rejoin", "draft")
        assert overdue.at < 500.0 < rejoin.at
        assert completion.statistics.draft_timeouts == 1
        # The drafter reads the text that it missed in passes of its own, before the target waits for it again.
        assert simulation.spans("draft", "prefill")[-1].began >= 500.0
        proposals = [proposal.at for proposal in simulation.instants("proposal") if proposal.num_tokens]
        assert [at for at in proposals if at > rejoin.at]
        assert [at for at in proposals if overdue.at < at < rejoin.at] == []
        assert simulation.runtime.health().ok


async def test_the_first_token_does_not_wait_long_for_the_drafter(
    autojump_clock: Any,
) -> None:
    price = hanging("prefill", 1, seconds=300.0)
    async with simulated(ScriptedModel(truthful), drafter(), price=priced(), draft_price=price) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=100, lookahead=3)
        assert ids(completion.tokens) == continuation(PROMPT, 100)
        # Its own prefill, the minimum wait, and a pass.
        assert completion.statistics.time_to_first_token == 4.0 + MIN_PROMPT_WAIT_S + DECODE_S
        assert completion.statistics.draft_timeouts == 1
        assert completion.statistics.accepted > 0


async def test_a_drafter_that_has_not_read_the_prompt_yet_is_not_called_late(autojump_clock: Any) -> None:
    price = priced(prefill=300.0)
    async with simulated(ScriptedModel(truthful), drafter(), price=priced(), draft_price=price) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=100, lookahead=3)
        await anext(stream)
        assert simulation.runtime.health().ok
        await stream.aclose()


async def test_sessions_beside_one_whose_draft_step_hangs_go_on(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter(), draft_price=hanging("draft", 9)) as simulation:
        prompts = [[i, i] for i in range(3)]
        found = await texts_of(simulation, prompts, max_tokens=30, lookahead=2)
        assert found == [continuation(prompt, 30) for prompt in prompts]


async def test_a_slow_consumer_is_not_mistaken_for_a_late_drafter(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter()) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=120, lookahead=2)
        got: list[int] = []
        await read_into(got, stream, pause=500.0)
        assert got == continuation(PROMPT, 120)
        assert stream.statistics().draft_timeouts == 0


@pytest.mark.slow
async def test_a_deadline_favours_no_token_under_the_rejection_rule(autojump_clock: Any) -> None:
    # A drawn stop token ends a proposal, which is then in time; any other token needs another slow step, and is late.
    stop, num_texts = 7, 300
    row = [0.5 if token in (stop, 8) else 0.0 for token in range(VOCAB_SIZE)]
    target, draft = ScriptedModel(markov([row] * VOCAB_SIZE)), ScriptedModel(markov([row] * VOCAB_SIZE))
    num_stops = num_timeouts = 0
    async with simulated(
        target,
        draft,
        price=priced(verify=0.1, decode=0.1, prefill=0.01),
        draft_price=lambda job: 0.0 if job.kind != "draft" else 1.0 if job.round == 0 else 0.1,
    ) as simulation:
        for seed in range(num_texts):
            prices = simulation.runtime._prices.draft_alone = PassPrice()
            for _ in range(200):
                prices.observe(1, 0.0, 0.1)
            completion = await simulation.runtime.generate(
                PROMPT,
                max_tokens=12,
                lookahead=4,
                temperature=1.0,
                seed=seed,
                acceptance="rejection",
                stop_tokens=[stop],
            )
            num_stops += completion.tokens[0].id == stop
            num_timeouts += completion.statistics.draft_timeouts
    assert num_timeouts > num_texts / 3
    # Four standard deviations. Dropping late proposals would give three out of four.
    assert abs(num_stops - num_texts / 2) < 4 * (num_texts / 4) ** 0.5


# --- the waits ------------------------------------------------------------------------------------


def known(*, verify_s: float = 0.02, draft_s: float = 0.002) -> Prices:
    prices = Prices()
    for width in (1, 4) * 4:
        prices.observe_draft_step(width, 0.0, draft_s, beside_target=False)
        prices.observe_verify_pass(width, 10.0, 10.0 + verify_s)
    prices.observe_draft_step(1, 20.0, 20.0 + draft_s, beside_target=False)
    return prices


def test_a_proposal_is_waited_for_longer_where_more_steps_are_to_be_made() -> None:
    prices = known(draft_s=0.5)
    assert proposal_wait_s(prices, 8, 1) == pytest.approx(PROPOSAL_FACTOR * 8 * 0.5, rel=0.01)
    assert proposal_wait_s(prices, 8, 3) == pytest.approx(3 * proposal_wait_s(prices, 8, 1))


def test_waits_for_a_drafter_are_short_and_bounded_before_measurements() -> None:
    assert proposal_wait_s(known(), 4, 1) == MIN_PROPOSAL_WAIT_S
    assert prompt_wait_s(known()) == prompt_wait_s(Prices()) == MIN_PROMPT_WAIT_S
    assert proposal_wait_s(Prices(), 64, 8) == UNPRICED_PROPOSAL_WAIT_S


@pytest.mark.parametrize("verify_s", [0.5, 3.0, 20.0])
def test_the_prompt_is_waited_for_no_longer_than_a_pass_takes(verify_s: float) -> None:
    assert MIN_PROMPT_WAIT_S <= prompt_wait_s(known(verify_s=verify_s)) <= verify_s
