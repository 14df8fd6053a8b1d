"""The handle without an event loop, with real threads and tiny real models.

That something returns at once is shown by a model that stops in the middle of a forward pass and goes on only
afterwards: had anything waited for the model, neither would ever go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
from models import VOCAB_SIZE, Wrapped, greedy, llama, near, prompt_of, save

import runtime
from protocol.trace import Event, Span

pytestmark = pytest.mark.usefixtures("no_thread_left")

PROMPT = tuple(prompt_of(33))
SETTINGS = {"prefill_step_size": 8, "lookahead": 3}
LONG = {"max_tokens": 400, **SETTINGS}


@functools.cache
def target() -> nn.Module:
    return llama()


@functools.cache
def drafter() -> nn.Module:
    return near(llama(), noise=0.05)


@functools.cache
def text(num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return greedy(target(), prompt, num_tokens)


def outrider_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("outrider")]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    assert outrider_threads() == []


def opened(ours: nn.Module | None = None, **options: Any) -> runtime.sync.Runtime:
    return runtime.open_sync((ours or target(), None), (drafter(), None), **options)


def ids(completion: runtime.Completion) -> list[int]:
    return [token.id for token in completion.tokens]


def the_next_text_is_right(rt: runtime.sync.Runtime) -> None:
    completion = rt.generate(PROMPT, max_tokens=12, **SETTINGS)
    assert ids(completion) == text(12)
    assert completion.statistics.draft_failures == 0


class Passes:
    """A trace function that counts the target's forward passes for streams."""

    def __init__(self) -> None:
        self.num_of: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Span) and event.actor == "target" and event.kind in ("prefill", "verify", "decode"):
            assert event.session is not None
            self.num_of[event.session] = self.num_of.get(event.session, 0) + 1


class Held(Wrapped):
    """A model whose forward pass, once that is asked for, stops in the middle until it is let go on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._holds_after = -1
        self._when_in: Callable[[], object] = lambda: None
        self._is_in = threading.Event()
        self._may_go_on = threading.Event()

    def hold(self, after: int = 0, when_in: Callable[[], object] = lambda: None) -> None:
        """Stop the next forward pass, or one after so many others, and call a function there."""
        self._when_in = when_in
        self._holds_after = after

    def wait_until_in(self) -> None:
        self._is_in.wait()

    def let_go_on(self) -> None:
        self._may_go_on.set()

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._holds_after -= 1
        if self._holds_after == -1:
            self._is_in.set()
            self._when_in()
            self._may_go_on.wait()
        return super().__call__(inputs, cache)


@contextlib.contextmanager
def let_go_on_after(held: Held) -> Iterator[None]:
    """Have a test that fails not hang as well."""
    try:
        yield
    finally:
        held.let_go_on()


def press_ctrl_c() -> None:
    """As the terminal does; from any thread, for the main thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


# --- the same as in trio --------------------------------------------------------------------------


def test_streams_and_completions_are_what_they_are_in_trio() -> None:
    with opened() as rt:
        with rt.stream(PROMPT, max_tokens=24, **SETTINGS) as stream:
            tokens = list(stream)
            assert next(stream, None) is None
        completion = rt.generate(PROMPT, max_tokens=24, **SETTINGS)
        assert [token.id for token in tokens] == ids(completion) == text(24)
        assert [token.index for token in tokens] == list(range(24))
        assert tokens[-1].finish_reason == stream.finish_reason == completion.finish_reason == "length"
        assert stream.statistics().generated_tokens == 24
        assert stream.statistics().accepted == sum(token.from_draft for token in tokens) > 0
        assert rt.statistics().generated_tokens == 48
        assert rt.health() == runtime.Health(target=True, draft=True)
        assert rt.tokenizer is None
    assert rt.health() == runtime.Health(target=False, draft=False)


def test_a_conversation_goes_on_as_in_trio_and_can_be_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "model", target())

    async def in_trio() -> list[dict[str, str]]:
        async with runtime.open(path) as rt:
            conversation = rt.conversation(max_tokens=8)
            for said in ("w1 w2", " w3", " w4"):
                await conversation.generate(said)
            return conversation.messages

    with runtime.open_sync(path) as rt:
        assert rt.tokenizer is not None
        conversation = rt.conversation(max_tokens=8)
        answer = conversation.generate("w1 w2")
        stream = conversation.stream(" w3")
        with pytest.raises(runtime.ConversationBusyError, match=r"close\(\)"):
            conversation.generate("too early")
        assert "".join(token.text for token in stream) == conversation.messages[-1]["content"] != ""
        assert conversation.messages[1]["content"] == answer.text
        conversation.save(tmp_path / "session")
        loaded = rt.load(tmp_path / "session")
        loaded.generate(" w4")
        assert loaded.messages == trio.run(in_trio)
        conversation.reset()
        assert conversation.messages == []


