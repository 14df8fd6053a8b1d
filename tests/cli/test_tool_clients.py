"""OpenAI's client and tools, with `outrider serve` as a process; a grammar makes the demo pair call them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served_command import Server

pytestmark = pytest.mark.slow

CITY = {"type": "string", "enum": ["Lisbon", "Oslo"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SAID: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def client(caller: Server) -> Iterator[openai.OpenAI]:
    with caller.client() as one:
        yield one


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "caller", "messages": SAID, "tools": TOOLS, "max_tokens": 200, **more}


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments["city"] in CITY["enum"]
        assert 1 <= arguments["days"] <= 9
    else:
        assert call.function.name == "clock"


@pytest.mark.parametrize(("choice", "lookahead"), [("required", 4), pytest.param(NAMED, 0, marks=pytest.mark.slow)])
def test_a_call_that_must_be_is_made(client: openai.OpenAI, choice: Any, lookahead: int) -> None:
    more: Any = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"lookahead": lookahead}}
    [answer] = client.chat.completions.create(**asked(**more)).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    check(call)
    if choice is NAMED:
        assert call.function.name == "get_weather"
    with client.chat.completions.stream(**asked(**more)) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        [final] = stream.get_final_completion().choices
    assert len(done) == 1
    [same] = final.message.tool_calls
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    assert final.finish_reason == "tool_calls"


def test_a_chat_goes_on_with_the_result_of_a_call(client: openai.OpenAI) -> None:
    [answer] = client.chat.completions.create(**asked(tool_choice=NAMED)).choices
    [call] = answer.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*SAID, answer.message.model_dump(exclude_none=True), result]
    [after] = client.chat.completions.create(**asked(messages=messages, tool_choice="none", max_tokens=8)).choices
    assert after.finish_reason in ("stop", "length")
    assert after.message.tool_calls is None


def test_a_chat_that_is_broken_off_in_a_call_is_over(client: openai.OpenAI, caller: Server) -> None:
    endless: Any = [
        {
            "type": "function",
            "function": {
                "name": "count",
                "parameters": {
                    "type": "object",
                    "properties": {"all": {"type": "array", "items": DAYS, "minItems": 10_000}},
                    "required": ["all"],
                },
            },
        }
    ]
    stream = client.chat.completions.create(
        **asked(tools=endless, tool_choice="required", max_tokens=100_000, stream=True)
    )
    chunk = next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.tool_calls)
    assert chunk.choices[0].delta.tool_calls[0].function.name == "count"
    assert caller.health()["streams"] == 1
    stream.close()
    caller.until_idle()


def test_a_strict_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    def tools(*, is_strict: bool) -> Any:
        schema = {"type": "object", "properties": {}, "not": {"required": ["a"]}}
        return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": is_strict}}]

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(tools=tools(is_strict=True)))
    assert refused.value.param == "tools"
    answer = client.chat.completions.create(**asked(tools=tools(is_strict=False), max_tokens=4))
    assert answer.choices[0].finish_reason == "length"
