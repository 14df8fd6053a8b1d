"""The first measurement of the prices: it finds the simulator's prices, and leaves nothing behind."""

import itertools
import threading
from typing import Any

import mlx.core as mx
import pytest
import trio
from scripted import ScriptedModel, run, truthful
from simulated_worker import Contention, SimulatedWorker
from sweeps import sweep

from actors.warm_up import DRAFT_WIDTHS, MIN_CONTEXT_LENGTH, TARGET_WIDTHS, WIDE_WIDTHS, warm_up
from actors.workers.worker import Job, JobError
from protocol.prices import Prices
from protocol.trace import Event, Span

pytestmark = pytest.mark.usefixtures("usual_warm_up")


async def warmed_up(
    target: ScriptedModel,
    draft: ScriptedModel,
    *,
    base: float = 1.0,
    slope: float = 0.25,
    draft_step: float = 0.125,
    kappa: float = 0.0,
    slow: int | None = None,
    until: float = 1e6,
    heard: list[Event] | None = None,
) -> Prices:
    """The measured prices of two scripted models, on workers with these prices; cancelled at `until`, if given.

    Job `slow` of the target takes a thousand times as long.
    """
    nth = itertools.count(1)

    def verify_price(job: Job[Any]) -> float:
        factor = 1000.0 if next(nth) == slow else 1.0
        return factor * (base + slope * (job.num_tokens - 1)) if job.num_tokens else 0.0

    def draft_price(job: Job[Any]) -> float:
        return draft_step * (1 + 0.5 * (job.num_tokens - 1)) if job.num_tokens else 0.0

    device, prices, events = Contention(kappa), Prices(), [] if heard is None else heard
    prices_of = (("target", verify_price), ("draft", draft_price))
    workers = [SimulatedWorker(role, price, events.append, device) for role, price in prices_of]
    with trio.move_on_at(until):
        await warm_up((target, workers[0]), (draft, workers[1]), prices)
    return prices


def models(**of_draft: Any) -> tuple[ScriptedModel, ScriptedModel]:
    return ScriptedModel(truthful), ScriptedModel(truthful, **of_draft)


def nothing_is_open(*of: ScriptedModel) -> bool:
    are_closed = all(sequence.is_closed for model in of for sequence in model.sequences)
    return are_closed and not any(model.misuses for model in of)


@sweep(
    "base, slope, cost_ratio, kappa",
    [
        (base, slope, (0.03125, 0.25, 1.5)[(i + j) % 3], (0.0, 0.5, 1.0)[(i + 2 * j) % 3])
        for i, base in enumerate([0.001, 1.0, 64.0])
        for j, slope in enumerate([0.0, 0.0625, 0.5])
    ],
)
def test_it_finds_what_everything_costs(base: float, slope: float, cost_ratio: float, kappa: float) -> None:
    step = base * cost_ratio
    prices = run(lambda: warmed_up(*models(), base=base, slope=base * slope, draft_step=step, kappa=kappa))
    assert prices.is_known
    # How much of a pass beside the drafter the drafter costs is known from few of them.
    share = 0.01 if kappa == 0 else 0.15
    for width in (1, 2, 3, 4, 8):
        assert prices.verify(width) == pytest.approx(base * (1 + slope * (width - 1)), rel=share)
    # The prior still has a small weight.
    assert prices.draft_s(1, beside_target=False) == pytest.approx(step, rel=0.01)
    assert prices.draft_s(4, beside_target=False) == pytest.approx(2.5 * step, rel=0.01)
    assert prices.plain_decode_s.value == pytest.approx(base, rel=1e-6)
    # A job that shares the device takes its own time and as much of the other's as they overlap.
    assert prices.draft_slowdown.value == pytest.approx(1 + kappa, rel=0.25)
    assert prices.contention == pytest.approx(kappa, abs=0.25)


def test_prices_that_cannot_be_are_measured_again() -> None:
    """Whichever job of the target takes a thousand times as long, because the machine does something else."""
    whole: list[Event] = []
    run(lambda: warmed_up(*models(), heard=whole))
    num_jobs = sum(isinstance(event, Span) and event.actor == "target" for event in whole)
    num_measured_again = 0
    for slow in range(1, num_jobs + 1):
        heard: list[Event] = []
        prices = run(lambda slow=slow, heard=heard: warmed_up(*models(), slow=slow, heard=heard))
        num_measured_again += len(heard) > 1.5 * len(whole)
        assert prices.plain_decode_s.value == pytest.approx(1.0, rel=1e-6)
        for width, seconds in prices.verify.table():
            assert 0.5 < seconds / (1.0 + 0.25 * (width - 1)) < 4.0
    assert num_measured_again > 0


