"""Conversations are saved and loaded whatever their drafter does meanwhile; it then reads the text again."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from chat_models import QUIET, TEMPLATE, VOCAB_SIZE, tokenizer
from completions import ids
from models import llama, near
from sweeps import sweep

import runtime
from actors.persistence import saved_sequence

SAID = ("The cat sat on the mat.", " And then?")
SETTINGS: dict[str, Any] = {"max_tokens": 12, "logit_bias": QUIET, "lookahead": 3}
LONG_S = 30.0  # after which a hang ends, so that whoever waits for it fails
# What is asked of a model on its thread, when a conversation is saved or loaded.
SAVING, LOADING = ("_find", "_fingerprint"), ("_fingerprint", "_fill")


@attrs.define
class Hang:
    """A function of the drafter's thread that does not return before it is released."""

    has_begun: trio.Event = attrs.field(factory=trio.Event)
    release: threading.Event = attrs.field(factory=threading.Event)
    was_waited_for: bool = False


@asynccontextmanager
async def open_pair() -> AsyncIterator[runtime.Runtime]:
    target = llama(vocab_size=VOCAB_SIZE)
    with trio.fail_after(60):
        async with runtime.open((target, tokenizer(TEMPLATE)), (near(target, noise=0.05), None)) as rt:
            yield rt


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch, rt: runtime.Runtime, name: str) -> AsyncIterator[Hang]:
    """Have a function hang on the drafter's thread."""
    drafter = rt._draft
    hang, token, real = Hang(), trio.lowlevel.current_trio_token(), getattr(saved_sequence, name)

    def hanging(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if model is drafter.model:
            token.run_sync_soon(hang.has_begun.set)
            hang.was_waited_for = not hang.release.wait(LONG_S)
        return real(model, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(saved_sequence, name, hanging)
        try:
            yield hang
        finally:
            hang.release.set()
    assert not hang.was_waited_for


async def said_and_saved() -> tuple[bytes, list[int]]:
    """A file of a conversation, and its next answer."""
    async with open_pair() as rt:
        conversation = rt.conversation(**SETTINGS)
        await conversation.generate(SAID[0])
        await conversation.save(file := io.BytesIO())
        return file.getvalue(), ids(await conversation.generate(SAID[1]))


@sweep("name", LOADING)
async def test_a_conversation_is_loaded_beside_a_drafter_that_hangs(name: str, monkeypatch: Any, caplog: Any) -> None:
    data, expected = await said_and_saved()
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.05)
    async with open_pair() as rt:
        async with hanging(monkeypatch, rt, name):
            conversation = await rt.load(io.BytesIO(data))
        answer = await conversation.generate(SAID[1])
        assert ids(answer) == expected
        assert answer.statistics.cached_tokens > 0
        assert (await rt.generate(SAID[0], **SETTINGS)).statistics.proposed > 0
    assert "what the draft model has cached is left out" in caplog.text


@sweep("name", LOADING)
async def test_a_load_that_waits_for_the_drafter_is_cancelled_at_once(name: str, monkeypatch: Any) -> None:
    data, _ = await said_and_saved()
    async with (
        open_pair() as rt,
        hanging(monkeypatch, rt, name) as hang,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(rt.load, io.BytesIO(data))
        await hang.has_begun.wait()
        nursery.cancel_scope.cancel()


@sweep("name", LOADING)
async def test_a_conversation_is_loaded_while_the_drafter_is_detached(name: str, monkeypatch: Any) -> None:
    data, expected = await said_and_saved()
    monkeypatch.setattr("runtime.engine.drafter_slot.RELEASE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.5)
    loaded: list[Any] = []
    async with open_pair() as rt:
        async with hanging(monkeypatch, rt, name) as hang:

            async def load() -> None:
                loaded.append(await rt.load(io.BytesIO(data)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                await hang.has_begun.wait()
                await rt.detach_draft()
        assert ids(await loaded[0].generate(SAID[1])) == expected


@sweep("name", SAVING)
async def test_a_conversation_is_saved_beside_a_drafter_that_hangs(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.05)
    async with open_pair() as rt:
        conversation = rt.conversation(**SETTINGS)
        await conversation.generate(SAID[0])
        async with hanging(monkeypatch, rt, name):
            await conversation.save(file := io.BytesIO())
        expected = ids(await conversation.generate(SAID[1]))
    file.seek(0)
    async with open_pair() as rt:
        answer = await (await rt.load(file)).generate(SAID[1])
        assert (ids(answer), answer.statistics.cached_tokens > 0) == (expected, True)
