"""The timeline page: what it is given, that text stays text, and in a real browser, that a person can use it."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from browser import visit
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import (
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    never,
    priced,
    run,
    simulated,
    text_of,
    truthful,
)

import runtime
from protocol.books import Commit
from protocol.trace import Event, Instant, Span
from runtime.statistics import Statistics
from runtime.timeline import Texts, data_of, render, texts_of

# A browser takes a second to start.
in_a_browser = pytest.mark.browser

PRICE = priced(prefill=0.25, draft=0.03125, verify=0.125, decode=0.125)
BREAKOUT = "a</script><script>document.title = 'broken'</script><!-- <b>bold</b> & \u2028 \"quoted\" 'so'"


class Words:
    """A tokenizer whose token n is the n-th of a list of words, and w0, w1, … beyond them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] if i < len(self.words) else f" w{i}" for i in ids)


def data_for(events: Sequence[Event], tokenizer: Any = None) -> dict[str, Any]:
    data: dict[str, Any] = data_of(events, trio.run(texts_of, events, tokenizer))
    return data


def page_for(events: Sequence[Event], tokenizer: Any = None, **more: Any) -> str:
    return render(events, trio.run(texts_of, events, tokenizer), **more)


def simulate(
    *uses: Callable[[Simulation], Any], target: ScriptedModel | None = None, draft: ScriptedModel | None = None
) -> tuple[list[Event], list[Any]]:
    """What happened while some streams ran at once, and what came of each."""

    async def main() -> tuple[list[Event], list[Any]]:
        came: list[Any] = [None] * len(uses)
        models = target or ScriptedModel(truthful), draft or ScriptedModel(agreeing(0.75))
        async with simulated(*models, price=PRICE) as simulation, trio.open_nursery() as nursery:

            async def use(i: int) -> None:
                came[i] = await uses[i](simulation)

            for i in range(len(uses)):
                nursery.start_soon(use, i)
        return simulation.events, came

    happened: tuple[list[Event], list[Any]] = run(main)
    return happened
