"""Faults under real models, on real threads: what fails, and what has to end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest
import trio
from models import VOCAB_SIZE, greedy, llama, near, prompt_of
from scripted import ids

import runtime
from actors.mlx_line import MLXLine
from actors.worker import JobError, Step, Steps

PROMPT = prompt_of(9)


class Fault(Exception):
    pass


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")]


def pair() -> tuple[nn.Module, nn.Module]:
    target = llama(0)
    return target, near(target, noise=0.1)


async def read_all(*streams: Any) -> None:
    for stream in streams:
        async for _ in stream:
            pass


async def kill(worker: Any) -> None:
    """End a worker's thread by something that no job of ours does."""
    with pytest.raises(JobError):
        await worker.run_steps(Steps("draft", lambda: "no step", lambda *_: None))  # type: ignore[arg-type,return-value]


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, vocab_model: nn.Module, at: int) -> Callable[[], int]:
    """Have the n-th call of a method of a model's lines raise; returns how often it was called."""
    calls = 0
    method = getattr(MLXLine, name)

    def failing(line: MLXLine, *arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        if line._model is vocab_model:
            calls += 1
            if calls == at:
                raise Fault(f"{name} {at}")
        return method(line, *arguments, **keywords)

    monkeypatch.setattr(MLXLine, name, failing)
    return lambda: calls


# The first chunk of the prompt, a later one, a step or a verify, and what comes before and after those.
MOMENTS = [
    *(("feed", at) for at in (1, 2, 4, 6)),
    ("prepare", 1),
    ("rewind", 2),
    ("check", 3),
    ("close", 1),
]
SETTINGS: dict[str, Any] = {"max_tokens": 10, "lookahead": 2, "prefill_step_size": 4}


@pytest.mark.parametrize(("name", "at"), MOMENTS)
async def test_a_drafters_job_that_raises_costs_no_token(monkeypatch: Any, name: str, at: int) -> None:
    target, draft = pair()
    async with runtime.open((target, None), (draft, None)) as rt:
        num_calls = fail_at(monkeypatch, name, draft, at)
        completion = await rt.generate(PROMPT, **SETTINGS)
        assert ids(completion.tokens) == greedy(target, PROMPT, 10)
        again = await rt.generate(PROMPT, **SETTINGS)
        assert ids(again.tokens) == ids(completion.tokens)
        assert num_calls() >= at
        if name != "close":  # by then the text may be over, and nobody counts
            assert rt.statistics().draft_failures == 1
    assert threads() == []


@pytest.mark.parametrize(
    ("with_drafter", "name", "at"),
    # Plain decoding has nothing to undo.
    [(True, *moment) for moment in MOMENTS]
    + [(False, *moment) for moment in MOMENTS if moment[0] not in ("prepare", "rewind")],
)
async def test_a_targets_job_that_raises_ends_every_stream_with_its_error(
    monkeypatch: Any, name: str, at: int, with_drafter: bool
) -> None:
    target, draft = pair()
    with trio.fail_after(60):
        async with runtime.open((target, None), (draft, None) if with_drafter else None) as rt:
            fail_at(monkeypatch, name, target, at)
            first, second = rt.stream(PROMPT, **SETTINGS), rt.stream(PROMPT, **{**SETTINGS, "max_tokens": None})
            with pytest.raises(runtime.RuntimeBrokenError) as broken:
                await read_all(first, second)
            assert isinstance(broken.value.__cause__, Fault)
            with pytest.raises(runtime.RuntimeBrokenError):
                rt.stream(PROMPT)
    assert threads() == []


async def test_a_drafters_thread_that_dies_costs_no_token(caplog: Any) -> None:
    target, draft = pair()
    with trio.fail_after(60):
        async with runtime.open((target, None), (draft, None)) as rt:
            stream = rt.stream(PROMPT, max_tokens=30, lookahead=2)
            got = [(await anext(stream)).id]
            await kill(rt._draft.worker)
            assert rt.health() == runtime.Health(target=True, draft=False)
            assert not rt.health().ok
            got += [token.id async for token in stream]
            assert got == greedy(target, PROMPT, 30)
            again = await rt.generate(PROMPT, max_tokens=30)
            assert ids(again.tokens) == got
            assert again.statistics.draft_failures == 1
    assert "the draft's thread has died of AttributeError" in caplog.text
    assert threads() == []


async def test_a_targets_thread_that_dies_ends_every_stream_with_its_error() -> None:
    target, draft = pair()
    with trio.fail_after(60):
        async with runtime.open((target, None), (draft, None)) as rt:
            streams = [rt.stream([token], max_tokens=None) for token in range(3)]
            await anext(streams[0])
            assert rt.health().ok
            await kill(rt._target.worker)
            assert rt.health() == runtime.Health(target=False, draft=True)
            for stream in streams:
                with pytest.raises(runtime.RuntimeBrokenError) as broken:
                    await read_all(stream)
                assert isinstance(broken.value.__cause__, AttributeError)
            with pytest.raises(runtime.RuntimeBrokenError):
                await rt.generate([VOCAB_SIZE - 1])
            assert rt.health() == runtime.Health(target=False, draft=False)
    assert threads() == []


def test_a_step_is_what_the_deadly_one_is_not() -> None:
    assert Steps("draft", lambda: Step(1), lambda *_: None).following(Step(1)) is None
