"""What is plain threads' own in the bridge, with real threads and tiny real models.

To show that a call returns at once, a model blocks in the middle of a forward pass until after the call: a call that
waited for the model would hang.
"""

import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn
import pytest
import trio
from blocking_models import BlockingModel, released_on_exit
from completions import ids
from faces import on_asyncio
from garbage import collect_garbage
from greedy_pair import LONG, PROMPT, SETTINGS, drafter, target, text
from our_threads import outrider_threads

import runtime
from protocol.trace import Event

pytestmark = pytest.mark.usefixtures("no_thread_left")


def opened(ours: nn.Module | None = None, **options: Any) -> runtime.sync.Runtime:
    return runtime.open_sync((ours or target(), None), (drafter(), None), **options)


def the_next_text_is_right(rt: runtime.sync.Runtime) -> None:
    completion = rt.generate(PROMPT, max_tokens=12, **SETTINGS)
    assert ids(completion) == text(12)
    assert completion.statistics.draft_failures == 0


def press_ctrl_c() -> None:
    """Send SIGINT to the main thread, as the terminal does; from any thread."""
    ident = threading.main_thread().ident
    signal.pthread_kill(ident, signal.SIGINT)


# --- threads --------------------------------------------------------------------------------------


def test_a_handle_that_nobody_holds_closes_itself_and_a_stream_holds_it() -> None:
    rt = opened()
    stream = rt.stream(PROMPT, max_tokens=12, **SETTINGS)
    del rt
    collect_garbage()
    assert [token.id for token in stream] == text(12)
    threads = outrider_threads()
    assert len(threads) == 3
    del stream
    collect_garbage()
    for thread in threads:
        # The other threads belong to a pool, and stay idle. The timeout only keeps a failing test from hanging.
        if thread.name == "outrider-trio":
            thread.join(60)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_stream_that_waits_at_once_and_the_runtime_works_on() -> None:
    held, events = BlockingModel(target()), list[Event]()

    def read(rt: runtime.sync.Runtime) -> None:
        for _ in rt.stream(PROMPT, **LONG):
            pass

    with opened(held, trace=events.append) as rt, released_on_exit(held):
        acts = (read, lambda rt: rt.generate(PROMPT, **LONG), lambda rt: rt.generate_many([PROMPT] * 3, **LONG))
        for act in acts:
            events.clear()
            held.block(after=6, when_blocked=press_ctrl_c)
            with pytest.raises(KeyboardInterrupt) as raised:
                act(rt)
            # The model is still in its forward pass.
            kinds = ("prefill", "verify", "decode")
            assert len([each for each in events if each.actor == "target" and each.kind in kinds]) <= 6
            held.release()
            # The traceback keeps the frames of the call alive.
            del raised
            collect_garbage()
            the_next_text_is_right(rt)


def test_ctrl_c_leaves_the_block_after_the_pass_however_often() -> None:
    held = BlockingModel(target())
    others: list[threading.Thread] = []

    def use() -> None:
        with opened(held) as rt:

            def interrupt_the_leaving() -> None:
                while not rt._portal.thread._is_stopping:
                    pass
                press_ctrl_c()
                held.release()

            others.append(threading.Thread(target=interrupt_the_leaving))
            others[0].start()
            held.block(after=6, when_blocked=press_ctrl_c)
            rt.generate(PROMPT, **LONG)

    with released_on_exit(held), pytest.raises(KeyboardInterrupt):
        use()
    others[0].join()
    assert outrider_threads() == []


def test_ctrl_c_while_models_are_being_opened_waits_for_that() -> None:
    held = BlockingModel(target())
    held.block(when_blocked=lambda: (press_ctrl_c(), held.release()))  # opening runs forward passes to time the models
    with pytest.raises(KeyboardInterrupt):
        opened(held)
    assert outrider_threads() == []


# --- beside event loops ---------------------------------------------------------------------------


async def test_trio_is_told_to_use_what_is_made_for_it() -> None:
    rt = await trio.to_thread.run_sync(opened)
    calls: list[Callable[[], object]] = [
        opened,
        lambda: runtime.generate_sync(PROMPT, target=(target(), None)),
        lambda: rt.stream(PROMPT),
        lambda: rt.generate_many([PROMPT]),
        rt.close,
    ]
    for call in calls:
        with pytest.raises(runtime.WrongEventLoopError, match=r"async with runtime\.open"):
            call()
    completion = await trio.to_thread.run_sync(lambda: rt.generate(PROMPT, max_tokens=4))
    assert ids(completion) == text(4)
    await trio.to_thread.run_sync(rt.close)


@on_asyncio
async def test_under_asyncio_it_says_what_to_write_instead() -> None:
    for call in (opened, lambda: runtime.generate_sync(PROMPT, target=(target(), None))):
        with pytest.raises(runtime.WrongEventLoopError, match=r"async with runtime\.aio\.open"):
            call()


@on_asyncio
async def test_a_notebooks_loop_waits_as_its_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    completion = runtime.generate_sync(PROMPT, target=(target(), None), draft=(drafter(), None), max_tokens=8)
    assert ids(completion) == text(8)
    with opened() as rt:
        assert [token.id for token in rt.stream(PROMPT, max_tokens=8)] == text(8)


def test_a_trace_function_that_asks_for_a_text_is_refused() -> None:
    said: list[runtime.WrongEventLoopError] = []
    rts: list[runtime.sync.Runtime] = []

    def ask(event: Event) -> None:
        if rts and not said:
            try:
                rts[0].generate(PROMPT)
            except runtime.WrongEventLoopError as error:
                said.append(error)

    with opened(trace=ask) as rt:
        rts.append(rt)
        the_next_text_is_right(rt)
        assert len(said) == 1


def test_an_async_iterable_of_prompts_needs_an_event_loop() -> None:
    async def prompts() -> AsyncIterator[str]:
        yield "def f("

    with opened() as rt, pytest.raises(runtime.PromptError, match="there is no event loop here"):
        rt.generate_many(prompts())
