"""Tool calls in each API: an answer in pieces of every size, as events and as a whole."""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from asgi import (
    CHAT,
    COUNT_TOKENS,
    HELLO,
    MESSAGES,
    RESPONSES,
    STREAMED,
    ScriptedCheck,
    Served,
    looping,
    simulated_server,
)
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
from runtime.server.answers.api import AnswerSplitter, BegunAnswer, Serializer, ServerSentEvent
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


STORE = ResponseStore(1000, 10**7)


def answer(request: GenerationRequest, tokenizer: Any = None) -> BegunAnswer:
    ids = (f"call_{i}" for i in itertools.count())
    reader = AnswerReader(format=call_format("json_tools"), tools=TOOLS, new_id=lambda: next(ids))
    splitter = AnswerSplitter(reader)
    return BegunAnswer(request, "tiny", tokenizer, splitter, lambda id: None)


def serializer(path: str) -> Serializer:
    """The serializer of an answer to a request in which nothing but text was asked for."""
    if path == RESPONSES:
        parsed = parse_response_request(b'{"input": "hello"}', STORE)
        return ResponseSerializer(parsed, STORE, answer(parsed.generation))
    body = json.dumps(HELLO).encode()
    if path == MESSAGES:
        return MessageSerializer(answer(parse_request(MessagesRequest, body).generation()))
    request = parse_request(ChatRequest, body)
    return ChatSerializer(request, answer(request.generation()))


def tokens_of(text: str, size: int, *, is_complete: bool) -> list[Token]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    tokens = [Token(i, piece, i, drafted_by=None) for i, piece in enumerate(pieces)]
    reason = "stop" if is_complete else "length"
    return [*tokens, Token(0, "", len(tokens), drafted_by=None, finish_reason=reason)]


def streamed(serializer: Serializer, tokens: list[Token]) -> list[Any]:
    events: list[ServerSentEvent] = [*serializer.first_events(STATISTICS)]
    for token in tokens:
        events += serializer.events([token], STATISTICS)
    events += serializer.last_events(STATISTICS)
    sent = [event.encoded().partition("data: ")[2] for event in events]
    return [json.loads(data) for data in sent if data != "[DONE]\n\n"]


def told(path: str, body: Any) -> tuple[str, list[Any], list[str], str]:
    """The text of a body, its calls and their ids, and why it has ended; arguments that are no JSON are text."""
    if path == CHAT:
        (choice,) = body["choices"]
        message = choice["message"]
        parts = message.get("tool_calls", ())
        calls = [(part["function"]["name"], partial(part["function"]["arguments"])) for part in parts]
        return message["content"] or "", calls, [part["id"] for part in parts], choice["finish_reason"]
    if path == MESSAGES:
        parts = [block for block in body["content"] if block["type"] == "tool_use"]
        calls = [(block["name"], block["input"]) for block in parts]
        return text_of_message(body), calls, [block["id"] for block in parts], body["stop_reason"]
    parts = [item for item in body["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in parts[:-1]] == ["completed"] * len(parts[:-1])
    assert parts == [] or parts[-1]["status"] == body["status"]
    calls = [(item["name"], partial(item["arguments"])) for item in parts]
    return text_of_response(body), calls, [item["call_id"] for item in parts], body["status"]


# How events are put together, what is in one with arguments, and the ends: in calls, by itself, and cut off.
OF_APIS: dict[str, tuple[Callable[[list[Any]], Any], str, tuple[str, str, str]]] = {
    CHAT: (assembled_chat, '"arguments"', ("tool_calls", "stop", "length")),
    MESSAGES: (assembled_message, "partial_json", ("tool_use", "end_turn", "max_tokens")),
    RESPONSES: (assembled_response, "arguments.delta", ("completed", "completed", "incomplete")),
}
every_case = sweep("case", CASES)


@sweep("path", OF_APIS)
@every_case
@sweep("size", [1, 2, 7, 1000])
def test_calls_are_those_of_each_api_and_are_streamed_while_they_are_written(path, case, size):
    text, is_complete, said, calls = CASES[case]
    assembled, of_arguments, (called, ended, cut_off) = OF_APIS[path]
    tokens = tokens_of(text, size, is_complete=is_complete)
    whole: Any = serializer(path).whole(tokens, STATISTICS)
    events = streamed(serializer(path), tokens)
    for body in (whole, assembled(events)):
        told_text, found, ids, end = told(path, body)
        assert end == (cut_off if not is_complete else called if calls else ended)
        # A call that breaks cannot be taken back from a stream; only a response can say that it is none.
        is_left = case == "a malformed call" and body is not whole and path != RESPONSES
        if not (is_left and path == CHAT):  # where its beginning is not given as text again
            assert told_text.strip() == said
        if not is_complete:
            begun = {} if path == MESSAGES and body is whole else text[text.rindex("{") :]
            assert found.pop()[1] == begun
        assert [call for call in found if not is_left or isinstance(call[1], dict)] == calls
        assert len(set(ids)) == len(ids)
        if path == RESPONSES:
            # What a later response continues.
            first, *more = json.loads(STORE.get(body["id"]).messages)
            assert first == {"role": "user", "content": "hello"}
            kept = [call["id"] for message in more for call in message.get("tool_calls", ())]
            assert kept == ids[: len(calls)]
    num_pieces = sum(of_arguments in json.dumps(event) for event in events)
    assert size > 1 or calls == [] or num_pieces > 4


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
    *_, called, returned = server.tokenizer.seen[-1]
    assert [(call["id"], call["function"]["name"]) for call in called["tool_calls"]] == [(id, "weather")]
    assert (returned["role"], returned["tool_call_id"], returned["content"]) == ("tool", id, "mild")


ALLOWED = {"type": "allowed_tools", "mode": "required"}
IN_A_CHAT = {"mode": "required", "tools": [function_of(name="g")]}


@sweep(
    ("path", "choice", "fields"),
    [
        (MESSAGES, {"type": "auto"}, {"tool_choice": "auto"}),
        (
            MESSAGES,
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (MESSAGES, {"type": "tool", "name": "f"}, {"tool_choice": function_of(name="f")}),
        (MESSAGES, {"type": "none"}, {"tool_choice": "none"}),
        (RESPONSES, "required", {"tool_choice": "required"}),
        (RESPONSES, {"type": "function", "name": "f"}, {"tool_choice": function_of(name="f")}),
        (
            RESPONSES,
            {**ALLOWED, "tools": [{"type": "function", "name": "g"}]},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": IN_A_CHAT}},
        ),
    ],
)
def test_a_tool_choice_is_that_of_a_chat(path, choice, fields):
    chat = {"messages": [USER], "tools": [function_of(name=name) for name in "fg"], **fields}
    expected = parse_request(ChatRequest, json.dumps(chat).encode()).generation()
    type = {"type": "function"} if path == RESPONSES else {}
    asked = {"messages": [USER], "input": [USER], "tools": [{**type, "name": name} for name in "fg"]}
    body = json.dumps({**asked, "tool_choice": choice}).encode()
    if path == RESPONSES:
        request = parse_response_request(body, STORE).generation
    else:
        request = parse_request(MessagesRequest, body).generation()
    assert request.chat.tools == expected.chat.tools


# --- what is special of chats ---------------------------------------------------------------------


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
