"""MLX's default device is one for the whole process: neither model's thread may write it."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from models import llama, prompt_of

import runtime

PROMPT = tuple(prompt_of(9))


class FakeDevices:
    """MLX's functions that read and write the process-wide default device, and who wrote it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writers: list[str] = []
        monkeypatch.setattr(mx, "set_default_device", lambda _: self._write())
        monkeypatch.setattr(mx, "set_default_stream", lambda _: self._write())
        monkeypatch.setattr(mx, "stream", lambda _: self)

    def _write(self) -> None:
        self.writers.append(threading.current_thread().name)

    # As `mx.stream(device)`, which sets the default device on entry and back on exit.
    def __enter__(self) -> None:
        self._write()

    def __exit__(self, *_: object) -> None:
        self._write()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "acceptance": "rejection"}], ids=["match", "rejection"])
async def test_no_thread_of_a_runtime_writes_the_default_device(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = llama(), llama(seed=1)
    devices = FakeDevices(monkeypatch)
    async with runtime.open((target, None), (draft, None)) as rt:
        before = mx.default_device()
        async for _ in rt.stream(PROMPT, max_tokens=12, **options):
            assert mx.default_device() == before
        await rt.detach_draft()
        await rt.attach_draft((draft, None))
        await rt.generate(PROMPT, max_tokens=12, **options)
    assert devices.writers == []
