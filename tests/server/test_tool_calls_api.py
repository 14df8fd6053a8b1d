"""Tool calls at /v1/chat/completions, over scripted models in simulated time and without sockets."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from asgi import CHAT, RESPONSES, STREAMED, ScriptedCheck, Served, looping, simulated_server
from scripted import ScriptedModel
from sweeps import sweep
from tool_letters import ASKED, OSLO, TOOLS, USER, ToolLetters, on_calling_server, serve_calls

from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.tool_calls.events import Answer
from runtime.server.answers.body import parse_request
from runtime.server.answers.preparation import Preparation
from runtime.server.openai.requests import ChatRequest


@on_calling_server(OSLO)
async def test_arguments_are_streamed_while_they_are_written(server: Served) -> None:
    streamed = await server.ask(CHAT, {**ASKED, "stream": True, "lookahead": 0})
    deltas = [
        call["function"]["arguments"]
        for event in streamed.events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(deltas) == '{"city": "oslo"}'
    assert len(deltas) > 4


BARE = '{"name": "clock", "arguments": {}}'


@sweep(
    ("body", "content", "num_calls"),
    [
        ({}, "", 2),
        ({"parallel_tool_calls": False}, f" {BARE}", 1),
        ({"response_format": {"type": "json_object"}}, f"{BARE} {BARE}", 0),  # an answer that was asked for
    ],
)
def test_calls_without_their_marker_are_as_many_as_may_be(body: dict[str, Any], content: str, num_calls: int) -> None:
    request = parse_request(ChatRequest, json.dumps({**ASKED, **body}).encode()).generation()
    model: Any = SimpleNamespace(runtime=SimpleNamespace(tokenizer=ToolLetters()))
    preparation = Preparation(cast(Any, None), model, request, "")
    reader, answer = preparation.reader(ReasoningTracker(preparation.tokenizer, ())), Answer()
    answer.add([*reader.add(f"{BARE} {BARE}"), *reader.finish(is_complete=True)])
    assert (answer.content, len(answer.calls)) == (content, num_calls)


@sweep("body", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
@on_calling_server(OSLO)
async def test_without_tools_nothing_is_told_apart(server: Served, body: dict[str, Any]) -> None:
    choice = (await server.ask(CHAT, {**ASKED, **body})).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (OSLO, "stop")
    assert server.tokenizer.told == [None]


def test_calls_and_results_of_the_past_reach_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "", "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": [{"type": "text", "text": "noon"}]},
    ]
    seen = [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "oslo"}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "clock", "arguments": {}}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "call_0", "name": "clock"},
    ]

    async def test(server: Served) -> None:
        answer = await server.ask(CHAT, {**ASKED, "messages": messages})
        assert answer.text == "wet"
        assert server.tokenizer.seen == [seen]

    serve_calls(test, "wet", seen)


def allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


@on_calling_server("")
async def test_the_model_is_told_of_all_tools_where_some_are_allowed(server: Served) -> None:
    for names in (("clock", "weather"), ("clock",)):
        await server.ask(CHAT, {**ASKED, "max_tokens": 1, "tool_choice": allowed(*names)})
    assert server.tokenizer.told == [TOOLS, TOOLS]


@on_calling_server("")
@sweep(
    ("body", "says"),
    [
        ({"tools": [{"function": {}}]}, "tools[0] must have a name of 1 to 128 letters"),
        ({"tools": [{"function": {"name": "a b"}}]}, "got 'a b'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools have the name 'weather'"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "parameters must be a JSON schema"),
        ({"tool_choice": "some"}, 'tool_choice must be "none", "auto", "required" or the name of a tool'),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "got 'x'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"tool_choice": allowed("x")}, "the allowed tools must be some of the tools ('weather', 'clock'), got ['x']"),
        ({"tool_choice": allowed()}, "got []"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice must be"),
    ],
)
async def test_tools_that_cannot_be_are_refused_with_what_would_be_right(
    server: Served, body: dict[str, Any], says: str
) -> None:
    refused = await server.ask(CHAT, {**ASKED, **body})
    assert refused.status == 400
    assert says in refused.json["error"]["message"]
    assert refused.json["error"]["param"] in ("tools", "tool_choice")


def test_a_prompt_that_is_too_long_is_refused_before_a_grammar_is_made() -> None:
    check = ScriptedCheck()

    async def test(server: Served) -> None:
        refused = await server.ask(CHAT, {**ASKED, "tool_choice": "required"})
        assert refused.fault["code"] == "context_length_exceeded"
        assert check.asked == []

    simulated_server(test, ScriptedModel(looping, context_length=10), tokenizer=ToolLetters(), check=check)


@on_calling_server(OSLO)
async def test_a_model_without_calls_cannot_be_made_to_call_tools(server: Served) -> None:
    server.tokenizer.has_tool_calling = False
    choice = (await server.ask(CHAT, ASKED)).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (OSLO, "stop")
    assert server.tokenizer.told == [TOOLS]
    refused = await server.ask(CHAT, {**ASKED, "tool_choice": "required"})
    assert refused.status == 400
    assert "mlx-lm knows no format of calls for this model" in refused.json["error"]["message"]


@on_calling_server(f"<t>hm</t> {OSLO}", thinks=True)
async def test_the_reasoning_before_a_call_is_reasoning(server: Served) -> None:
    message = (await server.ask(CHAT, ASKED)).json["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


@STREAMED
@on_calling_server(f"hm {OSLO} so", thinks=True, template="chat<t>")
async def test_reasoning_that_a_call_has_ended_is_counted_to_there(server: Served, stream: bool) -> None:
    asked = {"input": "weather", "tools": [{"type": "function", **each["function"]} for each in TOOLS]}
    answer = await server.ask(RESPONSES, {**asked, "top_logprobs": 1, "stream": stream})
    response = answer.named_events[-1]["response"] if stream else answer.json
    *_, message = response["output"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call", "message"]
    (text,) = message["content"]
    assert "".join(token["token"] for token in text["logprobs"]) == text["text"] == " so"
    # A letter each. Those of the call's head are seen to be one at its end.
    num_tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len("hm <tool_call>{")
