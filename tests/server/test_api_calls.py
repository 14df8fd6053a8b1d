"""Tool calls in each API: an answer in pieces of every size, as events and as a whole."""

import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

from asgi import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, STREAMED, ScriptedCheck, Served, looping, simulated_server
from assembled import assembled_chat, assembled_message, assembled_response, partial, text_of_message, text_of_response
from scripted import ScriptedModel
from sweeps import sweep
from tool_call_cases import TOOLS, call_format
from tool_letters import ASKED, OSLO, USER, ToolLetters, on_calling_server, serve_calls
from tool_letters import TOOLS as TOLD

from protocol.prices import Estimates
from protocol.statistics import Counts
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.events import Answer
from runtime.server.answers.api import AnswerSplitter, BegunAnswer, Event, Serializer
from runtime.server.answers.body import parse_request
from runtime.server.answers.chat import function_of
from runtime.server.answers.preparation import Preparation
from runtime.server.answers.request import GenerationRequest
from runtime.server.anthropic.requests import MessagesRequest
from runtime.server.anthropic.serializer import MessageSerializer
from runtime.server.openai.requests import ChatRequest
from runtime.server.openai.serializers import ChatSerializer
from runtime.server.responses.requests import parse_response_request
from runtime.server.responses.serializer import ResponseSerializer
from runtime.server.responses.store import ResponseStore

FIRST = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
SECOND = '<tool_call>{"name": "search", "arguments": {"query": "a } b", "tags": []}}</tool_call>'
BROKEN = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": }}</tool_call>'

SIX = ("multiply", {"a": 2, "b": 3})
STATISTICS = Counts(prompt_tokens=7, cached_tokens=2, generated_tokens=5).snapshot(estimates=Estimates(*[0.0] * 7))

# What the model writes, whether it ends by itself, and the text and the calls in it.
CASES = {
    "a call": (FIRST, True, "", [SIX]),
    "text and calls": (f"Yes.\n{FIRST}\n{SECOND}", True, "Yes.", [SIX, ("search", {"query": "a } b", "tags": []})]),
    "a malformed call": (f"So: {BROKEN} or {FIRST}", True, f"So: {BROKEN} or", [SIX]),
    "a call that is cut off": (FIRST[:60], False, "", []),
    "a call and one that is cut off": (f"{FIRST}{SECOND[:60]}", False, "", [SIX]),
    "no call": ("Nothing.", True, "Nothing.", []),
}


def answer(request: GenerationRequest, tokenizer: Any = None) -> BegunAnswer:
    ids = (f"call_{i}" for i in itertools.count())
    reader = AnswerReader(format=call_format("json_tools"), tools=TOOLS, new_id=lambda: next(ids))
    splitter = AnswerSplitter(reader)
    return BegunAnswer(request, "tiny", tokenizer, splitter, lambda id: None)


def tokens_of(text: str, size: int, *, is_complete: bool) -> list[Token]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    tokens = [Token(i, piece, i, drafted_by=None) for i, piece in enumerate(pieces)]
    reason = "stop" if is_complete else "length"
    return [*tokens, Token(0, "", len(tokens), drafted_by=None, finish_reason=reason)]


def streamed(serializer: Serializer, tokens: list[Token]) -> list[Any]:
    events: list[Event] = [*serializer.first_events(STATISTICS)]
    for token in tokens:
        events += serializer.events([token], STATISTICS)
    events += serializer.last_events(STATISTICS)
    sent = [event.encoded().partition("data: ")[2] for event in events]
    return [json.loads(data) for data in sent if data != "[DONE]\n\n"]


every_case = sweep("case", CASES)
sizes = sweep("size", [1, 2, 7, 1000])


