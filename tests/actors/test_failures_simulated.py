"""Failures stay where they belong: a drafter's costs speed and no text, a target's ends every stream with its error."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
from scripted import (
    ScriptedFailure,
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    continuation,
    ids,
    priced,
    read_into,
    run,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep

import runtime
from protocol.errors import ProtocolError, RewindError, RuntimeBrokenError, RuntimeClosedError, StreamFailedError
from protocol.lookahead_policy import ChainPolicy
from protocol.messages import Message, Proposal, Verdict

PROMPT = [5, 6, 7, 8, 9]
TEXT = continuation(PROMPT, 12)
SETTINGS: dict[str, Any] = {"max_tokens": 12, "prefill_step_size": 2}
# With the quick drafter, verdicts arrive while it rests; with the slow one, while it drafts.
PRICES = {"quick drafter": priced(draft=0.5, verify=8.0), "slow drafter": priced(draft=8.0, verify=3.0)}


def from_now_on(n: int) -> range:
    """The n-th call, and all after it."""
    return range(n, 10**6)


def drafter(**changes: Any) -> ScriptedModel:
    return ScriptedModel(agreeing(0.6), **changes)


async def num_feeds(actor: str, price: Any, lookahead: Any, num_tokens: int = 12) -> int:
    """How often a model is fed in a generation without failures."""
    target, draft = ScriptedModel(truthful), drafter()
    async with simulated(target, draft, price=price) as simulation:
        settings = {**SETTINGS, "max_tokens": num_tokens, "lookahead": lookahead}
        assert await text_of(simulation, PROMPT, **settings) == continuation(PROMPT, num_tokens)
        await trio.sleep(100)
    return (draft if actor == "draft" else target).num_calls["feed"]


# --- the drafter ----------------------------------------------------------------------------------


@sweep(
    "lookahead, price",
    [(1, "quick drafter"), (5, "slow drafter"), pytest.param("auto", "quick drafter", marks=pytest.mark.slow)],
)
def test_a_drafter_that_fails_at_any_feed_costs_no_token(lookahead: Any, price: str) -> None:
    # A slow drafter rests once its price is known, and is then fed rarely.
    num_tokens = 48 if lookahead == "auto" else 12
    settings = {**SETTINGS, "max_tokens": num_tokens, "lookahead": lookahead}

    async def fail_at(n: int) -> None:
        draft = drafter(fails={"feed": {n}})
        async with simulated(ScriptedModel(truthful), draft, price=PRICES[price], schedule=n) as simulation:
            completion = await simulation.runtime.generate(PROMPT, **settings)
            assert ids(completion.tokens) == continuation(PROMPT, num_tokens)
            assert completion.finish_reason == "length"
            assert completion.statistics.draft_failures == 1
            assert len(simulation.instants("withdraw")) == 1
            assert simulation.runtime.health().ok
            # The next generation has a drafter again.
            again = await simulation.runtime.generate([1, 2], max_tokens=12, lookahead=lookahead)
            assert ids(again.tokens) == continuation([1, 2], 12)
            assert again.statistics.draft_failures == 0
            # With "auto", the rules decide whether that drafter is used.
            if lookahead != "auto":
                assert again.statistics.accepted > 0
            assert simulation.runtime.statistics().draft_failures == 1

    total = run(num_feeds, "draft", PRICES[price], lookahead, num_tokens)
    assert total > (6 if lookahead == "auto" else 8)
    # The last drafts may still run when the text is over; then nobody sees their failure. "auto" feeds the drafter
    # about a hundred times: test each of the first calls, during which it measures the models, and some of the others.
    failing = range(1, total - 3)
    for n in failing if lookahead != "auto" else [*failing[:8], *failing[12::20]]:
        run(fail_at, n)


@sweep("fails", [{"open": {1}}, {"check": {1}}, {"close": {1}}, {"feed": range(1, 1000)}])
async def test_a_drafter_that_fails_outside_of_feeds_or_always_costs_no_token(fails: Any, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter(fails=fails)) as simulation:
        for _ in range(3):
            assert await text_of(simulation, PROMPT, **SETTINGS) == TEXT
        assert simulation.runtime.statistics().draft_failures == 3 or "feed" not in fails


async def test_a_failing_drafter_is_warned_of_once_with_its_error(autojump_clock: Any, caplog: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter(fails={"feed": {4}})) as simulation:
        assert await text_of(simulation, PROMPT, **SETTINGS) == TEXT
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "feed 4 failed" in record.getMessage()


async def test_a_drafter_that_fails_for_one_session_goes_on_for_the_others(autojump_clock: Any) -> None:
    prompts, num_failures = [[i, i, i] for i in range(3)], set()
    for n in range(1, 40, 4):
        async with simulated(ScriptedModel(truthful), drafter(fails={"feed": {n}})) as simulation:
            completions = await simulation.runtime.generate_many(prompts, max_tokens=30, lookahead=2)
        assert [ids(each.tokens) for each in completions] == [continuation(prompt, 30) for prompt in prompts]
        # A step that several share is repeated for each of them alone, and succeeds then.
        failures = sorted(each.statistics.draft_failures for each in completions)
        assert failures in ([0, 0, 0], [0, 0, 1])
        num_failures.add(sum(failures))
    assert num_failures == {0, 1}


# --- the target -----------------------------------------------------------------------------------


FAILING_TARGETS = [
    *((price, lookahead, 1, True) for price in PRICES for lookahead in (0, 2, "auto")),
    *(("quick drafter", 2, 3, with_drafter) for with_drafter in (True, False)),
]


@sweep("price, lookahead, num_streams, with_drafter", FAILING_TARGETS)
def test_a_failing_target_ends_every_stream_after_what_was_committed(price, lookahead, num_streams, with_drafter):
    settings = {**SETTINGS, "lookahead": lookahead, "max_tokens": 12 if num_streams == 1 else 60}

    async def fail_at(n: int) -> None:
        target = ScriptedModel(truthful, fails={"feed": from_now_on(n)})
        # A pass with drafted tokens is repeated without them.
        last = n if lookahead == 0 else n + 1
        error = rf"feed ({n}|{last}) failed" if num_streams == 1 else r"feed \d+ failed"

        async def one(simulation: Simulation, session: int) -> None:
            prompt, got = PROMPT + [session] * session, list[int]()
            stream = simulation.runtime.stream(prompt, **settings)
            with pytest.raises(RuntimeBrokenError, match=error) as broken:
                await read_into(got, stream, pause=100.0 if session == 2 else 0.0)
            assert isinstance(broken.value.__cause__, ScriptedFailure)
            assert prompt + got == simulation.target_worker.sessions.all_states[session].state.committed
            assert got == continuation(prompt, len(got))
            assert not simulation.runtime.health().target
            # The error is the same for this stream and for new ones.
            for attempt in (partial(anext, stream), partial(text_of, simulation, prompt)):
                with pytest.raises(RuntimeBrokenError) as again:
                    await attempt()
                assert isinstance(again.value.__cause__, ScriptedFailure)

        models = target, drafter() if with_drafter else None
        async with simulated(*models, price=PRICES[price], schedule=n) as simulation, trio.open_nursery() as nursery:
            for session in range(num_streams):
                nursery.start_soon(one, simulation, session)
                await trio.testing.wait_all_tasks_blocked()

    num_calls = run(num_feeds, "target", PRICES[price], lookahead)
    for n in range(1, num_calls + 1, 2) if num_streams == 1 else range(1, 30, 4):
        run(fail_at, n)


@pytest.mark.parametrize("lookahead", [0, 2, pytest.param("auto", marks=pytest.mark.slow)])
def test_a_failing_feed_ends_at_most_its_own_stream(lookahead: Any) -> None:
    async def fail_at(n: int) -> None:
        target = ScriptedModel(truthful, fails={"feed": {n}})
        async with simulated(target, drafter(), schedule=n) as simulation:
            failures: list[StreamFailedError] = []
            lengths: list[int] = []

            async def one(prompt: list[int]) -> None:
                got: list[int] = []
                try:
                    await read_into(got, simulation.runtime.stream(prompt, max_tokens=30, lookahead=lookahead))
                except StreamFailedError as failure:
                    failures.append(failure)
                else:
                    lengths.append(len(got))
                assert got == continuation(prompt, len(got))

            async with trio.open_nursery() as nursery:
                for i in range(3):
                    nursery.start_soon(one, [i, i, i])
                    await trio.sleep(10.0)  # in which the first text decodes alone
            # A pass that several share is repeated for each of them alone, and succeeds then.
            assert len(failures) <= 1
            assert lengths == [30] * (3 - len(failures))
            for failure in failures:
                assert type(failure.__cause__) is ScriptedFailure
                assert f"feed {n} failed" in str(failure)
            num_failures.append(len(failures))
            assert simulation.runtime.health().ok
            # The next generation succeeds as well.
            assert await text_of(simulation, PROMPT, **SETTINGS) == TEXT

    num_failures: list[int] = []
    for n in range(1, 30, 3):
        run(fail_at, n)
    # A feed without drafts is nobody else's as long as there is one text.
    assert set(num_failures) == {0, 1}


@pytest.mark.parametrize("call", ["open", "close"])
async def test_anything_else_that_fails_once_ends_its_stream_and_no_other(call: str, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful, fails={call: {1}}), drafter()) as simulation:
        first = simulation.runtime.stream(PROMPT, **SETTINGS)
        other = simulation.runtime.stream([1, 2, 3], max_tokens=100)
        if call == "open":
            with pytest.raises(StreamFailedError, match="open 1 failed"):
                await collect(first)
        else:  # by then the text is complete
            assert await collect(first) == TEXT
        assert await collect(other) == continuation([1, 2, 3], 100)


class Unforeseen(Exception):
    """An exception that no code here knows."""


def fail(*_: Any) -> None:
    raise Unforeseen("by chance")


@pytest.mark.parametrize("what", ["find_stop", "propose"])
async def test_an_error_in_a_sessions_own_decisions_ends_that_session_and_no_other(what, autojump_clock):
    async with simulated(ScriptedModel(truthful), drafter()) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=30, lookahead=2)
        other = simulation.runtime.stream([1, 2, 3], max_tokens=30, lookahead=2)
        if what == "find_stop":
            simulation.runtime._sessions.by_id[0].find_stop = fail
        else:
            simulation.target_worker.sessions[0].state.propose = fail
        with pytest.raises(StreamFailedError, match="Unforeseen: by chance"):
            await collect(stream)
        assert await collect(other) == continuation([1, 2, 3], 30)


async def test_a_session_that_failed_is_not_drafted_for_before_anybody_reads_that(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter()) as simulation:
        unread = simulation.runtime.stream(PROMPT, max_tokens=30, lookahead=2)
        assert 0 in simulation.runtime._draft._sessions
        simulation.target_worker.sessions[0].state.propose = fail
        await trio.sleep(1000.0)  # simulated
        assert 0 not in simulation.runtime._draft._sessions
        with pytest.raises(StreamFailedError, match="Unforeseen: by chance"):
            await collect(unread)


# Below a temperature, tokens are drawn, and those that it has drawn keep a drafter in its session.
@sweep(
    "what, at, is_for_good, settings",
    [
        (what, at, *((False, {}), (True, {"temperature": 0.1, "acceptance": "rejection"}))[(i + j) % 2])
        for i, what in enumerate(["proposal", "expansion", "draft_budget"])
        for j, at in enumerate([1, 4])
    ],
)
async def test_an_error_in_a_drafters_decisions_ends_the_drafting_of_that_session_alone(
    what: str, at: int, is_for_good: bool, settings: dict[str, Any], autojump_clock: Any, caplog: Any
) -> None:
    num_calls = 0
    policies: list[Any] = []

    class Erring:
        """A fixed lookahead whose n-th decision fails, or all from that one on, in the first session only."""

        def __init__(self) -> None:
            self._chain = ChainPolicy(2)
            self._is_first = not policies
            policies.append(self)

        def __getattr__(self, name: str) -> Any:
            nonlocal num_calls
            if name == what and self._is_first:
                num_calls += 1
                if num_calls == at or (is_for_good and num_calls > at):
                    raise Unforeseen(name)
            return getattr(self._chain, name)

    prompts = [[i, i, i] for i in range(2)]
    async with simulated(ScriptedModel(truthful), drafter(), make_policy=lambda *_: Erring()) as simulation:
        got = await simulation.runtime.generate_many(prompts, max_tokens=30, lookahead=2, **settings)
    assert [ids(each.tokens) for each in got] == [continuation(prompt, 30) for prompt in prompts]
    assert [each.statistics.draft_failures for each in got] == [1, 0]
    assert got[1].statistics.accepted > 0
    assert num_calls >= at


@pytest.mark.parametrize("call", ["open", "close"])
async def test_a_target_that_fails_in_anything_else_for_good_breaks_the_runtime(call: str, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful, fails={call: from_now_on(1)}), drafter()) as simulation:
        other = simulation.runtime.stream([1, 2, 3], max_tokens=100)
        first = simulation.runtime.stream(PROMPT, **SETTINGS)
        await trio.sleep(20)
        await first.aclose()
        with pytest.raises(RuntimeBrokenError) as broken:
            await collect(other)
        assert isinstance(broken.value.__cause__, ScriptedFailure)


async def test_a_target_whose_cache_lost_count_ends_that_session_and_no_other(autojump_clock: Any) -> None:
    for lookahead in (0, 2):
        async with simulated(ScriptedModel(truthful, fails={"check": {5}}), drafter()) as simulation:
            stream = simulation.runtime.stream(PROMPT, **SETTINGS, lookahead=lookahead)
            got: list[int] = []
            with pytest.raises(RewindError, match="check 5 failed"):
                await read_into(got, stream)
            assert got == TEXT[: len(got)]
            assert len(got) >= 2
            with pytest.raises(RewindError):
                await anext(stream)
            assert await text_of(simulation, [1, 2], max_tokens=12) == continuation([1, 2], 12)


# --- health ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "alive"), [("model", True), ("ngram", True), ("none", None)])
async def test_a_runtime_is_healthy_until_it_is_left(draft: str, alive: bool | None, autojump_clock: Any) -> None:
    drafters = {"model": drafter(), "ngram": "ngram", "none": None}
    async with simulated(ScriptedModel(truthful), drafters[draft]) as simulation:
        for _ in range(2):
            health = simulation.runtime.health()
            assert health == runtime.Health(target=True, draft=alive)
            assert health.ok
            await text_of(simulation, PROMPT, **SETTINGS)
    health = simulation.runtime.health()
    assert health == runtime.Health(target=False, draft=None if alive is None else False)
    assert not health.ok


async def test_a_runtime_that_is_cancelled_from_further_out_is_no_longer_healthy(autojump_clock: Any) -> None:
    with trio.move_on_after(10):
        async with simulated(ScriptedModel(truthful), drafter()) as simulation:
            with trio.CancelScope(shield=True):
                await trio.sleep(20)
            assert simulation.runtime.health() == runtime.Health(target=False, draft=False)


# --- misplaced messages ---------------------------------------------------------------------------


class Forging:
    """The sending end of a mailbox that inserts a forged message behind the n-th."""

    def __init__(self, mailbox: Any, n: int, forged: Message) -> None:
        self._mailbox = mailbox
        self._messages_left = n
        self._forged = forged

    def send_nowait(self, message: Message) -> None:
        self._mailbox.send_nowait(message)
        self._messages_left -= 1
        if self._messages_left == 0:
            self._mailbox.send_nowait(self._forged)


FORGED: Sequence[Message] = [
    Verdict(0, 50, 60, 0, 1),
    Verdict(0, 1, 60, 0, 1),
    Proposal(0, 50, 60, (1, 2)),
    Proposal(0, 1, 60, (1, 2)),
]


@sweep("to, forged", [*(("draft", each) for each in FORGED[:3]), *(("target", each) for each in FORGED[1:])])
async def test_a_misplaced_message_ends_at_most_its_own_session(to: str, forged: Message, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), drafter()) as simulation:
        target, draft = simulation.runtime._target, simulation.runtime._draft
        if to == "target":
            draft._target = Forging(target.mailbox, 1, forged)
        else:
            target.drafter.mailbox = Forging(draft.mailbox, 1, forged)
        stream = simulation.runtime.stream(PROMPT, max_tokens=60, lookahead=2)
        other = simulation.runtime.stream([1, 2], max_tokens=30, lookahead=2)
        got: list[int] = []
        if to == "target":
            with pytest.raises(ProtocolError):
                await read_into(got, stream)
        else:  # a drafter in a wrong state is dropped
            await read_into(got, stream)
            assert len(got) == 60
            assert stream.statistics().draft_failures == 1
        assert got == continuation(PROMPT, len(got))
        assert await collect(other) == continuation([1, 2], 30)
        assert await text_of(simulation, PROMPT, **SETTINGS) == TEXT


# --- consumers ------------------------------------------------------------------------------------


async def test_the_runtime_of_a_task_is_the_innermost_that_is_open(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as outer:
        assert await collect(runtime.stream(PROMPT, **SETTINGS)) == TEXT
        async with simulated(ScriptedModel(truthful)) as inner:
            assert await collect(runtime.stream(PROMPT, **SETTINGS)) == TEXT
        assert await collect(runtime.stream(PROMPT, **SETTINGS)) == TEXT
    assert len(outer.target.sequences) == 2
    assert len(inner.target.sequences) == 1


# --- the user's own errors ------------------------------------------------------------------------


class BodyError(Exception):
    pass


@sweep(
    "error", [BodyError(), KeyboardInterrupt(), SystemExit(), GeneratorExit(), ExceptionGroup("a group", [BodyError()])]
)
async def test_an_error_in_the_body_comes_out_as_it_is(error: BaseException, autojump_clock: Any) -> None:
    target, draft = ScriptedModel(truthful), drafter()
    streams = []

    async def body() -> None:
        async with simulated(target, draft) as simulation:
            streams.append(simulation.runtime.stream(PROMPT, max_tokens=100))
            await anext(streams[0])
            raise error

    with pytest.raises(type(error)) as raised:
        await body()
    assert raised.value is error
    assert_closed(target, draft)
    with pytest.raises(RuntimeClosedError):
        await collect(streams[0])


@pytest.mark.parametrize("delay", [1.0, 13.0, 30.0])
async def test_an_error_raised_in_the_body_while_it_is_being_cancelled_is_not_lost(delay, autojump_clock):
    target, draft = ScriptedModel(truthful), drafter()

    async def body(fails: bool) -> None:
        async with simulated(target, draft) as simulation, simulation.runtime.stream(PROMPT, max_tokens=100):
            try:
                await trio.sleep_forever()
            finally:
                if fails:
                    raise BodyError

    with trio.move_on_after(delay) as scope:
        await body(False)
    assert scope.cancelled_caught
    # The error may be in a group, as trio's nurseries raise them, but it must come out.
    with pytest.raises((BodyError, ExceptionGroup)), trio.move_on_after(delay):
        await body(True)
    assert_closed(target, draft)


def assert_closed(*models: ScriptedModel) -> None:
    for model in models:
        assert model.sequences != []
        assert all(sequence.is_closed for sequence in model.sequences)
