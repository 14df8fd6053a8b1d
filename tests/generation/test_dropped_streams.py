"""Dropping an unread token stream warns, because it is never intended."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from faces import closed, got, next_of, on_every_face, within
from garbage import collect_garbage
from greedy_pair import target

import runtime
import runtime.aio

PROMPT = [1, 2, 3]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
        # Recorded warnings may hold references to the streams.
        caught.clear()


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    assert {each.category for each in caught} <= {ResourceWarning}
    return [str(each.message) for each in caught]


EXPECTED = "a token stream was dropped unread, which ended its generation; read it, or close it with {}"


@on_every_face
async def test_a_stream_that_nobody_reads_warns_and_ends_and_no_other_warns(
    open: Any, caught: list[warnings.WarningMessage]
) -> None:
    caught.clear()
    async with within(open((target(), None))) as rt:
        stream = rt.stream(PROMPT)
        if isinstance(stream, runtime.aio.TokenStream):
            await stream.opened()
        del stream
        collect_garbage()
        assert texts(caught) == [EXPECTED.format("close()" if open is runtime.open_sync else "aclose()")]
        assert not isinstance(rt, runtime.Runtime) or rt.num_streams == 0
        # Read, closed, left, or of a runtime that was closed meanwhile.
        await next_of(rt.stream(PROMPT))
        await closed(rt.stream(PROMPT))
        async with within(rt.stream(PROMPT)):
            pass
        await got(rt.generate(PROMPT, max_tokens=3))
        await got(rt.generate_many([PROMPT] * 2, max_tokens=3))
        stream = rt.stream(PROMPT)
    del stream
    collect_garbage()
    assert len(caught) == 1