def test_many_prompts_are_completed_in_their_order() -> None:
    prompts = [tuple(prompt_of(9, seed=seed)) for seed in range(5)]
    with opened() as rt:
        completions = rt.generate_many(prompts, max_concurrent=2, max_tokens=6)
        assert [ids(completion) for completion in completions] == [text(6, prompt) for prompt in prompts]
        assert rt.generate_many([]) == []
        with pytest.raises(runtime.PromptError, match=r"prompts\[1\]"):
            rt.generate_many([PROMPT, []])


def test_bad_input_is_an_error_at_once() -> None:
    passes = Passes()
    with opened(trace=passes) as rt:
        with pytest.raises(runtime.SettingsError, match="max_tokens"):
            rt.stream(PROMPT, max_tokens=0)
        with pytest.raises(runtime.PromptError, match="vocabulary"):
            rt.stream([VOCAB_SIZE])
        with pytest.raises(runtime.PromptError, match="tokenizer"):
            rt.conversation()
        assert passes.num_of == {}
        the_next_text_is_right(rt)


def test_an_error_in_opening_comes_out_as_itself() -> None:
    with pytest.raises(runtime.ModelError, match="does not exist"):
        runtime.open_sync("/no/such/model")
    with pytest.raises(runtime.SettingsError, match="no_such_option"):
        opened(no_such_option=0)


def test_a_model_and_a_prompt_that_were_not_evaluated_yet_are_evaluated_where_they_were_made() -> None:
    model = llama()
    model.model.norm.weight = model.model.norm.weight * 1.0
    with opened(model) as rt:
        the_next_text_is_right(rt)
        assert ids(rt.generate(mx.array(PROMPT) + 0, max_tokens=8)) == text(8)


def test_a_target_that_fails_ends_the_runtime_with_its_error_as_the_cause() -> None:
    class Failing(Wrapped):
        does_fail = False

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if self.does_fail:
                raise RuntimeError("no such kernel")
            return super().__call__(inputs, cache)

    with opened(failing := Failing(target())) as rt:
        failing.does_fail = True
        with pytest.raises(runtime.RuntimeBrokenError, match="no such kernel") as raised:
            rt.generate(PROMPT, **LONG)
        assert isinstance(raised.value.__cause__, RuntimeError)


# --- threads --------------------------------------------------------------------------------------


def test_several_threads_stream_at_once_over_one_handle() -> None:
    prompts = [tuple(prompt_of(9, seed=seed)) for seed in range(6)]
    all_begun = threading.Barrier(len(prompts))

    with opened() as rt, ThreadPoolExecutor(len(prompts)) as pool:

        def read(prompt: tuple[int, ...]) -> list[int]:
            stream = rt.stream(prompt, max_tokens=16)
            first = next(stream)
            all_begun.wait()
            return [first.id, *(token.id for token in stream)]

        assert list(pool.map(read, prompts)) == [text(16, prompt) for prompt in prompts]
        assert rt.statistics().generated_tokens == 6 * 16


def test_a_stream_has_one_consumer() -> None:
    held = Held(target())
    with opened(held) as rt, let_go_on_after(held), ThreadPoolExecutor(1) as pool:
        stream = rt.stream(PROMPT, **LONG)
        next(stream)
        while stream._in_use.acquire(blocking=False):
            # Until the thread below waits for a token.
            stream._in_use.release()
            held.hold()
            waiting = pool.submit(lambda: [next(stream).id for _ in range(40)])
            held.wait_until_in()
        with pytest.raises(runtime.StreamBusyError, match="another thread"):
            next(stream)
        held.let_go_on()
        assert waiting.result() == text(41)[1:]


def test_a_handle_that_nobody_holds_closes_itself_and_a_stream_holds_it() -> None:
    rt = opened()
    stream = rt.stream(PROMPT, max_tokens=12, **SETTINGS)
    del rt
    gc.collect()
    assert [token.id for token in stream] == text(12)
    threads = outrider_threads()
    assert len(threads) == 3
    del stream
    gc.collect()
    for thread in threads:
        # The others are a pool's, and only go idle. The time is a way out of a hang, no expectation.
        if thread.name == "outrider-trio":
            thread.join(60)


def test_leaving_tells_whoever_waits_and_closing_twice_is_closing_once() -> None:
    held = Held(target())
    with ThreadPoolExecutor(2) as pool:
        with opened(held) as rt, let_go_on_after(held):
            held.hold(after=3)
            waiting = pool.submit(lambda: list(rt.stream(PROMPT, **LONG)))
            held.wait_until_in()
            closing = pool.submit(rt.close)
        closing.result()
        with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
            waiting.result()
    assert outrider_threads() == []
    rt.close()
    for call in (rt.stream, rt.generate, lambda prompt: rt.generate_many([prompt])):
        with pytest.raises(runtime.RuntimeClosedError, match="open another"):
            call(PROMPT)
    assert rt.statistics().prompt_tokens == len(PROMPT)


