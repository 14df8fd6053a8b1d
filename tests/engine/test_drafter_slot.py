"""Attaching a drafter to an open runtime and detaching it, at every moment."""

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import greedy_pair
import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
import trio.testing
from blocking_models import BlockingModel
from faces import got, on_every_face, within
from greedy_pair import drafter, target
from models import prompt_of, save
from scripted import ScriptedModel, agreeing, collect_all, continuation, priced, run, simulated, text_of, truthful
from scripted_sequence import EmptyFeatures
from simulated_worker import SimulatedWorker
from sweeps import sweep
from trained_drafters import write_eagle3
from trained_scripts import RecordingSequence, RecordingTarget, TrainedDraft

import runtime
from protocol.trace import Event
from runtime.engine.drafter_slot import LoadedDrafter

PROMPT = tuple(prompt_of(17))
SETTINGS: dict[str, Any] = {"max_tokens": 12, "lookahead": 3}


def draft_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "outrider-draft"]


async def drafted(rt: Any) -> int:
    """The number of drafted tokens of a text; asserts that the text is right."""
    completion = await got(rt.generate(PROMPT, **SETTINGS))
    assert [token.id for token in completion.tokens] == greedy_pair.text(12, PROMPT)
    assert completion.statistics.draft_failures == 0
    return sum(token.from_draft for token in completion.tokens)


# --- real models ----------------------------------------------------------------------------------


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Memory in reference cycles stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_drafter_is_attached_and_detached_and_its_memory_and_thread_go_with_it(tmp_path: Path) -> None:
    path = save(tmp_path / "draft", drafter())
    async with runtime.open((target(), None)) as rt:
        assert rt.health().draft is None
        for _ in range(2):
            assert await drafted(rt) == 0
            await rt.attach_draft(path)
            assert rt.health().draft is True
            assert rt.statistics().estimates.draft_seconds > 0.0
            assert await drafted(rt) > 0
            with pytest.raises(runtime.DrafterAttachedError, match="detach_draft"):
                await rt.attach_draft(path)
            busy = rt.busy_seconds[1]
            model = weakref.ref(rt._draft.model.module)
            await rt.detach_draft()
            assert model() is None
            assert (rt._target.drafter.mailbox, rt._target.drafter.has_model) == (None, False)
            assert draft_threads() == []
            assert rt.health().draft is None
            assert rt.busy_seconds[1] >= busy > 0.0
            await rt.detach_draft()
        await rt.attach_draft("ngram")
        assert rt.health().draft is True


@pytest.mark.usefixtures("no_garbage_collection")
async def test_the_drafter_that_a_runtime_was_opened_with_can_be_detached_too(tmp_path: Path) -> None:
    path = save(tmp_path / "draft", drafter())
    async with runtime.open((target(), None), path) as rt:
        assert await drafted(rt) > 0
        model = weakref.ref(rt._draft.model.module)
        await rt.detach_draft()
        assert model() is None
        assert draft_threads() == []
        assert await drafted(rt) == 0
        await rt.attach_draft((drafter(), None))
        assert await drafted(rt) > 0


async def test_what_cannot_be_attached_leaves_the_runtime_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    ours, theirs = save(tmp_path / "ours", target()), save(tmp_path / "theirs", drafter(), word="v")
    async with runtime.open(ours) as rt:
        for draft, kind in (
            (3, runtime.SettingsError),
            ("/no/such/model", runtime.ModelError),
            (tmp_path, runtime.ModelError),
            (theirs, runtime.VocabularyMismatchError),
        ):
            with pytest.raises(kind):
                await rt.attach_draft(draft)
            assert draft_threads() == []
            assert rt.health() == runtime.Health(target=True, draft=None)
            assert await drafted(rt) == 0
        await rt.attach_draft((drafter(), None))
        assert await drafted(rt) > 0


