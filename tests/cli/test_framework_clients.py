"""Application frameworks with `outrider serve` as a process: their examples, one function for each feature."""

from __future__ import annotations

import asyncio
import importlib
import re
from types import ModuleType
from typing import Any

import httpx
import pytest
from command_line import HANGS_S
from served_caller import MODEL
from served_command import KEY, Server

pytestmark = pytest.mark.slow


@pytest.fixture(params=["langchain_client", "pydantic_ai_client"])
def example(request: pytest.FixtureRequest, caller: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(request.param)  # takes seconds
    monkeypatch.setattr(module, "KEY", KEY)
    monkeypatch.setattr(module, "BASE_URL", f"{caller.url}v1")
    monkeypatch.setattr(module, "MODEL", MODEL)
    return module


def told(example: ModuleType, feature: str) -> Any:
    """What a function of an example returns, and the list of what it yields, with asyncio or without."""
    found = getattr(example, feature)()
    if hasattr(found, "__aiter__"):

        async def pieces() -> list[Any]:
            return [piece async for piece in found]

        return asyncio.run(pieces())
    if hasattr(found, "__await__"):
        return asyncio.run(found)
    return list(found) if hasattr(found, "__next__") else found


def num_requests(server: Server, outcome: str) -> int:
    figures = httpx.get(f"{server.url}metrics", timeout=HANGS_S).text
    found = re.search(rf'^outrider_requests_total{{outcome="{outcome}"}} (\d+)', figures, re.MULTILINE)
    return int(found[1])


def test_an_answer_is_streamed(example: ModuleType) -> None:
    pieces = told(example, "stream")
    assert len(pieces) > 1
    assert "".join(pieces)


def test_a_tool_is_called_as_its_schema_says(example: ModuleType) -> None:
    arguments, after = told(example, "call")
    assert arguments["city"] in ("Lisbon", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert after


def test_an_answer_keeps_to_a_type(example: ModuleType) -> None:
    weather = told(example, "structured")
    assert weather.sky in ("clear", "cloudy", "rainy")
    assert -40 <= weather.degrees <= 50


def test_an_answer_that_is_broken_off_is_over(example: ModuleType, caller: Server) -> None:
    before = num_requests(caller, "cancelled")
    assert told(example, "break_off")
    caller.until_idle()
    assert num_requests(caller, "cancelled") == before + 1
    assert num_requests(caller, "refused") == num_requests(caller, "failed") == 0
