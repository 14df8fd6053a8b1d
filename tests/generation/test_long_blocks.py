"""Long blocks of calls: in small pieces, hostile ones are text, and well-formed ones are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from sweeps import sweep
from tool_call_cases import BLOCKS, FORMATS, TOOLS, block, call_format, call_in

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.events import Answer
from runtime.generation.tool_calls.incoming_text import Markers

NUM_CHARS = 10_000


def read(format: CallFormat, text: str, size: int) -> Answer:
    reader, answer = AnswerReader(format=format, tools=TOOLS), Answer()
    for begin in range(0, len(text), size):
        answer.add(reader.add(text[begin : begin + size]))
    answer.add(reader.finish(is_complete=True))
    return answer


def hostile(format: CallFormat, body: str) -> Iterator[str]:
    """Texts of many openings that are never closed: of blocks, and of whatever is in one."""
    for unit in (format.start, *(format.start + body[:cut] for cut in range(1, len(body), 19)), body[len(body) // 2 :]):
        yield format.start + body[: len(body) // 2] + unit * (NUM_CHARS // len(unit))


@sweep("name", FORMATS)
def test_a_text_of_many_openings_is_searched_in_linear_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_searched, search = 0, Markers.search

    def counted(self: Markers, text: str, begin: int) -> Any:
        nonlocal num_searched
        at, found = search(self, text, begin)
        num_searched += at - begin + 1
        return at, found

    monkeypatch.setattr(Markers, "search", counted)
    format, body = call_format(name), next(body for each, body, _ in BLOCKS if each == name)
    for text in hostile(format, body):
        num_searched = 0
        read(format, text, 5)
        assert num_searched < 60 * len(text)


@sweep("name", FORMATS)
def test_a_long_call_in_small_pieces_is_read_as_it_was_written(name: str) -> None:
    place = "London; the (big) city [on the Thames], where a<b and 1=1. \n" * 500
    written = place.replace("\n", "\\n") if name == "pythonic" else place
    text = block(name, call_in(name, "get_current_temperature", {"location": written}))
    [call] = read(call_format(name), text, 3).calls
    assert (call.name, call.values) == ("get_current_temperature", {"location": place})


@sweep(
    ("parsed", "calls"),
    [
        ({"name": "multiply", "arguments": {"a": 1}}, [("multiply", {"a": 1})]),
        ({"name": "multiply", "arguments": '{"a": 1}'}, [("multiply", {"a": 1})]),
        ([{"name": "multiply", "arguments": {}}] * 2, [("multiply", {})] * 2),
        ({"name": "divide", "arguments": {}}, []),  # no tool
        ([], []),
        ([{"name": "multiply", "arguments": "no object"}, {"name": "multiply", "arguments": {}}], []),
        ({"name": "multiply", "arguments": {"a": float("nan")}}, []),
    ],
)
def test_a_parser_of_ones_own_reads_blocks_of_any_length(parsed: Any, calls: list[Any]) -> None:
    format = attrs.evolve(call_format("function_gemma"), name="mine", layout=None, parse=lambda *_: parsed)
    text = block("function_gemma", "x" * 3000)
    answer = read(format, f"So: {text}", 7)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ("So:" if calls else f"So: {text}")
