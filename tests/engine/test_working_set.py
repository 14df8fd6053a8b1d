"""The memory that a device recommends to use: a warning above it, and a wired limit that several runtimes share."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
import trio
from models import llama
from our_threads import outrider_threads

import runtime
from runtime.loading import device

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


async def test_the_wired_limit_is_left_alone_where_that_is_asked_for(limits: list[int]) -> None:
    async with runtime.open((llama(), None), wire_memory=False):
        assert limits == [BEFORE]
        async with runtime.open((llama(), None)):
            assert limits == [BEFORE, RECOMMENDED]
        assert limits == [BEFORE, RECOMMENDED, BEFORE]


@pytest.mark.usefixtures("limits")
async def test_models_that_are_larger_than_the_device_recommends_are_warned_of(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        async with runtime.open((llama(), None)) as rt:
            assert "this device recommends to use at most" in caplog.text
            caplog.clear()
            await rt.attach_draft((llama(), None))
            assert "this device recommends to use at most" in caplog.text


# --- the default of memory_limit ------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 100 pages of memory; the file with the limit of its container."""
    sizes = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 100}
    monkeypatch.setattr(device.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(device, "_CONTAINER_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "missing")))
    return tmp_path / "memory.max"


@pytest.mark.parametrize(("written", "memory"), [(None, 100_000), ("max\n", 100_000), ("60000\n", 60_000)])
def test_the_memory_of_a_cpu_is_that_of_the_container_or_the_machine(written, memory, machine):
    if written is not None:
        machine.write_text(written)
    assert device.physical_memory() == memory
    if mx.default_device().type == mx.DeviceType.cpu:
        assert device.default_memory_limit(0) == 3 * memory // 4
        # Models that take nearly all leave some room for caches.
        assert device.default_memory_limit(memory) == memory + memory // 8


def test_on_a_gpu_the_default_is_a_share_of_what_the_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for name in ("max_recommended_working_set_size", "total_memory"):
        monkeypatch.setattr(mx, "device_info", lambda *_, name=name: {name: 1000, "memory_size": 5000})
        assert device.default_memory_limit(0) == 900


async def test_a_limit_that_the_models_take_whole_is_refused_with_the_sizes() -> None:
    with pytest.raises(runtime.ModelError, match=r"take 84\.6 kB, and memory_limit is 50\.0 kB, caches included"):
        async with runtime.open((llama(), None), memory_limit=50_000):
            pass
    async with runtime.open((llama(), None), memory_limit=1_000_000) as rt:
        assert rt.memory.limit == 1_000_000
        assert rt.context_in_memory > 0
    async with runtime.open((llama(), None), memory_limit=None) as rt:
        assert rt.memory.limit is None
    async with runtime.open((llama(), None)) as rt:
        assert rt.memory.limit == device.default_memory_limit(rt.memory.models)
