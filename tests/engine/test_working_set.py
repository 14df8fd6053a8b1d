"""The memory that a device recommends to use: a warning above it, and a wired limit that several runtimes share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
import trio
from models import llama
from our_threads import outrider_threads

import runtime

BEFORE, RECOMMENDED = 0, 10_000


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A device with a recommended working set; the wired limits that it had, the last one in force."""
    limits = [BEFORE]

    def set_wired_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    for module in (mx, mlx_lm.utils.mx):
        monkeypatch.setattr(module, "device_info", lambda *_: {"max_recommended_working_set_size": RECOMMENDED})
        monkeypatch.setattr(module, "set_wired_limit", set_wired_limit)
    yield limits
    assert outrider_threads() == []


async def test_the_wired_limit_is_restored_by_the_last_of_several_runtimes(limits: list[int]) -> None:
    async with trio.open_nursery() as nursery:
        first = await nursery.start(runtime.keep_open, (llama(), None))
        assert limits == [BEFORE, RECOMMENDED]
        second = await nursery.start(runtime.keep_open, (llama(), None))
        await first.aclose()
        assert limits[-1] == RECOMMENDED
        await second.aclose()
    assert limits == [BEFORE, RECOMMENDED, BEFORE]
    async with runtime.open((llama(), None)):
        assert limits[-1] == RECOMMENDED
    assert limits[-1] == BEFORE


@pytest.mark.usefixtures("limits")
async def test_models_that_are_larger_than_the_device_recommends_are_warned_of(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        async with runtime.open((llama(), None)) as rt:
            assert "this device recommends to use at most" in caplog.text
            caplog.clear()
            await rt.attach_draft((llama(), None))
            assert "this device recommends to use at most" in caplog.text


async def test_nothing_is_said_where_the_device_does_not_tell(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        async with runtime.open((llama(), None)):
            assert "recommends" not in caplog.text
