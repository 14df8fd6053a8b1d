"""Long blocks of calls: hostile ones hold nobody up for long; well-formed ones are read."""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs
import pytest
from sweeps import sweep
from tool_call_cases import BLOCKS, FORMATS, TOOLS, call_format, call_in

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import SHORT, CallFormat, ParsedCall
from runtime.generation.tool_calls.events import CallEnded
from runtime.generation.tool_calls.parser_process import ParserProcess

# Whatever mlx-lm's pattern begins anew at.
OPENINGS = {
    "function_gemma": ("call:a{", "<escape>"),
    "gemma4": ("call:a{", "{", '<|"|>', "a:"),
    "glm47": ("<arg_key>", "<arg_key>a</arg_key>", "<arg_value>", "a=1 ", "{"),
    "json_tools": ("{", '{"a":'),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "functions.a:0"),
    "kimi_k3": ("<|open|>call", '<|open|>call tool="a"<|sep|>', "<|open|>json", "1"),
    "laguna": ("<arg_key>", "<arg_key>a</arg_key>", "<arg_value>"),
    "longcat": ("<longcat_arg_key>", "<longcat_arg_key>a</longcat_arg_key>"),
    "minicpm5": ('<param name="a">', "<function ", "name=", "a>"),
    "minimax_m2": ('<invoke name="a">', '<parameter name="a">'),
    "mistral": ("a[ARGS]", "[TOOL_CALLS]", "a"),
    "muse_spark": ("<atem:invoke ", '<atem:invoke name="a">', '<atem:parameter name="a">'),
    "pythonic": ("[a(", "a=", '"', '\\"', "<a"),
    "qwen3_coder": ("<function=a>", "<parameter=a>"),
}


def temperature_in(name: str, place: str) -> str:
    """A call in the form of a format."""
    return call_in(name, "get_current_temperature", {"location": place})


def hostile(name: str, num_chars: int) -> list[str]:
    """Texts of many openings, alone, after the beginning of a call, and around what would close one."""
    block = next(block for format, block, _ in BLOCKS if format == name)
    units = [unit * (num_chars // len(unit)) for unit in OPENINGS[name]]
    half = len(block) // 2
    return [text for unit in units for text in (unit, block[:half] + unit, block[half:] + unit + block[half:-1])]


@pytest.mark.slow
@sweep("name", FORMATS)
def test_a_hostile_block_ends_and_the_next_call_is_read(name: str) -> None:
    format = call_format(name)
    for text in hostile(name, 100_000)[:3]:
        format.parse(text, TOOLS)
    assert format.parse(temperature_in(name, "London " * 1000), TOOLS) is not None


def test_a_block_that_takes_too_long_is_no_call() -> None:
    format = call_format("function_gemma")
    assert format.parse("call:a{" * 100_000, TOOLS) is None
    assert format.parse("call:a{" * 10, TOOLS) is None


def test_a_parser_of_ones_own_is_called_here_however_long_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    format = attrs.evolve(call_format("function_gemma"), name="mine", parse=lambda *_: {"name": "a", "arguments": {}})
    assert format.parse("x" * 3 * SHORT, TOOLS) == [ParsedCall("a", "{}")]


@pytest.mark.parametrize("read", [[], [{"name": "a", "arguments": "no object"}, {"name": "a", "arguments": {}}]])
def test_a_block_of_which_a_call_cannot_be_read_is_no_call(read: list[Any]) -> None:
    format = attrs.evolve(call_format("function_gemma"), name="mine", parse=lambda *_: read)
    assert format.parse("call", TOOLS) is None


def test_without_its_process_a_long_block_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ParserProcess()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert process.parse("glm47", temperature_in("glm47", "London"), TOOLS) is None
    monkeypatch.undo()
    assert process.parse("glm47", temperature_in("glm47", "London"), TOOLS) is not None


@sweep("name", FORMATS)
def test_a_hostile_block_in_small_pieces_is_text_and_parsed_once_at_most(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_parsed, parse = 0, CallFormat.parse

    def counted(*arguments: Any) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        return parse(*arguments)

    monkeypatch.setattr(CallFormat, "parse", counted)
    for text in hostile(name, 3 * SHORT):
        format, num_parsed = call_format(name), 0
        whole = format.start + text
        reader = AnswerReader(format=format, tools=TOOLS)
        events = [event for i in range(0, len(whole), 5) for event in reader.add(whole[i : i + 5])]
        events += reader.finish(is_complete=True)
        assert "".join(event.source for event in events) == whole
        num_blocks = whole.count(format.start)
        assert num_parsed <= num_blocks + sum(isinstance(event, CallEnded) for event in events)


@sweep("name", FORMATS)
def test_a_long_call_in_the_form_of_its_format_is_read(name: str) -> None:
    place = "London; the (big) city [on the Thames], where a<b and 1=1. " * 1700
    read = call_format(name).parse(temperature_in(name, place), TOOLS)
    assert read is not None
    [call] = read
    assert call.name == "get_current_temperature"
    assert json.loads(call.arguments)["location"].strip() == place.strip()
