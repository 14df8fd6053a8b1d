"""Several sessions share passes of the target or the drafter: texts are what they are alone, and a failure is one
session's.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
import trio
import trio.testing
from scripted import (
    VOCAB_SIZE,
    RefusingModel,
    Script,
    ScriptedModel,
    Simulation,
    agreeing,
    always,
    continuation,
    ids,
    never,
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
from actors.model import Feed
from protocol.pass_plan import SMALL_PASSES
from protocol.prices import Prices
from protocol.trace import Span

PROMPTS = [[5, 6, 7], [9, 2], [1, 1, 3, 8], [4]]
NUM_TOKENS = 24
BAD = 15  # a token of none of their texts
ALL_AT_ONCE = priced(prefill=0.0)  # all begin to draft together


def shared_passes(simulation: Simulation, actor: Any = "target") -> list[Span]:
    return [span for span in simulation.spans(actor) if span.shares]


def beside(actor: str, model: ScriptedModel) -> tuple[ScriptedModel, ScriptedModel]:
    """A pair of models, one of which is this one."""
    return (model, ScriptedModel(agreeing(0.7))) if actor == "target" else (ScriptedModel(truthful), model)


async def texts(simulation: Simulation, **settings: Any) -> list[list[int]]:
    return await texts_of(simulation, PROMPTS, max_tokens=NUM_TOKENS, **settings)


EXPECTED = [continuation(prompt, NUM_TOKENS) for prompt in PROMPTS]


@sweep(
    "lookahead, agreement, undo, schedule",
    [
        (lookahead, agreement, (always, never)[(i + j) % 2], (i + j) % 3)
        for i, lookahead in enumerate([0, 1, 4, "auto"])
        for j, agreement in enumerate([0.0, 0.7, 1.0])
    ],
)
async def test_texts_that_share_passes_and_draft_steps_are_what_they_are_alone(
    lookahead: Any, agreement: float, undo: Any, schedule: int, autojump_clock: Any
) -> None:
    models = ScriptedModel(truthful, undo=undo), ScriptedModel(agreeing(agreement))
    async with simulated(*models, price=ALL_AT_ONCE, schedule=schedule) as simulation:
        assert await texts(simulation, lookahead=lookahead) == EXPECTED
        # With a drafter that is always right, "auto" needs two of them.
        assert len(shared_passes(simulation)) >= 2
        assert max(len(span.shares) for span in shared_passes(simulation)) >= 3
        shared = shared_passes(simulation, "draft")
        assert lookahead == 0 or max(len(span.shares) for span in shared) >= 3
        if lookahead not in (0, "auto"):  # where some rest, the others draft alone
            # Most tokens are drafted in steps that others share, until the first texts end.
            drafted = [span for span in simulation.spans("draft") if span.kind == "draft"]
            assert sum(len(span.shares) for span in shared) > len(drafted) / 2


@sweep("seed", range(20))
async def test_passes_in_a_row_give_each_text_what_it_has_alone(seed: int, autojump_clock: Any) -> None:
    dice = random.Random(seed)
    async with simulated(ScriptedModel(truthful), report_delay=lambda: dice.random() * 2.0) as simulation:

        async def read(index: int) -> None:
            prompt = [index + 1, 2, index % 3]
            expected = continuation(prompt, 60)
            settings: dict[str, Any] = {"max_tokens": dice.randint(1, 60)}
            if dice.random() < 0.5:
                settings["stop_tokens"] = [expected[dice.randint(5, 50)]]
                end = 1 + expected.index(settings["stop_tokens"][0])
                expected = expected[:end]
            await trio.sleep(dice.random() * 40.0)
            num_wanted = dice.choice([5, 30, 100])
            pause_s = dice.choice([0.0, 0.0, 0.3, 4.0])
            found: list[int] = []
            async with simulation.runtime.stream(prompt, lookahead=0, **settings) as stream:
                async for token in stream:
                    found.append(token.id)
                    await trio.sleep(pause_s)
                    if len(found) == num_wanted:
                        break
            assert found == expected[: min(settings["max_tokens"], num_wanted)]

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(read, index)
    longest = max(len(run) for run in simulation.target_worker.runs)
    assert longest > 5  # passes do go on without the event loop


@pytest.mark.parametrize("num_texts", [1, 2])
async def test_how_long_consumers_take_and_nobody_asks_is_no_part_of_what_plain_rounds_cost(num_texts, autojump_clock):
    async with simulated(ScriptedModel(truthful)) as simulation:
        for pause_s in (0.0, 1000.0):
            async with trio.open_nursery() as nursery:
                for prompt in PROMPTS[:num_texts]:
                    stream = simulation.runtime.stream(prompt, max_tokens=100)
                    nursery.start_soon(partial(read_into, [], stream, pause=pause_s))
            await trio.sleep(5e4)
        prices = simulation.runtime._target.prices
        prices.num_texts = num_texts
        assert prices.plain_round_s == 8.0


class StepCounter(trio.abc.Instrument):
    """Counts how often tasks were given a turn."""

    num_steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.num_steps += 1


@sweep("num_others", [0, 3])
async def test_a_hits_proposal_follows_its_verdict_before_any_task_runs(num_others: int, autojump_clock: Any) -> None:
    counter, at_verdict, gaps = StepCounter(), 0, []
    last_kind = ""

    def note(event: runtime.Event) -> None:
        nonlocal at_verdict, last_kind
        if event.kind == "verdict" and event.session == drafted:
            at_verdict = counter.num_steps
        if event.kind == "proposal" and last_kind == "hit":
            gaps.append(counter.num_steps - at_verdict)
        last_kind = event.kind

    drafted = num_others
    price = priced(prefill=0.0, draft=1.0, verify=8.0, decode=8.0)
    models = ScriptedModel(truthful), ScriptedModel(agreeing(1.0))
    async with simulated(*models, price=price, listener=note) as simulation, trio.open_nursery() as nursery:
        for prompt in PROMPTS[:num_others]:
            nursery.start_soon(partial(text_of, simulation, prompt, max_tokens=NUM_TOKENS, lookahead=0))
            await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(counter)
        await text_of(simulation, PROMPTS[3], max_tokens=NUM_TOKENS, lookahead=2)
        trio.lowlevel.remove_instrument(counter)
    assert len(gaps) > 2
    assert set(gaps) == {0}
    # So the others do not go on without it.
    passes = [span for span in simulation.spans("target") if span.kind in ("verify", "decode")]
    took_part = [drafted in {share.session for share in span.shares} | {span.session} for span in passes]
    own = [i for i, with_drafted in enumerate(took_part) if with_drafted]
    assert own == list(range(own[0], own[-1] + 1))


def refusing_one(script: Script, first: int, num_tokens: int) -> RefusingModel:
    """A model whose passes fail if they have a text with a certain first token, once it has `num_tokens`."""

    def refuses(feeds: Sequence[Any]) -> bool:
        texts = [feed.sequence.tokens for feed in feeds]
        return any(text[:1] == [first] and len(text) >= num_tokens for text in texts)

    return RefusingModel(script, refuses)


@sweep("actor", ["target", "draft"])
@sweep("num_tokens", [3, 8, 20])
async def test_a_session_whose_part_makes_a_pass_fail_ends_or_loses_its_drafter_alone(
    num_tokens: int, actor: str, autojump_clock: Any
) -> None:
    failing = refusing_one(truthful if actor == "target" else agreeing(0.7), PROMPTS[0][0], num_tokens)
    settings = {"max_tokens": NUM_TOKENS, "on_error": "return", **({} if actor == "target" else {"lookahead": 3})}
    async with simulated(*beside(actor, failing)) as simulation:
        first, *others = await simulation.runtime.generate_many(PROMPTS, **settings)
        if actor == "target":
            assert "MemoryError: no room for this one; the model itself works" in str(first)
        else:
            assert ids(first.tokens) == EXPECTED[0]
            # Tasks that begin together run in any order, so its id may be any.
            (session,) = {each.session for each in simulation.instants("open") if each.tokens == tuple(PROMPTS[0])}
            assert [instant.session for instant in simulation.instants("withdraw")] == [session]
            assert simulation.runtime.statistics().draft_failures == 1
        assert [ids(each.tokens) for each in others] == EXPECTED[1:]
        assert simulation.runtime.health().ok


@sweep("max_batch, acceptance", [(1, "match"), (1, "rejection"), (8, "rejection")])
def test_a_pass_that_fails_because_of_drafted_tokens_is_repeated_without_them(max_batch: int, acceptance: str) -> None:
    def wrong(history: Sequence[int]) -> list[float]:
        return [100.0 * (token == BAD) for token in range(VOCAB_SIZE)] if len(history) % 7 == 0 else truthful(history)

    def drafted_bad(feeds: Sequence[Feed]) -> bool:
        return any(BAD in feed.tokens[len(feed.tokens) - feed.num_logits + 1 :] for feed in feeds)

    async def main() -> None:
        target = RefusingModel(truthful, drafted_bad)
        # At this temperature the likeliest token has all of the probability.
        settings = {"temperature": 1e-6, "acceptance": acceptance, "seed": 1}
        async with simulated(target, ScriptedModel(wrong), max_batch=max_batch) as simulation:
            assert await texts(simulation, lookahead=3, **settings) == EXPECTED
            assert simulation.runtime.statistics().accepted > NUM_TOKENS
        assert target.failures

    assert not any(BAD in text for text in EXPECTED)
    run(main)


# A prompt alone has up to four tokens.
@sweep("lookahead, max_slots", [(0, 4), (4, 1), ("auto", 3)])
async def test_passes_beyond_memory_are_made_smaller_and_rarely_retried(max_slots, lookahead, autojump_clock):
    prompts, num_tokens = [*PROMPTS, [7, 7]], 100
    target = RefusingModel(truthful, lambda feeds: len(feeds) * max(len(feed.tokens) for feed in feeds) > max_slots)
    async with simulated(target, ScriptedModel(agreeing(0.9))) as simulation:
        found = await texts_of(simulation, prompts, max_tokens=num_tokens, lookahead=lookahead)
    assert found == [continuation(prompt, num_tokens) for prompt in prompts]
    assert 0 < len(target.failures) < num_tokens / 3


@sweep("most", [1, 3])
async def test_steps_beyond_memory_are_shared_by_fewer_and_rarely_retried(most: int, autojump_clock: Any) -> None:
    draft = RefusingModel(agreeing(0.7), lambda feeds: len(feeds) > most)
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        completions = await simulation.runtime.generate_many(PROMPTS, max_tokens=60, lookahead=3)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert [token.id for token in completion.tokens] == continuation(prompt, 60)
            assert completion.statistics.accepted > 12
    assert 0 < len(draft.failures) < 15


def test_after_one_drafter_has_failed_the_others_share_steps_at_once() -> None:
    prompts = [[index, index + 1] for index in range(12)]

    async def sessions_per_step(culprit: int | None) -> float:
        agrees = agreeing(0.7)
        draft = ScriptedModel(agrees) if culprit is None else refusing_one(agrees, culprit, 12)
        async with simulated(ScriptedModel(truthful), draft, price=ALL_AT_ONCE) as simulation:
            found = await texts_of(simulation, prompts, max_tokens=40, lookahead=2)
            assert found == [continuation(prompt, 40) for prompt in prompts]
            steps = [span for span in simulation.spans("draft") if span.kind == "draft"]
            return sum(len(span.sessions) for span in steps) / len(steps)

    assert run(sessions_per_step, 3) > 2 / 3 * run(sessions_per_step, None)


def test_after_one_stream_has_failed_the_others_share_passes_at_once() -> None:
    prompts = [[index, index + 1] for index in range(12)]

    async def rows_per_pass(culprit: int | None) -> float:
        target = ScriptedModel(truthful) if culprit is None else refusing_one(truthful, culprit, 12)
        async with simulated(target) as simulation:
            await simulation.runtime.generate_many(prompts, max_concurrent=12, max_tokens=60, on_error="return")
            return simulation.runtime.statistics().rows_per_pass or 0.0

    assert run(rows_per_pass, None) > 10
    assert run(rows_per_pass, 3) > 7


async def test_after_memory_was_short_for_a_while_all_streams_share_passes_again(autojump_clock: Any) -> None:
    num_passes = 0

    def short_for_a_while(feeds: Sequence[Feed]) -> bool:
        nonlocal num_passes
        num_passes += 1
        return len(feeds) > 2 and 10 < num_passes < 40

    async with simulated(RefusingModel(truthful, short_for_a_while)) as simulation:
        found = await texts_of(simulation, [[n] for n in range(4)], max_tokens=700, lookahead=0)
        assert found == [continuation([n], 700) for n in range(4)]
        widths = [len(span.shares) for span in simulation.spans("target") if span.shares]
    assert SMALL_PASSES // 2 < widths.count(2) < 2 * SMALL_PASSES
    assert widths[-100:] == [4] * 100


# --- what passes cost -----------------------------------------------------------------------------


@pytest.fixture
def priced_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """When the passes of the target whose prices are learnt began and ended."""
    found, observe = [], Prices.observe_verify_pass

    def note(prices: Prices, rows: int, began_s: float, ended_s: float) -> None:
        found.append((began_s, ended_s))
        observe(prices, rows, began_s, ended_s)

    monkeypatch.setattr(Prices, "observe_verify_pass", note)
    return found


class NotingPassesAhead(ScriptedModel):
    """A model that notes when passes are started ahead."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.started_ahead: list[float] = []

    def feed_ahead(self, sequences: Sequence[Any], tokens: mx.array) -> mx.array:
        self.started_ahead.append(trio.current_time())
        return super().feed_ahead(sequences, tokens)


