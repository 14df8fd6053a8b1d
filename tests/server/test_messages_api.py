"""Anthropic's API: bodies, events and errors, over scripted models in simulated time and without sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import (
    CHAT,
    COUNT_TOKENS,
    HELLO,
    MESSAGES,
    Letters,
    Served,
    direct,
    looping,
    models,
    on_server,
    saying,
    simulated_server,
    watched_streams,
)
from assembled import assembled_message, text_of_message
from pydantic import TypeAdapter
from scripted import ScriptedModel, priced
from sweeps import sweep

from protocol.settings import settings_from
from runtime.server.answers.request import SchemaJson
from runtime.server.anthropic.bodies import AnthropicMessage
from runtime.server.anthropic.requests import MessagesRequest, parse_chat
from runtime.server.errors import ErrorResponse
from runtime.server.limits import Limits

ASKED: dict[str, Any] = {**HELLO, "max_tokens": 20}

# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["max_tokens", "stop_sequence", "end_turn"])
def test_events_add_up_to_the_whole_message(ending: str) -> None:
    start = len(Letters().apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        whole = (await direct(server, HELLO, max_tokens=20)).text
        asked = {**ASKED, "stop_sequences": [whole[7:10]]} if ending == "stop_sequence" else ASKED
        answer = await server.ask(MESSAGES, asked)
        TypeAdapter(AnthropicMessage).validate_python(answer.json, strict=True)
        streamed = await server.ask(MESSAGES, {**asked, "stream": True})
        assert streamed.is_whole
        message = assembled_message(streamed.named_events)
        expected = whole.partition(whole[7:10])[0] if ending == "stop_sequence" else whole
        assert text_of_message(message) == text_of_message(answer.json) == expected
        for each in (message, answer.json):
            assert each["stop_reason"] == ending
            assert each["stop_sequence"] == (whole[7:10] if ending == "stop_sequence" else None)
            assert (each["type"], each["role"], each["model"]) == ("message", "assistant", "scripted")
            assert each["id"].startswith("msg_")

    pair = models() if ending != "end_turn" else (ScriptedModel(saying("yes, a word.", start)),)
    simulated_server(test, *pair)


@on_server()
async def test_usage_tells_what_was_cached_apart_from_what_was_read(server: Served) -> None:
    seen = watched_streams(server)
    answer = await server.ask(MESSAGES, ASKED)
    streamed = await server.ask(MESSAGES, {**ASKED, "stream": True})
    usages = [answer.json["usage"], streamed.named_events[-2]["usage"]]
    for usage, (_, stream) in zip(usages, seen, strict=True):
        statistics = stream.statistics()
        assert usage == {
            "input_tokens": statistics.prompt_tokens - statistics.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": statistics.cached_tokens,
            "output_tokens": 20,
        }
    assert usages[0]["cache_read_input_tokens"] == 0 < usages[1]["cache_read_input_tokens"]
    # The prompt's length is known from the beginning.
    assert streamed.named_events[0]["message"]["usage"]["input_tokens"] == usages[0]["input_tokens"]


@sweep(
    ("text", "blocks"),
    [
        ("<t> hm so </t> yes", [("thinking", "hm so"), ("text", "yes")]),
        ("first <t>hm</t> then", [("text", "first "), ("thinking", "hm"), ("text", "then")]),
        ("<t>never ends", [("thinking", "never ends")]),
        ("", []),
    ],
)
def test_reasoning_is_blocks_of_their_own_in_their_order(text: str, blocks: Any) -> None:
    tokenizer = Letters(thinks=True)
    start = len(tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        answer = await server.ask(MESSAGES, ASKED)
        streamed = assembled_message((await server.ask(MESSAGES, {**ASKED, "stream": True})).named_events)
        for message in (answer.json, streamed):
            assert [(block["type"], block[block["type"]]) for block in message["content"]] == blocks
            assert all(block["signature"] == "" for block in message["content"] if block["type"] == "thinking")

    simulated_server(test, ScriptedModel(saying(text, start)), tokenizer=tokenizer)


@on_server(looping, price=priced(prefill=40.0, decode=40.0, verify=40.0))
async def test_a_stream_without_news_is_kept_alive_by_pings(server: Served) -> None:
    answer = await server.ask(MESSAGES, {**ASKED, "max_tokens": 3, "stream": True, "lookahead": 0})
    assert [event["type"] for event in answer.named_events].count("ping") >= 2 * 3
    assert len(text_of_message(assembled_message(answer.named_events))) == 3


@on_server()
async def test_a_client_that_leaves_ends_its_generation(server: Served) -> None:
    async with server.exchange(MESSAGES, {**ASKED, "max_tokens": 500, "stream": True}) as leaving:
        await leaving.until(lambda answer: b"text_delta" in answer.body)
        leaving.leave()
    assert await server.outcomes() == {"cancelled": 1}


# --- requests -------------------------------------------------------------------------------------


@on_server()
async def test_fields_are_the_settings_that_they_stand_for(server: Served) -> None:
    seen = watched_streams(server)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["☂"], "seed": 3, "lookahead": 2}
    await server.ask(MESSAGES, {**ASKED, **fields})
    wanted = {**fields, "stop": ["☂"], "max_tokens": 20, "reuse_prefix": True}
    del wanted["stop_sequences"]
    assert [each for each, _ in seen] == [settings_from(wanted)]


@on_server()
async def test_a_conversation_is_that_of_a_chat(server: Served) -> None:
    conversation = {
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": None}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "two"},
                ],
            },
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "three"}}]},
        ],
    }
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
        {"role": "user", "content": "three"},
    ]
    answer = await server.ask(MESSAGES, {**conversation, "max_tokens": 8})
    same = await server.ask(CHAT, {"messages": chat, "max_tokens": 8})
    assert server.tokenizer.seen[-1] == server.tokenizer.seen[-2] == chat
    assert text_of_message(answer.json) == same.text


@on_server()
async def test_what_a_client_sends_by_itself_is_not_refused(server: Served) -> None:
    by_itself = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "context_management": {"edits": []},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "tools": [],
        "system": "",
    }
    content = [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "5m"}, "citations": None}
    ]
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    asked = {**ASKED, **by_itself, "messages": [{"role": "user", "content": content}]}
    answer = await server.ask(MESSAGES, asked, headers=headers)
    assert answer.status == 200
    assert text_of_message(answer.json) == text_of_message((await server.ask(MESSAGES, ASKED)).json)


@sweep(
    ("thinking", "variables"),
    [
        (None, {}),
        ("enabled", {"enable_thinking": True}),
        ("adaptive", {"enable_thinking": True}),
        ("disabled", {"enable_thinking": False}),
    ],
)
def test_thinking_is_what_the_template_is_told(thinking: str | None, variables: Any) -> None:
    body = {**ASKED, "thinking": None if thinking is None else {"type": thinking}}
    assert parse_chat(MessagesRequest, json.dumps(body).encode()).template_variables == variables


def test_a_format_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    chat = parse_chat(MessagesRequest, json.dumps(body).encode())
    assert isinstance(chat.response_format, SchemaJson)
    assert chat.response_format.json_schema.schema_ == schema
    assert chat.template_variables == {"reasoning_effort": "low"}


@on_server(limits=Limits(max_prompt_tokens=100))
async def test_tokens_are_counted_without_generating(server: Served) -> None:
    seen = watched_streams(server)
    counted = await server.ask(COUNT_TOKENS, HELLO)
    assert seen == []
    answer = await server.ask(MESSAGES, ASKED)
    assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}
    # Also of a prompt that would be refused, so that a client knows by how much.
    long = await server.ask(COUNT_TOKENS, {"messages": [{"role": "user", "content": "word " * 100}]})
    assert long.json["input_tokens"] > 500
    assert await server.outcomes() == {"finished": 1}


# --- errors ---------------------------------------------------------------------------------------


@sweep(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"messages": []}, "messages must be a list of at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0 must be an object whose",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role must be 'user', 'assistant' or 'system'"),
        ({"seed": -7}, "seed must be at least"),
    ],
)
@on_server()
async def test_a_wrong_field_is_named_in_the_form_of_this_api(server: Served, fields: Any, message: str) -> None:
    answer = await server.ask(MESSAGES, {**ASKED, **fields})
    assert answer.status == 400
    assert set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert message in answer.json["error"]["message"]


@on_server(api_key="s3cret", limits=Limits(max_body_bytes=2000))
async def test_every_error_has_the_form_and_the_type_of_this_api(server: Served) -> None:
    keyed = {"content-type": "application/json"}
    wrong = await server.ask(MESSAGES, ASKED, headers={**keyed, "x-api-key": "another"})
    right = await server.ask(MESSAGES, ASKED, headers={**keyed, "x-api-key": "s3cret"})
    bearer = await server.ask(MESSAGES, ASKED, headers={**keyed, "authorization": "Bearer s3cret"})
    assert (wrong.status, right.status, bearer.status) == (401, 200, 200)
    assert wrong.json["error"]["type"] == "authentication_error"
    keyed["x-api-key"] = "s3cret"
    long = await server.ask(MESSAGES, b" " * 3000, headers=keyed)
    assert (long.status, long.json["error"]["type"]) == (413, "request_too_large")
    nowhere = await server.ask(f"{MESSAGES}/batches", headers=keyed)
    assert (nowhere.status, nowhere.json["error"]["type"]) == (404, "not_found_error")
    method = await server.ask(MESSAGES, headers=keyed, method="GET")
    assert (method.status, method.json["error"]["type"]) == (405, "invalid_request_error")


@on_server(max_streams=1, max_waiting=0)
async def test_a_full_house_is_a_rate_limit(server: Served) -> None:
    async with server.exchange(MESSAGES, {**ASKED, "max_tokens": 500, "stream": True}) as first:
        await first.until(lambda answer: b"text_delta" in answer.body)
        for path in (MESSAGES, COUNT_TOKENS):
            answer = await server.ask(path, ASKED)
            assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        first.leave()


@pytest.mark.parametrize("stream", [False, True])
def test_a_target_that_fails_is_an_error_of_this_form(stream: bool) -> None:
    async def test(server: Served) -> None:
        answer = await server.ask(MESSAGES, {**ASKED, "lookahead": 0, "stream": stream})
        error = answer.named_events[-1] if stream else answer.json
        assert error["type"] == "error"
        assert error["error"]["type"] == "overloaded_error"
        assert "the target model failed" in error["error"]["message"]
        assert await server.outcomes() == {"failed": 1}

    simulated_server(test, ScriptedModel(looping, fails={"feed": range(8, 10_000)}))


def test_a_named_tool_needs_its_name() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {**ASKED, "tools": [tool], "tool_choice": {"type": "tool"}}
    with pytest.raises(ErrorResponse, match=r"tool_choice\.name is missing"):
        parse_chat(MessagesRequest, json.dumps(body).encode())
