"""Long blocks of calls: hostile ones never reach a parser that would take forever; well-formed ones are read."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from tool_call_cases import BLOCKS, FORMATS, TOOLS, call_format

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.events import CallEnded
from runtime.generation.tool_calls.long_blocks import SHORT

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
ANYWHERE = ('"', "\\", '"\\', "{", "[", "(", "<", "\n", "a", "1,")


def hostile(name: str, num_chars: int) -> list[str]:
    """Texts of many openings, alone, after the beginning of a call, and around what would close one."""
    block = next(block for format, block, _ in BLOCKS if format == name)
    units = [unit * (num_chars // len(unit)) for unit in (*OPENINGS[name], *ANYWHERE)]
    half = len(block) // 2
    return [text for unit in units for text in (unit, block[:half] + unit, block[half:] + unit + block[half:-1])]


def counted(format: CallFormat) -> tuple[CallFormat, list[int]]:
    """A format whose parser notes the length of each text that it is given."""
    lengths: list[int] = []

    def parse(text: str, tools: Any) -> Any:
        lengths.append(len(text))
        return format._parse(text, tools)

    return attrs.evolve(format, parse=parse), lengths


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_hostile_block_reaches_no_parser_that_searches_it_again_and_again(name: str) -> None:
    format, lengths = counted(call_format(name))
    num_read = sum(format.parse(text, TOOLS) is not None for text in hostile(name, 100_000))
    # What reaches a parser has the form of its format throughout, or is JSON.
    assert len(lengths) == num_read or name in ("json_tools", "mistral")
    assert num_read <= 6


@pytest.mark.parametrize("name", FORMATS)
def test_a_hostile_block_in_small_pieces_is_text_and_parsed_once_at_most(name: str) -> None:
    for text in hostile(name, 3 * SHORT)[: 3 * len(OPENINGS[name])]:
        format, lengths = counted(call_format(name))
        whole = format.start + text
        reader = AnswerReader(format=format, tools=TOOLS)
        events = [event for i in range(0, len(whole), 5) for event in reader.add(whole[i : i + 5])]
        events += reader.finish(is_complete=True)
        assert "".join(event.source for event in events) == whole
        num_blocks = whole.count(format.start)
        assert len(lengths) <= num_blocks + sum(isinstance(event, CallEnded) for event in events)


# A call in the form of each format, with a text for the value of its argument.
CALLS = {
    "function_gemma": "call:get_current_temperature{location:<escape>@<escape>}",
    "gemma4": 'call:get_current_temperature{location:<|"|>@<|"|>}',
    "glm47": "get_current_temperature<arg_key>location</arg_key><arg_value>@</arg_value>",
    "json_tools": '{"name": "get_current_temperature", "arguments": {"location": "@"}}',
    "kimi_k2": '<|tool_call_begin|>functions.get_current_temperature:0<|tool_call_argument_begin|>{"location": "@"}'
    "<|tool_call_end|>",
    "kimi_k3": '<|open|>call tool="get_current_temperature" index="1"<|sep|><|open|>argument key="location" '
    'type="string"<|sep|>@<|close|>argument<|sep|><|close|>call<|sep|>',
    "laguna": "get_current_temperature\n<arg_key>location</arg_key>\n<arg_value>@</arg_value>\n",
    "longcat": "get_current_temperature\n<longcat_arg_key>location</longcat_arg_key>\n"
    "<longcat_arg_value>@</longcat_arg_value>\n",
    "minicpm5": '"get_current_temperature"><param name="location">@</param>',
    "minimax_m2": '\n<invoke name="get_current_temperature">\n<parameter name="location">@</parameter>\n</invoke>\n',
    "mistral": 'get_current_temperature[ARGS]{"location": "@"}',
    "muse_spark": '\n<atem:invoke name="get_current_temperature">\n<atem:parameter name="location">@</atem:parameter>\n'
    "</atem:invoke>\n",
    "pythonic": '[get_current_temperature(location="@")]',
    "qwen3_coder": "\n<function=get_current_temperature>\n<parameter=location>\n@\n</parameter>\n</function>\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_call_in_the_form_of_its_format_is_read(name: str) -> None:
    place = "London; the (big) city [on the Thames], where a<b and 1=1. " * 1700
    read = call_format(name).parse(CALLS[name].replace("@", place), TOOLS)
    assert read is not None
    [call] = read
    assert call.name == "get_current_temperature"
    assert json.loads(call.arguments)["location"].strip() == place.strip()