@sweep(
    ("slope", "context_length", "widest"),
    [(0.0, None, 64), (0.25, None, 32), (0.33, None, 16), (1.0, None, 8), (0.0, 128, 16)],
)
def test_wider_passes_are_timed_while_they_are_cheap_and_the_context_lasts(slope, context_length, widest):
    pair = ScriptedModel(truthful, context_length=context_length), ScriptedModel(truthful)
    prices = run(lambda: warmed_up(*pair, slope=slope))
    assert [rows for rows, _ in prices.verify.table()] == [w for w in (*TARGET_WIDTHS, *WIDE_WIDTHS) if w <= widest]
    assert prices.verify(widest) == pytest.approx(1.0 + slope * (widest - 1), rel=0.02)
    assert nothing_is_open(*pair)


@sweep(("base", "num_passes"), [(0.01, 4), (1.0, 3)])
def test_passes_that_people_would_wait_for_are_not_timed_twice(base: float, num_passes: int) -> None:
    """One is not timed, the next are, and the last of each width runs beside the drafter."""
    heard: list[Event] = []
    run(lambda: warmed_up(*models(), base=base, slope=base, heard=heard))
    widths = [event.num_tokens for event in heard if isinstance(event, Span) and event.actor == "target"]
    assert [widths.count(width) for width in (2, 4)] == [num_passes, num_passes]


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
def test_a_drafter_that_costs_the_target_more_is_found_to_do_so(kappa: float) -> None:
    less, more = (run(lambda k=k: warmed_up(*models(), kappa=k)).contention for k in (kappa / 2, kappa))
    assert less <= more
    assert kappa == 0 or less < more


def test_it_is_counted_for_no_session_and_leaves_no_sequence_open() -> None:
    heard, pair = list[Event](), models()
    run(lambda: warmed_up(*pair, heard=heard))
    assert {(span.kind, span.session) for span in heard if isinstance(span, Span)} == {("warm-up", None)}
    assert all(model.sequences for model in pair)
    assert nothing_is_open(*pair)


@sweep("call", ["open", "feed", "check"])
@sweep("who", [0, 1])
def test_a_model_that_fails_at_any_call_is_an_error_and_leaves_nothing_open(who: int, call: str) -> None:
    pair = models()
    run(lambda: warmed_up(*pair))
    num_calls = pair[who].num_calls[call]
    # Whether there is another draft step beside the target's last pass depends on trio's random order.
    for n in range(1, num_calls + 1 - (who == 1 and call == "feed"), 2):
        failing = [ScriptedModel(truthful), ScriptedModel(truthful)]
        failing[who] = ScriptedModel(truthful, fails={call: {n}})
        with pytest.raises(JobError, match=f"{call} {n} failed"):
            run(lambda failing=failing: warmed_up(*failing))
        assert nothing_is_open(*failing)
    assert num_calls > 0 or (who, call) == (1, "check")


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_a_cancellation_at_any_time_leaves_nothing_open(kappa: float) -> None:
    async def took() -> float:
        await warmed_up(*models(), kappa=kappa)
        return trio.current_time()

    whole = run(took)
    for i in range(24):
        pair = models()

        async def cancelled(pair: Any = pair, until: float = whole * i / 24) -> float:
            await warmed_up(*pair, kappa=kappa, until=until)
            return trio.current_time() - until

        # It waits for the running passes, and for no other. The widest is over 32 tokens.
        assert run(cancelled) <= 2 * (1.0 + 31 * 0.25)
        assert nothing_is_open(*pair)


@pytest.mark.parametrize("who", [0, 1])
def test_a_model_with_hardly_any_context_is_left_alone(who: int) -> None:
    pair = [ScriptedModel(truthful), ScriptedModel(truthful)]
    pair[who] = ScriptedModel(truthful, context_length=MIN_CONTEXT_LENGTH - 1)
    assert not run(lambda: warmed_up(*pair)).is_known
    assert pair[0].sequences == pair[1].sequences == []
    # With as much as it takes, the passes stay within it: the scripted lines would say.
    pair[who] = ScriptedModel(truthful, context_length=MIN_CONTEXT_LENGTH)
    assert run(lambda: warmed_up(*pair)).is_known
    assert nothing_is_open(*pair)


def test_the_kernels_of_sampling_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gumbel, drawn = mx.random.gumbel, []

    def count(*args: Any, **named: Any) -> mx.array:
        drawn.append(threading.current_thread())
        return gumbel(*args, **named)

    monkeypatch.setattr(mx.random, "gumbel", count)
    run(lambda: warmed_up(*models()))
    assert len(drawn) >= len(TARGET_WIDTHS) + len(DRAFT_WIDTHS)
