"""A drafter that rests is not told of each round, and rests longer while it would not pay to begin again."""

import itertools
from typing import Any

import pytest
import trio
from delays import RestingPolicy
from models import gemma3_text, greedy, llama, mamba, near, prompt_of
from scripted import ScriptedModel, agreeing, collect, continuation, priced, simulated, text_of, truthful
from sweeps import sweep

import runtime
from actors.drafters.draft_actor import DraftActor
from protocol.messages import TELL_BEFORE_END, Rested, Verdict
from protocol.trace import Event

PROMPT = [5, 6, 7]
PRICE = priced(draft=2.0371, verify=8.0, prefill=0.25)
NUM_TOKENS = 300


async def test_many_resting_rounds_are_one_message_of_the_whole_text(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.0)), price=PRICE) as simulation:
        text = await text_of(simulation, PROMPT, max_tokens=NUM_TOKENS)
        sessions = simulation.draft_worker.sessions
    assert text == continuation(PROMPT, NUM_TOKENS)
    received = sessions.received[0]
    assert len(received) < NUM_TOKENS / 4
    assert isinstance(received[-1], Verdict)
    assert sessions.all_states[0].state.committed == [*PROMPT, *text]
    # The rests are 8, 16, 32 and 64 rounds long, and the drafter is told before their ends.
    told = [len(message.tokens) for message in received if isinstance(message, Rested) and len(message.tokens) > 1]
    rests = [DraftActor.rest_rounds << i for i in range(4)]
    assert rests[-1] == DraftActor.max_rest_rounds
    assert told[:4] == [length - TELL_BEFORE_END for length in rests]


@pytest.mark.parametrize("at", [100.0, 333.0, 700.0])
async def test_a_text_that_is_closed_in_a_rest_leaves_the_drafter_nothing(at: float, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.0)), price=PRICE) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=NUM_TOKENS, reuse_prefix=True)
        with trio.move_on_after(at):
            await collect(stream)
        await stream.aclose()
        assert await text_of(simulation, PROMPT, max_tokens=60, reuse_prefix=True) == continuation(PROMPT, 60)
        assert simulation.runtime.statistics().draft_failures == 0


async def test_a_drafter_that_does_not_pay_reads_no_prompt(autojump_clock: Any) -> None:
    drafts_badly = ScriptedModel(agreeing(0.0))
    async with simulated(ScriptedModel(truthful), drafts_badly, price=PRICE) as simulation:
        await text_of(simulation, PROMPT, max_tokens=NUM_TOKENS)  # finds out
        before = drafts_badly.num_calls["feed"]
        assert await text_of(simulation, [*range(2, 62)], max_tokens=5) == continuation([*range(2, 62)], 5)
        assert drafts_badly.num_calls["feed"] == before


async def test_texts_that_begin_together_have_their_first_tokens_before_the_drafter_reads(autojump_clock: Any) -> None:
    draft = ScriptedModel(agreeing(0.9))
    texts: dict[int, list[int]] = {}
    async with simulated(ScriptedModel(truthful), draft, price=PRICE) as simulation:
        first_fed: list[int] = []
        num_probed = draft.num_calls["feed"]

        async def read(number: int) -> None:
            stream = simulation.runtime.stream([number, *PROMPT], max_tokens=60)
            async with stream:
                texts[number] = [(await anext(stream)).id]
                first_fed.append(draft.num_calls["feed"] - num_probed)
                texts[number] += [token.id async for token in stream]

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read, number)
    assert first_fed == [0] * 4
    assert draft.num_calls["feed"] > num_probed
    assert all(text == continuation([number, *PROMPT], 60) for number, text in texts.items())


async def test_a_text_that_rests_is_not_among_those_that_copy(autojump_clock: Any) -> None:
    found: list[tuple[int | None, int]] = []

    def note(event: Event) -> None:
        if event.kind == "rest":
            found.append((event.session, simulation.runtime._target.prices.num_copying))

    async with (
        simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.0)), listener=note) as simulation,
        trio.open_nursery() as nursery,
    ):
        for number in range(4):
            prompt = [number, *PROMPT, 8, *PROMPT, 8, *PROMPT]
            nursery.start_soon(collect, simulation.runtime.stream(prompt, max_tokens=10))
    # Each of them, some of them twice.
    assert set(found) == {(session, 0) for session in range(4)}


async def test_a_text_that_begins_alone_after_many_does_not_begin_with_a_rest(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.9)), price=PRICE) as simulation:
        alone = await text_of(simulation, PROMPT, max_tokens=20)
        async with trio.open_nursery() as nursery:
            for number in range(6):
                stream = simulation.runtime.stream([number, *PROMPT], max_tokens=20, lookahead=0)
                nursery.start_soon(collect, stream)
        await trio.sleep(1.0)  # until the caches of those are closed
        assert await text_of(simulation, PROMPT, max_tokens=20) == alone
        assert simulation.instants("rest") == []


# --- real models --------------------------------------------------------------------------------------


ONCE, TWICE, AGAIN = (True, False, False, False), (False, False, True, True, False), (False, False, True, False)


@pytest.mark.slow
@sweep(
    ("build", "rewind", "turns"),
    [(llama, "none", ONCE), (mamba, "auto", AGAIN), (lambda: gemma3_text(window=16), "auto", TWICE)],
)
async def test_the_greedy_text_goes_on_through_every_rest(build, rewind, turns):
    target, prompt = build(), prompt_of(9)
    async with runtime.open((target, None), (near(target, noise=0.03), None), rewind=rewind) as rt:
        draft: Any = rt._draft
        draft._make_policy = lambda settings, prices: RestingPolicy(settings.lookahead, turns=itertools.cycle(turns))
        completion = await rt.generate(prompt, max_tokens=48, lookahead=3)
    statistics = completion.statistics
    assert [token.id for token in completion.tokens] == greedy(target, prompt, 48)
    assert statistics.draft_failures == 0
    # Both kinds of round occur.
    assert 0 < statistics.resting_rounds < statistics.rounds
    assert statistics.proposed > 0
