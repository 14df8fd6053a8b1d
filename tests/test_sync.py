"""A generation without an event loop of one's own, where there is one."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest
import trio
from models import llama

import runtime
from runtime.sync import check_no_event_loop


def generate() -> runtime.Completion:
    return runtime.generate_sync([1, 2, 3], target=(llama(), None), max_tokens=3)


def in_trio() -> None:
    async def main() -> None:
        generate()

    trio.run(main)


def in_asyncio() -> None:
    async def main() -> None:
        generate()

    asyncio.run(main())


@pytest.mark.parametrize(("run", "module"), [(in_trio, "runtime"), (in_asyncio, "runtime.aio")])
def test_where_an_event_loop_is_running_it_says_what_to_write_instead(run, module):
    with pytest.raises(runtime.WrongEventLoopError, match="generate_sync would block the event loop") as caught:
        run()
    assert f"async with {module}.open(target, draft) as rt: completion = await rt.generate(prompt)" in str(caught.value)
    assert len(generate().tokens) == 3


def test_a_notebooks_loop_waits_as_its_user_does(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))

    async def cell() -> None:
        check_no_event_loop("generate_sync")

    asyncio.run(cell())