async def test_attaching_can_be_cancelled_in_the_middle_and_tried_again() -> None:
    draft_model = BlockingModel(drafter())
    draft_model.block()
    async with runtime.open((target(), None)) as rt, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def attach() -> None:
            with scope:
                await rt.attach_draft((draft_model, None))

        await draft_model.blocked_in_trio()
        with pytest.raises(runtime.DrafterAttachedError, match="loading"):
            await rt.attach_draft("ngram")
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        draft_model.release()
        while rt._drafter._is_attaching:
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert draft_threads() == []
        assert await drafted(rt) == 0
        await rt.attach_draft((draft_model, None))
        assert await drafted(rt) > 0


async def test_closing_in_the_middle_of_attaching_says_so() -> None:
    draft_model = BlockingModel(drafter())
    draft_model.block()
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (target(), None))

        @nursery.start_soon
        async def attach() -> None:
            with pytest.raises(runtime.RuntimeClosedError, match="open another"):
                await rt.attach_draft((draft_model, None))

        await draft_model.blocked_in_trio()
        nursery.start_soon(rt.aclose)
        await trio.testing.wait_all_tasks_blocked()
        draft_model.release()
    assert draft_threads() == []


async def test_closing_in_the_middle_of_detaching_ends_both() -> None:
    draft_model = BlockingModel(drafter())
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (target(), None), (draft_model, None))
        draft_model.block()
        stream = rt.stream(PROMPT, **SETTINGS)
        await draft_model.blocked_in_trio()
        nursery.start_soon(rt.detach_draft)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(rt.aclose)
        await trio.testing.wait_all_tasks_blocked()
        draft_model.release()
    assert draft_threads() == []
    await rt.detach_draft()
    del stream


async def test_a_stream_that_waits_for_its_place_begins_undrafted_once_the_drafter_has_gone() -> None:
    async with runtime.open((target(), None), (drafter(), None), max_streams=1) as rt:
        first, second = rt.stream(PROMPT, **SETTINGS), rt.stream(PROMPT, **SETTINGS)
        assert rt.num_waiting == 1
        await rt.detach_draft()
        assert [token.id async for token in first] == greedy_pair.text(12, PROMPT)
        tokens = [token async for token in second]
        assert [token.id for token in tokens] == greedy_pair.text(12, PROMPT)
        assert not any(token.from_draft for token in tokens)


@on_every_face
async def test_asyncio_and_plain_threads_can_do_it_too(open: Any) -> None:
    async with within(open((target(), None))) as rt:
        await got(rt.attach_draft((drafter(), None)))
        with pytest.raises(runtime.DrafterAttachedError):
            await got(rt.attach_draft("ngram"))
        assert await drafted(rt) > 0
        await got(rt.detach_draft())
        assert await drafted(rt) == 0


# --- simulated time -------------------------------------------------------------------------------

SHORT_PROMPT = [5, 6, 7, 8, 9, 10]
SHORT_TEXT = continuation(SHORT_PROMPT, 10)


async def change_at_event(lookahead: Any, draft: Any, n: int, target: ScriptedModel | None = None) -> int:
    """Detach the drafter at the n-th event of three streams, and attach another. Returns the number of events."""
    events: list[Event] = []
    replacement = ScriptedModel(agreeing(0.9))

    async def load(stack: AsyncExitStack, source: Any) -> LoadedDrafter:
        return replacement, SimulatedWorker("draft", priced(), lambda _: None)

    async with simulated(
        target or ScriptedModel(truthful), draft, listener=lambda event: on_event(event), schedule=n, max_streams=2
    ) as simulation:
        rt = simulation.runtime
        rt._drafter._load = load
        settings = {"max_tokens": 10, "prefill_step_size": 2, "lookahead": lookahead}

        async def change() -> None:
            await rt.detach_draft()
            await rt.attach_draft("another")

        def on_event(event: Event) -> None:
            events.append(event)
            if len(events) == n:
                nursery.start_soon(change)

        async with trio.open_nursery() as nursery:
            streams = [rt.stream(SHORT_PROMPT, **settings) for _ in range(3)]
            assert await collect_all(streams) == [SHORT_TEXT] * 3
        if n <= len(events):
            proposals = len(simulation.instants("proposal"))
            assert await text_of(simulation, SHORT_PROMPT, **{**settings, "lookahead": 2}) == SHORT_TEXT
            assert len(simulation.instants("proposal")) > proposals
            await rt.detach_draft()
    assert [sequence for sequence in replacement.sequences if not sequence.is_closed] == []
    assert replacement.misuses == []
    return len(events)