@every_case
@sizes
def test_calls_are_tool_calls_of_a_chat(case, size):
    text, is_complete, said, calls = CASES[case]
    tokens = tokens_of(text, size, is_complete=is_complete)
    body = parse_request(ChatRequest, b'{"messages": [{"role": "user", "content": "a"}]}')

    def serializer() -> ChatSerializer:
        return ChatSerializer(body, answer(body.generation()))

    whole: Any = serializer().whole(tokens, STATISTICS)
    for each in (whole, assembled_chat([event for event in streamed(serializer(), tokens) if "choices" in event])):
        (choice,) = each["choices"]
        found = [dict(call["function"]) for call in choice["message"].get("tool_calls", ())]
        if each is whole or case != "a malformed call":  # its beginning was given as a call
            assert (choice["message"]["content"] or "").strip() == said
        if not is_complete:
            assert found.pop()["arguments"] == text[text.rindex("{") :]
        if each is not whole:
            # A call that breaks cannot be taken back; its arguments are no JSON.
            found = [call for call in found if is_json(call["arguments"])]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
        assert choice["finish_reason"] == ("length" if not is_complete else "tool_calls" if calls else "stop")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@every_case
@sizes
def test_calls_are_blocks_of_a_message(case, size):
    text, is_complete, said, calls = CASES[case]
    tokens = tokens_of(text, size, is_complete=is_complete)
    request = parse_request(MessagesRequest, b'{"messages": [{"role": "user", "content": "a"}]}').generation()
    whole: Any = MessageSerializer(answer(request)).whole(tokens, STATISTICS)
    message = assembled_message(streamed(MessageSerializer(answer(request)), tokens))
    assert text_of_message(message) == text_of_message(whole) == said
    uses = [block for block in whole["content"] if block["type"] == "tool_use"]
    if not is_complete:
        assert uses.pop()["input"] == {}
    assert [(use["name"], use["input"]) for use in uses] == calls
    assert len({use["id"] for use in uses}) == len(uses)
    # A call that breaks cannot be taken back; its input is no object.
    given = [block for block in message["content"] if block["type"] == "tool_use" and block["input"] != partial("")]
    assert [(use["name"], use["input"]) for use in given if isinstance(use["input"], dict)] == calls
    expected = "max_tokens" if not is_complete else "tool_use" if calls else "end_turn"
    assert message["stop_reason"] == whole["stop_reason"] == expected


@every_case
@sizes
def test_calls_are_items_of_a_response(case, size):
    text, is_complete, said, calls = CASES[case]
    tokens = tokens_of(text, size, is_complete=is_complete)
    store = ResponseStore(2, 10**6)

    def serializer() -> ResponseSerializer:
        parsed = parse_response_request(b'{"input": "a"}', store)
        return ResponseSerializer(parsed, store, answer(parsed.generation))

    whole: Any = serializer().whole(tokens, STATISTICS)
    response = assembled_response(streamed(serializer(), tokens))
    for each in (whole, response):
        assert text_of_response(each) == said
        items = [item for item in each["output"] if item["type"] == "function_call"]
        if not is_complete:
            cut = items.pop()
            assert (cut["status"], cut["arguments"]) == ("incomplete", text[text.rindex("{") :])
        assert all(item["status"] == "completed" for item in items)
        assert [(item["name"], json.loads(item["arguments"])) for item in items] == calls
        assert [item["call_id"] for item in items] == list(dict.fromkeys(item["call_id"] for item in items))
        assert each["status"] == ("completed" if is_complete else "incomplete")
        # What a later response continues.
        kept = store.get(each["id"])
        messages = json.loads(kept.messages)
        assert messages[0] == {"role": "user", "content": "a"}
        stored = [call["id"] for message in messages[1:] for call in message.get("tool_calls", ())]
        assert stored == [item["call_id"] for item in items]


# --- with a server ---------------------------------------------------------------------------------

WEATHER = TOLD[0]


@every_case
def test_a_responses_log_probabilities_are_those_of_its_text(case):
    says, is_complete, text, _ = CASES[case]
    tokens = tokens_of(says, 3, is_complete=is_complete)
    asked = {"input": "a", "store": False, "include": ["message.output_text.logprobs"]}
    parsed = parse_response_request(json.dumps(asked).encode(), ResponseStore(1, 1))
    tokenizer = SimpleNamespace(decode=lambda ids: tokens[ids[0]].text)
    serializer = ResponseSerializer(parsed, ResponseStore(1, 1), answer(parsed.generation, tokenizer))
    response = assembled_response(streamed(serializer, tokens))
    found = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    # Tokens at the edges may be of both.
    for part in found:
        assert part["text"] in "".join(token["token"] for token in part["logprobs"])
        assert len(part["logprobs"]) <= len(part["text"]) / 3 + 2
    assert "".join(part["text"] for part in found).strip() == text


