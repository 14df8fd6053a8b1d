"""Cancellation on real threads and real models, at every point where it can strike and in every way.

The trace, called in trio's thread at each event, and a model that blocks in a forward pass determine the moment.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest import mock

import mlx.nn as nn
import pytest
import trio
import trio.testing
from blocking_models import BlockingModel
from completions import ids
from greedy_pair import LONG, PROMPT, drafter, target, the_next_text_is_right
from models import Failing, greedy, llama
from our_threads import outrider_threads
from sweeps import sweep
from ways_to_cancel import Way, by_aclose, by_break, by_dropping_unread, by_leaving, by_scope, read

import runtime
from protocol.trace import Event, Instant, Span

pytestmark = pytest.mark.usefixtures("spare_buffers")

EVENTS = [
    *((kind, actor, "open") for kind in (Instant, Span) for actor in ("target", "draft")),
    *[(Span, "target", "prefill"), (Span, "draft", "prefill"), (Span, "draft", "draft")],
    *[(Instant, "draft", "proposal"), (Span, "target", "verify")],
    *((Instant, "target", kind) for kind in ("verdict", "rewind")),
    *((Instant, "draft", kind) for kind in ("hit", "miss", "rewind")),
]
UNDRAFTED_EVENTS = [
    *(event for event in EVENTS if event[1] == "target" and event[2] in ("open", "prefill", "verdict")),
    (Span, "target", "decode"),
]
Kind = tuple[type[Event], str, str]


class Trigger:
    """A trace that does something at a chosen event.

    Attributes:
        struck: the session of that event.
    """

    struck: int | None = None

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._act: Callable[[], object] | None = None

    def at(self, event: Kind, act: Callable[[], object], *, nth: int = 1) -> None:
        """Act at the nth event of this kind from now on."""
        self._awaited, self._act, self._nth = event, act, nth

    @property
    def has_struck(self) -> bool:
        return self._act is None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self._act is None or (type(event), event.actor, event.kind) != self._awaited:
            return
        self._nth -= 1
        if self._nth == 0:
            act, self._act, self.struck = self._act, None, event.session
            act()

    def spans(self, actor: str, kind: str, session: int | None = None) -> list[Span]:
        spans = [each for each in self.events if isinstance(each, Span) and (each.actor, each.kind) == (actor, kind)]
        return [span for span in spans if session in (None, span.session)]


def nothing_is_left(trigger: Trigger) -> None:
    """Assert, after `open`, that no thread is left and that every cache that was opened was closed."""
    assert outrider_threads() == []
    for actor in ("target", "draft"):
        opened = [span.session for span in trigger.spans(actor, "open")]
        assert sorted(opened) == sorted(span.session for span in trigger.spans(actor, "close"))


def pair(ours: Any = None, theirs: Any = None) -> tuple[Any, Any]:
    return (ours or target(), None), (theirs or drafter(), None)


@asynccontextmanager
async def opened(ours: Any = None, theirs: Any = None) -> AsyncIterator[tuple[runtime.Runtime, Trigger]]:
    """A runtime over a pair, and its trace; afterwards, the next text must be right, and nothing be left."""
    trigger = Trigger()
    # Without what is left of the texts before, of which each begins alike; and with hits, even if the drafter is slow.
    async with runtime.open(*pair(ours, theirs), trace=trigger, prefix_cache_bytes=0, work_ahead="always") as rt:
        yield rt, trigger
        await the_next_text_is_right(rt)
    nothing_is_left(trigger)


# --- at any event ----------------------------------------------------------------------------------

WAYS: list[Way] = [by_scope, by_aclose, by_leaving, by_break, by_dropping_unread]


async def cancel(rt: runtime.Runtime, trigger: Trigger, event: Kind, way: Way = by_scope, *, nth: int = 1) -> None:
    """Begin a long text, and cancel it at the nth event of a kind."""
    scope, due = trio.CancelScope(), trio.Event()

    def strike() -> None:
        scope.cancel()
        due.set()

    trigger.at(event, strike, nth=nth)
    kept = await way(partial(rt.stream, PROMPT, **LONG), scope, due)
    assert trigger.has_struck
    if kept is not None:
        with pytest.raises(runtime.RuntimeClosedError, match="this stream was closed"):
            await anext(kept)


@sweep("way", [by_scope, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
async def test_cancelling_at_any_event_leaves_the_runtime_in_order(way):
    # At every event in one way, and at every second in each of the others.
    events = EVENTS if way is by_scope else EVENTS[WAYS.index(way) % 2 :: 2]
    # Only a drafter that is always right surely hits before the stream's buffer is full.
    for theirs in (drafter(), target()):
        async with opened(theirs=theirs) as (rt, trigger):
            for event in events:
                if (event[2] == "hit") is (theirs is target()):
                    before = rt.statistics().generated_tokens
                    await cancel(rt, trigger, event, way)
                    # Nowhere near its end.
                    assert rt.statistics().generated_tokens < before + 200, event
                    await the_next_text_is_right(rt)
                    # Both models close what they had opened at once, and not when the runtime is left.
                    for actor in ("target", "draft"):
                        spans = [trigger.spans(actor, kind, trigger.struck) for kind in ("open", "close")]
                        assert len(spans[0]) == len(spans[1]) <= 1, (event, actor)
                    await trio.testing.wait_all_tasks_blocked()
                    assert rt.num_streams == 0, event


async def test_cancelling_at_any_event_of_plain_decoding():
    trigger = Trigger()
    async with runtime.open((target(), None), trace=trigger, prefix_cache_bytes=0) as rt:
        for way in WAYS:
            for event in UNDRAFTED_EVENTS:
                await cancel(rt, trigger, event, way)
            await the_next_text_is_right(rt)
    nothing_is_left(trigger)


async def test_a_stream_may_be_dropped_on_another_thread():
    async with opened() as (rt, _):
        holder = [rt.stream(PROMPT, max_tokens=400)]
        await anext(holder[0])
        await trio.to_thread.run_sync(holder.clear)
        await the_next_text_is_right(rt)
        while rt.num_streams:  # a finished stream is removed in the next turn of the event loop
            await trio.lowlevel.checkpoint()


# --- in the middle of a forward pass --------------------------------------------------------------


def holding(who: str) -> tuple[BlockingModel, Any, Any]:
    """A model that can be held in a forward pass, and the pair of which it is one."""
    held = BlockingModel(target() if who == "target" else drafter())
    return (held, held, drafter()) if who == "target" else (held, target(), held)


@sweep("who", ["target", "draft"])
@sweep("when", ["prefill", "decode"])
async def test_the_consumer_is_back_while_the_forward_pass_still_runs(when, who):
    held, *models = holding(who)
    async with opened(*models) as (rt, trigger):
        if when == "prefill":
            held.block()
        else:
            trigger.at((Span, who, "verify" if who == "target" else "draft"), held.block)
        async with rt.stream(PROMPT, **LONG):
            await held.blocked_in_trio()
        # Here the consumer is back, and the forward pass still blocks.
        assert outrider_threads() != []
        await trio.testing.wait_all_tasks_blocked()
        assert trigger.spans(who, "close") == []
        held.release()


@sweep("who", ["target", "draft"])
async def test_leaving_the_runtime_waits_for_the_forward_pass_that_runs(who):
    held, ours, theirs = holding(who)
    trigger = Trigger()
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def use() -> None:
            with scope:
                async with runtime.open(*pair(ours, theirs), trace=trigger) as rt:
                    trigger.at((Span, who, "verify" if who == "target" else "draft"), held.block)
                    await read(rt.stream(PROMPT, **LONG))
            left.set()

        await held.blocked_in_trio()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        assert outrider_threads() != []
        held.release()
    assert scope.cancelled_caught
    nothing_is_left(trigger)


# --- leaving the runtime --------------------------------------------------------------------------


def layer_classes(model: nn.Module) -> list[type]:
    return [type(layer) for layer in model.layers]


async def test_a_trace_function_that_raises_costs_nothing_but_the_trace(caplog):
    trace = mock.Mock(side_effect=ValueError("a trace with a bug"))
    async with runtime.open(*pair(), trace=trace) as rt:
        await the_next_text_is_right(rt)
    assert trace.call_count == 1
    assert "the trace function failed" in caplog.text
    assert outrider_threads() == []


@sweep("nth", [1, 2, 3, 4])
async def test_cancelling_while_the_models_are_being_opened(nth):
    target_classes, draft_classes = layer_classes(target()), layer_classes(drafter())
    loads: list[Event] = []

    with trio.CancelScope() as scope:

        def trace(event: Event) -> None:
            loads.append(event)
            if len(loads) == nth:
                scope.cancel()

        async with runtime.open(*pair(), trace=trace) as rt:
            await rt.generate(PROMPT, max_tokens=400)
    assert scope.cancelled_caught
    assert outrider_threads() == []
    assert layer_classes(target()) == target_classes
    assert layer_classes(drafter()) == draft_classes


async def test_two_runtimes_over_one_model_of_which_the_first_is_left_first():
    model = llama(seed=1)
    before, weights = layer_classes(model), dict(model.parameters())
    right = greedy(model, PROMPT, 8)
    async with trio.open_nursery() as nursery:
        first_scope, second_scope = trio.CancelScope(), trio.CancelScope()

        async def serve(scope: trio.CancelScope, task_status: trio.TaskStatus[runtime.Runtime]) -> None:
            with scope:
                await runtime.keep_open((model, None), (model, None), task_status=task_status)

        await nursery.start(lambda task_status: serve(first_scope, task_status))
        second = await nursery.start(lambda task_status: serve(second_scope, task_status))
        first_scope.cancel()
        assert ids(await second.generate(PROMPT, max_tokens=8)) == right
        # Otherwise there would be nothing to restore.
        assert layer_classes(model) != before
        second_scope.cancel()
    assert layer_classes(model) == before
    assert dict(model.parameters()) == weights
    assert greedy(model, PROMPT, 8) == right
    assert outrider_threads() == []


@sweep("which", ["target", "draft"])
async def test_opening_that_fails_half_way_leaves_the_other_model_as_it_was(which):
    model = llama(seed=1)
    before = layer_classes(model)
    failing = Failing(llama(seed=2))
    failing.fails = True
    models = (failing, model) if which == "target" else (model, failing)
    with pytest.raises(runtime.ModelError, match=f"cannot load {which} 'Failing': out of memory") as raised:
        async with runtime.open(*pair(*models)):
            raise AssertionError("should not be reached")
    assert isinstance(raised.value.__cause__, ValueError)
    assert layer_classes(model) == before
    assert outrider_threads() == []