@sweep("lookahead", [2, "auto"])
@sweep("kind", ["model", "ngram"])
@sweep("first", [1, pytest.param(14, marks=pytest.mark.slow)])  # together every 13th event
def test_the_drafter_can_be_changed_at_any_event_and_the_texts_are_the_same(first, kind, lookahead):
    def draft() -> Any:
        return "ngram" if kind == "ngram" else ScriptedModel(agreeing(0.6))

    num_events = run(change_at_event, lookahead, draft(), 10**6)
    assert num_events > 30
    for n in range(first, num_events + 1, 26):
        run(change_at_event, lookahead, draft(), n)


def test_a_drafter_about_to_get_a_prompts_features_can_be_detached() -> None:
    script = agreeing(0.6)
    for n in range(1, 20):
        draft = TrainedDraft(lambda history, staleness: script(history))
        run(change_at_event, 2, draft, n, RecordingTarget(truthful))


async def test_a_drafter_that_is_released_late_leaves_the_next_ones_features(tmp_path: Path) -> None:
    write_eagle3(tmp_path, target())
    async with runtime.open((target(), None), str(tmp_path)) as rt, AsyncExitStack() as hanging:
        slot = rt._target.model.recorder_slot
        await rt._drafter._load(hanging, str(tmp_path))
        async with AsyncExitStack() as following:
            await rt._drafter._load(following, str(tmp_path))
            recorder = slot.recorder
            await hanging.aclose()
            assert slot.recorder is recorder is not None
        assert slot.recorder is None


@sweep("widths", [range(6, 99), range(1, 6)])  # of a pass over the prompt; of a round
async def test_a_trained_drafter_can_be_detached_during_a_pass(widths, tmp_path, monkeypatch):
    write_eagle3(tmp_path, target())
    inside, released, layer = threading.Event(), threading.Event(), target().layers[0]
    call = type(layer).__call__

    def blocking(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if self is layer and x.shape[1] in widths and not inside.is_set():
            inside.set()
            released.wait(10)
        return call(self, x, *args, **kwargs)

    async with runtime.open((target(), None), str(tmp_path)) as rt, trio.open_nursery() as nursery:
        monkeypatch.setattr(type(layer).__mro__[1], "__call__", blocking)
        nursery.start_soon(drafted, rt)
        await trio.to_thread.run_sync(inside.wait, 10)
        await rt.detach_draft()
        released.set()


class Unrecorded(EmptyFeatures):
    """Features that nobody has recorded."""

    def arrays(self) -> list[mx.array]:
        return []

    def take(self, end: int) -> None:
        return None


class UnrecordedSequence(RecordingSequence):
    features = functools.cached_property(lambda _: Unrecorded())


class UnrecordedTarget(ScriptedModel):
    kind = UnrecordedSequence


async def test_a_drafter_whose_features_never_come_is_not_given_up(autojump_clock: Any) -> None:
    draft = TrainedDraft(lambda history, staleness: truthful(history))
    async with simulated(UnrecordedTarget(truthful), draft) as simulation:
        for lookahead in (2, "auto"):
            completion = await simulation.runtime.generate(SHORT_PROMPT, max_tokens=30, lookahead=lookahead)
            assert [token.id for token in completion.tokens] == continuation(SHORT_PROMPT, 30)
            assert completion.statistics.draft_failures == 0