@on_calling_server(OSLO)
async def test_a_message_calls_a_tool_and_takes_its_result(server):
    named = WEATHER["function"]
    tools = [
        {"name": "weather", "description": named["description"], "input_schema": named["parameters"]},
        {"type": "web_search_20250305", "name": "web_search"},  # run by Anthropic's service, and left out
    ]
    asked = {"messages": [USER], "tools": tools, "max_tokens": 300}
    message = (await server.ask(MESSAGES, asked)).json
    streamed = assembled_message((await server.ask(MESSAGES, {**asked, "stream": True})).named_events)
    for each in (message, streamed):
        assert [(block["name"], block["input"]) for block in each["content"]] == [("weather", {"city": "oslo"})]
        assert each["stop_reason"] == "tool_use"
    assert server.tokenizer.told == [[WEATHER], [WEATHER]]
    counted = await server.ask(COUNT_TOKENS, asked)
    assert counted.json["input_tokens"] == message["usage"]["input_tokens"]
    assert server.tokenizer.told[-1] == [WEATHER]
    id = message["content"][0]["id"]
    result = {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "mild"}]}
    more = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    assert (await server.ask(MESSAGES, {**asked, "messages": [USER, *more], "max_tokens": 4})).status == 200
    assert_called_and_returned(server, id)


def assert_called_and_returned(server: Served, id: str) -> None:
    """Assert that the template was given a call of this id last, and its result."""
    *_, called, returned = server.tokenizer.seen[-1]
    assert [(call["id"], call["function"]["name"]) for call in called["tool_calls"]] == [(id, "weather")]
    assert (returned["role"], returned["tool_call_id"], returned["content"]) == ("tool", id, "mild")


@on_calling_server(OSLO)
async def test_a_response_calls_a_function_and_takes_its_output(server):
    tools = [{"type": "function", **WEATHER["function"]}, {"type": "web_search"}]
    asked = {"input": "weather", "tools": tools, "max_output_tokens": 300}
    response = (await server.ask(RESPONSES, asked)).json
    streamed = assembled_response((await server.ask(RESPONSES, {**asked, "stream": True})).named_events)
    for each in (response, streamed):
        assert [(item["name"], item["arguments"]) for item in each["output"]] == [("weather", '{"city": "oslo"}')]
        assert (each["status"], each["tools"][0]["name"]) == ("completed", "weather")
    assert server.tokenizer.told == [[WEATHER], [WEATHER]]
    id = response["output"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": id, "output": "mild"}
    more = {"input": [output], "previous_response_id": response["id"]}
    for body in (more, {"input": [USER, *response["output"], output]}):
        assert (await server.ask(RESPONSES, {**asked, **body, "max_output_tokens": 4})).status == 200
        assert_called_and_returned(server, id)


def chat_tools(*names: str, **fields: Any) -> Any:
    """The tools of a chat with some functions."""
    tools = [function_of(name=name, parameters={"type": "object"} if len(names) == 1 else None) for name in names]
    body = {"messages": [USER], "tools": tools, **fields}
    return parse_request(ChatRequest, json.dumps(body).encode()).generation().chat.tools


@sweep(
    ("choice", "wanted", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        ({"type": "none"}, "none", None),
    ],
)
def test_a_tool_choice_of_a_message_is_that_of_a_chat(choice, wanted, is_parallel):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"messages": [USER], "max_tokens": 8, "tools": tools, "tool_choice": choice}
    request = parse_request(MessagesRequest, json.dumps(body).encode()).generation()
    assert request.chat.tools == chat_tools("f", tool_choice=wanted, parallel_tool_calls=is_parallel)


ALLOWED = {"type": "allowed_tools", "mode": "required"}
TOLD_IN_A_CHAT = {"mode": "required", "tools": [function_of(name="g")]}
ALLOWED_IN_A_CHAT = {"type": "allowed_tools", "allowed_tools": TOLD_IN_A_CHAT}


