"""Long responses are made in another thread, and encoded in pieces, so that others go on meanwhile."""

from __future__ import annotations

import json
import threading
from typing import Any

import asgi
import pytest
import trio
from asgi import COMPLETIONS, RESPONSES, Aside, Letters, Served, simulated_server
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from sweeps import sweep

from runtime.server.answers.sending import SHORT_RESPONSE, run_aside
from runtime.server.fair_threads import SHORT, FairThreads
from runtime.server.json_pieces import json_pieces

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@settings(derandomize=True, deadline=None)
@given(values, st.integers(1, 400))
def test_the_pieces_are_the_json_that_starlette_would_send(value: Any, times: int) -> None:
    for whole in (value, [value] * times, {"a": [value] * times, "b": {"c": [[value] * 3] * times}}):
        assert "".join(json_pieces(whole)).encode() == JSONResponse(whole).body


@pytest.mark.parametrize(
    "whole",
    [
        {"choices": [{"tokens": ["a"] * 20_000, "top": [{"b": -1.0, "c": -2.0}] * 5_000}]},
        {"choices": [{"content": [{"token": "a", "top": [{"token": "b", "bytes": [98]}] * 20}] * 50}] * 20},
        [[[["a"] * 100] * 10] * 10] * 4,
    ],
)
def test_no_piece_is_long_and_they_are_not_too_many(whole: Any) -> None:
    pieces = list(json_pieces(whole))
    assert json.loads("".join(pieces)) == whole
    # Each value here has less than 20 characters.
    assert max(map(len, pieces)) < 20_000
    assert len(pieces) < 60_000


@pytest.mark.parametrize("num_tokens", [SHORT_RESPONSE + 1, SHORT, 10 * SHORT])
async def test_trio_goes_on_while_a_long_response_is_made(num_tokens: int) -> None:
    others_went_on = threading.Event()

    def make() -> bytes:
        # On trio's thread, nobody could set it.
        return b"others went on" if others_went_on.wait(10) else b""

    async def go_on() -> None:
        others_went_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        threads = FairThreads(trio.to_thread.run_sync)
        body = await run_aside(make, num_tokens, threads=threads, client="10.0.0.1")
    assert body == b"others went on"


class Counting(Aside):
    """Counts the functions that are run in a thread."""

    num = 0

    async def __call__(self, do: Any, /, **options: Any) -> Any:
        Counting.num += 1
        return await super().__call__(do, **options)


LONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 100}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 90}, {"n": 6}),
    (COMPLETIONS, {"prompt": "def f" * 60, "max_tokens": 0, "echo": True}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f" * 60, "max_tokens": 1, "echo": True}, {"logprobs": 5}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 100}, {"top_logprobs": 5}),
]


@sweep(("path", "body", "more"), LONG)
@sweep("stream", [False, True])
def test_what_a_long_response_names_is_counted(
    path: str, body: Any, more: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "Aside", Counting)
    # The events of several texts are short each.
    num_long = 0 if stream and "n" in more else 1

    async def test(server: Served) -> None:
        num_calls = []
        for asked in (body, {**body, **more}):
            Counting.num = 0
            answer = await server.ask(path, {**asked, "stream": stream})
            assert answer.status == 200, answer.body
            num_calls.append(Counting.num)
        assert num_calls[1] == num_calls[0] + num_long

    simulated_server(test, tokenizer=Letters())