# --- ways to end a stream -------------------------------------------------------------------------

Way = Callable[[runtime.sync.Runtime, Callable[[], None]], None]


def by_close(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    stream = rt.stream(PROMPT, **LONG)
    due()
    stream.close()
    stream.close()
    with pytest.raises(runtime.RuntimeClosedError, match="this stream was closed"):
        next(stream)


def by_close_while_another_thread_waits(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    stream = rt.stream(PROMPT, **LONG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(stream))
        due()
        stream.close()
        with pytest.raises(runtime.RuntimeClosedError, match="this stream was closed"):
            waiting.result()


def by_leaving(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    with rt.stream(PROMPT, **LONG):
        due()


def by_dropping(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    stream = rt.stream(PROMPT, **LONG)
    due()
    del stream
    gc.collect()


def by_breaking_out(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    for _ in rt.stream(PROMPT, **LONG):
        due()
        break


def by_raising(rt: runtime.sync.Runtime, due: Callable[[], None]) -> None:
    def read() -> None:
        for _ in rt.stream(PROMPT, **LONG):
            due()
            raise ValueError("the consumer's own")

    with pytest.raises(ValueError, match="the consumer's own"):
        read()


@pytest.mark.parametrize(
    "way", [by_close, by_close_while_another_thread_waits, by_leaving, by_dropping, by_breaking_out, by_raising]
)
def test_ending_a_stream_returns_while_a_forward_pass_runs_and_begins_no_other(way: Way) -> None:
    held, passes = Held(target()), Passes()
    with opened(held, trace=passes) as rt, let_go_on_after(held):
        held.hold(after=6)  # past the prompt
        way(rt, held.wait_until_in)
        num_passes = passes.num_of[0]
        held.let_go_on()
        gc.collect()
        the_next_text_is_right(rt)
        # The one that was running; a job of the target's may make two forward passes.
        assert passes.num_of[0] <= num_passes + 1


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_stream_that_waits_at_once_and_the_runtime_works_on() -> None:
    held, passes = Held(target()), Passes()

    def read(rt: runtime.sync.Runtime) -> None:
        for _ in rt.stream(PROMPT, **LONG):
            pass

    with opened(held, trace=passes) as rt, let_go_on_after(held):
        for act in (read, lambda rt: rt.generate(PROMPT, **LONG), lambda rt: rt.generate_many([PROMPT] * 3, **LONG)):
            passes.num_of.clear()
            held._may_go_on.clear()
            held.hold(after=6, when_in=press_ctrl_c)
            with pytest.raises(KeyboardInterrupt) as raised:
                act(rt)
            # The model is still in its forward pass.
            assert sum(passes.num_of.values()) <= 6
            held.let_go_on()
            # What is left of the call hangs on the traceback.
            del raised
            gc.collect()
            the_next_text_is_right(rt)


def test_ctrl_c_leaves_the_block_once_the_forward_pass_has_ended_however_often_it_comes() -> None:
    held = Held(target())
    others: list[threading.Thread] = []

    def use() -> None:
        with opened(held) as rt:

            def interrupt_the_leaving() -> None:
                while not rt._thread._is_stopping:
                    pass
                press_ctrl_c()
                held.let_go_on()

            others.append(threading.Thread(target=interrupt_the_leaving))
            others[0].start()
            held.hold(after=6, when_in=press_ctrl_c)
            rt.generate(PROMPT, **LONG)

    with let_go_on_after(held), pytest.raises(KeyboardInterrupt):
        use()
    others[0].join()
    assert outrider_threads() == []


def test_ctrl_c_while_models_are_being_opened_waits_for_that() -> None:
    held = Held(target())
    held.hold(when_in=lambda: (press_ctrl_c(), held.let_go_on()))  # models are timed as they are opened
    with pytest.raises(KeyboardInterrupt):
        opened(held)
    assert outrider_threads() == []


# --- beside event loops ---------------------------------------------------------------------------


def test_trio_is_told_to_use_what_is_made_for_it() -> None:
    with opened() as rt:

        async def main() -> None:
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

        trio.run(main)


def test_under_asyncio_it_says_what_to_write_instead() -> None:
    async def main() -> None:
        for call in (opened, lambda: runtime.generate_sync(PROMPT, target=(target(), None))):
            with pytest.raises(runtime.WrongEventLoopError, match=r"async with runtime\.aio\.open"):
                call()

    asyncio.run(main())


def test_a_notebooks_loop_waits_as_its_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))

    async def cell() -> None:
        completion = runtime.generate_sync(PROMPT, target=(target(), None), draft=(drafter(), None), max_tokens=8)
        assert ids(completion) == text(8)
        with opened() as rt:
            assert [token.id for token in rt.stream(PROMPT, max_tokens=8)] == text(8)

    asyncio.run(cell())


def test_a_trace_function_that_asks_for_a_text_is_told_instead_of_waiting_for_itself() -> None:
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