@sweep(
    ("choice", "wanted"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({**ALLOWED, "tools": [{"type": "function", "name": "g"}]}, ALLOWED_IN_A_CHAT),
    ],
)
def test_a_tool_choice_of_a_response_is_that_of_a_chat(choice, wanted):
    body = {"input": "a", "tools": [{"type": "function", "name": name} for name in "fg"], "tool_choice": choice}
    request = parse_response_request(json.dumps(body).encode(), ResponseStore(0, 0)).generation
    assert request.chat.tools == chat_tools("f", "g", tool_choice=wanted)


# --- what is special of chats ---------------------------------------------------------------------


@on_calling_server(OSLO)
async def test_arguments_are_streamed_while_they_are_written(server):
    streamed = await server.ask(CHAT, {**ASKED, "stream": True, "lookahead": 0})
    choices = [choice for event in streamed.events for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    deltas = [call["function"]["arguments"] for call in calls]
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
def test_calls_without_their_marker_are_as_many_as_may_be(body, content, num_calls):
    request = parse_request(ChatRequest, json.dumps({**ASKED, **body}).encode()).generation()
    model: Any = SimpleNamespace(runtime=SimpleNamespace(tokenizer=ToolLetters()))
    preparation = Preparation(cast(Any, None), model, request, "")
    reader, answer = preparation.reader(ReasoningTracker(preparation.tokenizer, ())), Answer()
    answer.add([*reader.add(f"{BARE} {BARE}"), *reader.finish(is_complete=True)])
    assert (answer.content, len(answer.calls)) == (content, num_calls)


@sweep("body", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
@on_calling_server(OSLO)
async def test_without_tools_nothing_is_told_apart(server, body):
    choice = (await server.ask(CHAT, {**ASKED, **body})).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (OSLO, "stop")
    assert server.tokenizer.told == [None]


def test_calls_and_results_of_the_past_reach_the_template():
    def call_of(id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call_of("c1", "weather", '{"city": "oslo"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "", "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": [{"type": "text", "text": "noon"}]},
    ]
    seen = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call_of("c1", "weather", {"city": "oslo"})]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {"role": "assistant", "content": "", "tool_calls": [call_of("call_0", "clock", {})]},
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
async def test_the_model_is_told_of_all_tools_where_some_are_allowed(server):
    for names in (("clock", "weather"), ("clock",)):
        await server.ask(CHAT, {**ASKED, "max_tokens": 1, "tool_choice": allowed(*names)})
    assert server.tokenizer.told == [TOLD, TOLD]


def test_a_prompt_that_is_too_long_is_refused_before_a_grammar_is_made():
    check = ScriptedCheck()

    async def test(server: Served) -> None:
        refused = await server.ask(CHAT, {**ASKED, "tool_choice": "required"})
        assert refused.fault["code"] == "context_length_exceeded"
        assert check.asked == []

    simulated_server(test, ScriptedModel(looping, context_length=10), tokenizer=ToolLetters(), check=check)


@on_calling_server(OSLO)
async def test_a_model_without_calls_cannot_be_made_to_call_tools(server):
    server.tokenizer.has_tool_calling = False
    choice = (await server.ask(CHAT, ASKED)).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (OSLO, "stop")
    assert server.tokenizer.told == [TOLD]
    refused = await server.ask(CHAT, {**ASKED, "tool_choice": "required"})
    assert refused.status == 400
    assert "mlx-lm knows no format of calls for this model" in refused.json["error"]["message"]


@on_calling_server(f"<t>hm</t> {OSLO}", thinks=True)
async def test_the_reasoning_before_a_call_is_reasoning(server):
    message = (await server.ask(CHAT, ASKED)).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("hm", None, 1)


@STREAMED
@on_calling_server(f"hm {OSLO} so", thinks=True, template="chat<t>")
async def test_reasoning_that_a_call_has_ended_is_counted_to_there(server, stream):
    asked = {"input": "weather", "tools": [{"type": "function", **each["function"]} for each in TOLD]}
    answer = await server.ask(RESPONSES, {**asked, "top_logprobs": 1, "stream": stream})
    response = answer.named_events[-1]["response"] if stream else answer.json
    *_, message = response["output"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call", "message"]
    (text,) = message["content"]
    assert "".join(token["token"] for token in text["logprobs"]) == text["text"] == " so"
    # A letter each. Those of the call's head are seen to be one at its end.
    num_tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len("hm <tool_call>{")