async def test_passes_started_ahead_or_starting_one_have_no_price(priced_passes, autojump_clock):
    target = NotingPassesAhead(truthful)
    async with simulated(target, price=ALL_AT_ONCE) as simulation:
        await simulation.runtime.generate_many(PROMPTS, max_tokens=200)
        ends = [span.ended for span in simulation.spans("target", "verify")]
    assert len(priced_passes) >= 5
    assert len(target.started_ahead) > 150
    for began, ended in priced_passes:
        # A simulated job does its work at its end.
        before = max((end for end in ends if end <= began), default=began)
        assert not {before, ended} & set(target.started_ahead)


async def test_passes_after_a_text_came_or_left_have_no_price(priced_passes, autojump_clock):
    options = {"price": ALL_AT_ONCE, "defaults": {"lookahead": 1}}
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), **options) as simulation:
        async with trio.open_nursery() as nursery:
            for number, prompt in enumerate(PROMPTS):
                nursery.start_soon(partial(text_of, simulation, prompt, max_tokens=10 + 20 * (number % 2)))
        passes = [span for span in simulation.spans("target", "verify") if span.shares]
        finishes = [instant.at for instant in simulation.instants("finish")]
    sizes = [len(span.shares) for span in passes]
    assert sizes[0] == 4
    first_of_two = next(span for span in passes if span.began >= min(finishes))
    expected = [(span.began, span.ended) for span in passes[1:] if span is not first_of_two]
    assert [each for each in priced_passes if each[0] <= passes[-1].began] == expected
