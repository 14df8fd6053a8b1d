"""The text does not depend on the schedule: on durations of jobs, or on late and repeated messages.

The two actors work in simulated time on scripted models. The price of every job is drawn at random. So is the fate of
every message: it may be late, but never later than one that was sent after it; and copies of it may follow at once,
later, or after the end of its session.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from delays import COSTS, RestingPolicy, cycled_prices, tuples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scripted import (
    ScriptedModel,
    Simulation,
    WatchedSessions,
    agreeing,
    always,
    collect,
    continuation,
    fraction,
    ids,
    never,
    next_token,
    plain_text,
    priced,
    right_where,
    run,
    simulated,
    spike,
    text_of,
    truthful,
    within,
)
from sweeps import sweep

from actors.actor import Mailbox
from actors.drafters.drafter import MakePolicy, policy_by_settings
from protocol.lookahead_policy import Policy
from protocol.messages import Message, Proposal, Rested, Verdict
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.settings import Settings
from protocol.statistics import Statistics


@attrs.frozen
class Fate:
    """A message's delay in seconds, with those behind it; and copies of old ones that follow it: (age in messages,
    after).
    """

    late: float = 0.0
    echoes: tuple[tuple[int, float], ...] = ()


class Tampered:
    """The sending end of a mailbox that gives each message a fate."""

    def __init__(self, mailbox: Mailbox, fates: Sequence[Fate], nursery: trio.Nursery) -> None:
        self._mailbox = mailbox
        self._fates = itertools.cycle(fates)
        self._nursery = nursery
        self._sent: list[Message] = []
        self._send, receive = trio.open_memory_channel[Message](1000)
        nursery.start_soon(self._deliver, receive)

    def send_nowait(self, message: Message) -> None:
        self._send.send_nowait(message)

    async def _deliver(self, messages: trio.MemoryReceiveChannel[Message]) -> None:
        async for message in messages:
            fate = next(self._fates)
            await trio.sleep(fate.late)
            self._sent.append(message)
            self._mailbox.send_nowait(message)
            for age, after in fate.echoes:
                self._nursery.start_soon(self._echo, self._sent[-1 - age % len(self._sent)], after)

    async def _echo(self, message: Message, after: float) -> None:
        await trio.sleep(after)
        self._mailbox.send_nowait(message)


def resting_by_turns(turns: Sequence[bool]) -> MakePolicy:
    """Policies by the settings, with rests from a given sequence; with `auto`, the policies for that."""

    def make_policy(settings: Settings, prices: Prices) -> Policy:
        if settings.lookahead == "auto":
            return policy_by_settings(settings, prices)
        return RestingPolicy(settings.lookahead, turns=itertools.cycle(turns))

    return make_policy


ECHOES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([*COSTS, 1000.0])), max_size=3).map(tuple)
FATES = tuples(st.builds(Fate, late=st.sampled_from([0.0, 0.0, 0.5, 5.0]), echoes=ECHOES), 6)
UNDO = st.sampled_from([always, always, never, within(6), within(12)])
SCENARIOS = st.builds(
    SimpleNamespace,
    lookahead=st.sampled_from([1, 2, 3, 5, 8, "auto"]),
    rests=st.just((False,)) | tuples(st.booleans(), 6),
    right=tuples(st.booleans(), 8),
    max_tokens=st.integers(1, 24),
    stop_at=st.none() | st.integers(0, 20),
    num_sessions=st.integers(1, 3),
    prefill_step_size=st.integers(1, 5),
    target_costs=tuples(st.sampled_from(COSTS), 6),
    # With the last cost, the target stops waiting and continues alone.
    draft_costs=tuples(st.sampled_from([*COSTS, 500.0]), 6),
    target_undo=UNDO,
    draft_undo=UNDO,
    draft_fails_at=st.none() | st.integers(1, 30),
    to_target=FATES,
    to_draft=FATES,
    schedule=st.integers(0, 2**32),
)


def proposed_for(parts: WatchedSessions, session: int) -> list[int]:
    """The rounds of the proposals that the target received."""
    return [message.round for message in parts.received[session] if isinstance(message, Proposal)]


def num_not_followed(parts: WatchedSessions, session: int, last_round: int) -> int:
    """How many verdicts, some of which tell several rounds, the drafter dropped on its way to its last round."""
    told = [message for message in parts.received[session] if isinstance(message, Verdict | Rested)]
    round, num_followed = 0, 0
    for message in told:
        if round <= message.round < last_round:
            round, num_followed = message.round + 1, num_followed + 1
    assert round == last_round
    return len(told) - num_followed


def tamper(simulation: Simulation, to_target: Sequence[Fate], to_draft: Sequence[Fate], nursery: trio.Nursery) -> None:
    """Give fates to the messages between the two actors."""
    ours, theirs = simulation.runtime._target, simulation.runtime._draft
    ours.drafter.mailbox = Tampered(theirs.mailbox, to_draft, nursery)
    theirs._target = Tampered(ours.mailbox, to_target, nursery)


async def play(scenario: Any) -> int:
    """Play a scenario, and check its text and its counts. Returns the number of copies that were dropped."""
    prompts = [[n, *range(n + 3)] for n in range(scenario.num_sessions)]
    draft = ScriptedModel(
        right_where(scenario.right),
        undo=scenario.draft_undo,
        fails=None if scenario.draft_fails_at is None else {"feed": {scenario.draft_fails_at}},
    )
    num_stale = 0
    async with (
        trio.open_nursery() as nursery,
        simulated(
            ScriptedModel(truthful, undo=scenario.target_undo),
            draft,
            price=cycled_prices(scenario.target_costs),
            draft_price=cycled_prices(scenario.draft_costs),
            schedule=scenario.schedule,
            make_policy=resting_by_turns(scenario.rests),
        ) as simulation,
    ):
        tamper(simulation, scenario.to_target, scenario.to_draft, nursery)

        async def one(prompt: list[int]) -> None:
            nonlocal num_stale
            text = continuation(prompt, scenario.max_tokens)
            stop = [] if scenario.stop_at is None else continuation(prompt, scenario.stop_at + 1)[-1:]
            sizes = {"max_tokens": scenario.max_tokens, "prefill_step_size": scenario.prefill_step_size}
            stream = simulation.runtime.stream(prompt, stop_tokens=stop, lookahead=scenario.lookahead, **sizes)
            session = stream.session
            assert await collect(stream) == continuation(prompt, scenario.max_tokens, stop)
            # Until the latest copies have arrived, and found no session.
            await trio.sleep(10_000)
            ours, theirs = (w.sessions.all_states[session] for w in (simulation.target_worker, simulation.draft_worker))
            assert ours.state.committed == prompt + text[: ours.state.num_generated]
            assert ours.state.phase is SessionPhase.CLOSED
            assert theirs.state.committed == ours.state.committed[: len(theirs.state.committed)]
            proposals = proposed_for(simulation.target_worker.sessions, session)
            num_dropped_verdicts = num_not_followed(simulation.draft_worker.sessions, session, theirs.state.round)
            # Each round has a proposal or is a resting round; this holds as long as there is a drafter.
            statistics = stream.statistics()
            num_proposed_for = len(set(proposals))
            not_proposed_for = set(range(max(proposals, default=0))) - set(proposals)
            assert len(not_proposed_for) <= statistics.resting_rounds
            may_rest = scenario.lookahead == "auto" or any(scenario.rests) or statistics.draft_timeouts > 0
            assert statistics.resting_rounds == 0 or may_rest
            # The last verdict may arrive after the consumer has the whole text and has hung up.
            assert theirs.state.round <= num_proposed_for + statistics.resting_rounds
            assert max(proposals, default=0) <= theirs.state.round
            dropped = len(proposals) - num_proposed_for + num_dropped_verdicts
            # The first proposal of a round may arrive after the target has stopped waiting for it.
            assert statistics.stale_proposals <= dropped + statistics.draft_timeouts
            # A drafter that has failed does not look at what is still on the way to it.
            assert dropped <= statistics.stale_proposals or statistics.draft_failures > 0
            num_stale += statistics.stale_proposals

        async with trio.open_nursery() as consumers:
            for prompt in prompts:
                consumers.start_soon(one, prompt)
        assert simulation.runtime.num_streams == 0
        nursery.cancel_scope.cancel()
    return num_stale


@pytest.mark.slow
@given(SCENARIOS)
@settings(max_examples=80)
def test_the_text_does_not_depend_on_timing_or_repeated_messages(scenario: Any) -> None:
    event(f"stale messages: {min(run(play, scenario), 10)}")


@pytest.mark.parametrize("lookahead", [1, 3, "auto"])
async def test_every_copy_of_a_message_is_dropped_and_counted(lookahead: Any, autojump_clock: Any) -> None:
    # Each message arrives three times, and the one before it once more; the last ones after the end of the session.
    fates = [Fate(echoes=((0, 0.0), (0, 1.0), (1, 2.0)))]
    async with trio.open_nursery() as nursery, simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.6))) as sim:
        tamper(sim, fates, fates, nursery)
        stream = sim.runtime.stream([1, 2, 3], max_tokens=30, lookahead=lookahead)
        assert await collect(stream) == continuation([1, 2, 3], 30)
        await trio.sleep(100)
        statistics = stream.statistics()
        # Three copies of each proposal and each verdict, except those after the end of the session.
        assert 6 * (statistics.rounds - 1) <= statistics.stale_proposals <= 6 * statistics.rounds
        state = [w.sessions.all_states[0].state for w in (sim.target_worker, sim.draft_worker)]
        assert statistics.stale_proposals == sum(each.num_stale for each in state)
        # A dropped proposal is not verified: no round was verified twice.
        assert len(sim.spans("target", "verify")) == statistics.rounds
        nursery.cancel_scope.cancel()


@sweep("schedule", range(6))
async def test_with_everything_free_and_at_once_the_text_is_the_same(schedule: int, autojump_clock: Any) -> None:
    price = priced(prefill=0.0, draft=0.0, verify=0.0, decode=0.0)
    target, draft = ScriptedModel(truthful), ScriptedModel(agreeing(0.7))
    async with simulated(target, draft, price=price, schedule=schedule) as simulation:
        assert await text_of(simulation, [4, 4], max_tokens=40, lookahead=3) == continuation([4, 4], 40)
        assert trio.current_time() == 0


# --- without a draft model ------------------------------------------------------------------------


def repeating(history: Sequence[int]) -> Sequence[float]:
    """Five words again and again, with an occasional other one."""
    return spike(next_token(history) if fraction("slip", history) < 0.15 else len(history) % 5)


@pytest.mark.slow
@given(
    st.builds(
        SimpleNamespace,
        text=st.sampled_from([repeating, truthful]),
        asked=st.fixed_dictionaries(
            {"lookahead": st.sampled_from([1, 3, 8, "auto", "auto"]), "max_tokens": st.integers(1, 60)}
        ),
        costs=tuples(st.sampled_from(COSTS), 6),
        undo=UNDO,
        to_target=FATES,
        to_draft=FATES,
        schedule=st.integers(0, 2**32),
    )
)
@settings(max_examples=60)
def test_lookup_gives_the_same_text_whatever_comes_twice_or_late(scenario: Any) -> None:
    prompt = [0, 1, 2, 3, 4] * 2

    async def main() -> Statistics:
        target = ScriptedModel(scenario.text, undo=scenario.undo)
        options = {"price": cycled_prices(scenario.costs), "schedule": scenario.schedule}
        async with trio.open_nursery() as nursery, simulated(target, "ngram", **options) as simulation:
            tamper(simulation, scenario.to_target, scenario.to_draft, nursery)
            completion = await simulation.runtime.generate(prompt, **scenario.asked)
            assert ids(completion.tokens) == plain_text(scenario.text, prompt, scenario.asked["max_tokens"])
            await trio.sleep(10_000)
            nursery.cancel_scope.cancel()
        return completion.statistics

    statistics = run(main)
    event(f"proposed: {statistics.proposed > 0}, rested: {statistics.resting_rounds > 0}")
