"""`/v1/responses`: bodies, events and stored responses, over scripted models in simulated time and without sockets."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from asgi import (
    CHAT,
    HELLO,
    RESPONSES,
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
from assembled import assembled_response, text_of_response
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scripted import ScriptedModel
from sweeps import sweep

from protocol.settings import settings_from
from runtime.generation.token_reader import Token
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.server.answers.api import Answer
from runtime.server.answers.request import SchemaJson
from runtime.server.answers.splitting import AnswerSplitter
from runtime.server.limits import Limits
from runtime.server.responses.bodies import ResponseBody
from runtime.server.responses.requests import parse_response_request
from runtime.server.responses.serializer import ResponseSerializer
from runtime.server.responses.store import ResponseStore, StoredResponse

ASKED: dict[str, Any] = {"input": "hello", "max_output_tokens": 20}

# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_events_add_up_to_the_whole_response(status: str) -> None:
    start = len(Letters().apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        whole = (await direct(server, HELLO, max_tokens=20)).text
        answer = await server.ask(RESPONSES, ASKED)
        TypeAdapter(ResponseBody).validate_python(answer.json, strict=True)
        streamed = await server.ask(RESPONSES, {**ASKED, "stream": True})
        assert streamed.is_whole
        response = assembled_response(streamed.named_events)
        assert text_of_response(response) == text_of_response(answer.json) == whole
        for each in (response, answer.json):
            assert each["status"] == each["output"][0]["status"] == status
            cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
            assert each["incomplete_details"] == cut
            assert each["id"].startswith("resp_")
            assert (each["model"], each["error"], each["max_output_tokens"]) == ("scripted", None, 20)

    pair = models() if status == "incomplete" else (ScriptedModel(saying("yes, a word.", start)),)
    simulated_server(test, *pair)


@on_server()
async def test_usage_is_what_the_statistics_say(server: Served) -> None:
    seen = watched_streams(server)
    answer = await server.ask(RESPONSES, ASKED)
    streamed = await server.ask(RESPONSES, {**ASKED, "stream": True})
    usages = [answer.json["usage"], streamed.named_events[-1]["response"]["usage"]]
    for usage, (_, stream) in zip(usages, seen, strict=True):
        statistics = stream.statistics()
        assert usage == {
            "input_tokens": statistics.prompt_tokens,
            "input_tokens_details": {"cached_tokens": statistics.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": statistics.prompt_tokens + 20,
        }
    assert usages[1]["input_tokens_details"]["cached_tokens"] > 0


@sweep(
    ("text", "items"),
    [
        ("<t> hm so </t> yes", [("reasoning", "hm so"), ("message", "yes")]),
        ("first <t>hm</t> then", [("message", "first "), ("reasoning", "hm"), ("message", "then")]),
        # Clients look for a message.
        ("<t>only", [("reasoning", "only"), ("message", "")]),
        ("", [("message", "")]),
    ],
)
def test_reasoning_is_items_of_their_own_in_their_order(text: str, items: Any) -> None:
    tokenizer = Letters(thinks=True)
    start = len(tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        answer = await server.ask(RESPONSES, ASKED)
        streamed = assembled_response((await server.ask(RESPONSES, {**ASKED, "stream": True})).named_events)
        for response in (answer.json, streamed):
            assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == items
            assert (response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) is ("<t>" in text)

    simulated_server(test, ScriptedModel(saying(text, start)), tokenizer=tokenizer)


LOGPROBS = {"include": ["message.output_text.logprobs"]}


@on_server()
async def test_log_probabilities_are_those_of_a_chat(server: Served) -> None:
    chat = await server.ask(CHAT, {**HELLO, "max_tokens": 20, "logprobs": True, "top_logprobs": 2})
    expected = chat.json["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in expected} == {2}
    for fields in ({**LOGPROBS, "top_logprobs": 2}, {"top_logprobs": 2}):
        answer = await server.ask(RESPONSES, {**ASKED, **fields})
        streamed = await server.ask(RESPONSES, {**ASKED, **fields, "stream": True})
        for response in (answer.json, assembled_response(streamed.named_events)):
            assert response["output"][0]["content"][0]["logprobs"] == expected
            assert response["top_logprobs"] == 2
    bare = (await server.ask(RESPONSES, {**ASKED, **LOGPROBS})).json["output"][0]["content"][0]["logprobs"]
    assert bare == [{**token, "top_logprobs": []} for token in expected]


def test_log_probabilities_are_those_of_the_text_and_not_of_the_reasoning() -> None:
    tokenizer = Letters(thinks=True)
    start = len(tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        answer = await server.ask(RESPONSES, {**ASKED, **LOGPROBS})
        streamed = await server.ask(RESPONSES, {**ASKED, **LOGPROBS, "stream": True})
        for response in (answer.json, assembled_response(streamed.named_events)):
            reasoning, message = (item["content"][0] for item in response["output"])
            assert "logprobs" not in reasoning
            assert "".join(token["token"] for token in message["logprobs"]).strip() == message["text"] == "yes"

    simulated_server(test, ScriptedModel(saying("<t> hm so </t> yes", start)), tokenizer=tokenizer)


def test_log_probabilities_are_there_where_the_answer_begins_in_reasoning_that_the_template_has_opened() -> None:
    # With a constraint, the whole text is the answer.
    letters: Any = Letters(thinks=True)
    parsed = parse_response_request(json.dumps({**ASKED, **LOGPROBS}).encode(), ResponseStore(1, 1))
    splitter = AnswerSplitter(AnswerReader(tags=None, is_thinking=False, format=None, tools=()), has_reasoning=False)
    serializer = ResponseSerializer(parsed, Answer("x", letters, splitter, watch=lambda id: None), ResponseStore(1, 1))  # type: ignore[arg-type, return-value]
    texts, statistics = list("yes"), cast(Any, None)
    tokens = [
        Token(letters.encode(text)[0], text, i, drafted_by=None, logprob=-1.0, is_thinking=True)
        for i, text in enumerate(texts)
    ]
    deltas = [json.loads(event.data) for event in serializer.events(tokens, statistics)]
    assert [each["token"] for delta in deltas for each in delta.get("logprobs", ())] == texts


@on_server()
async def test_settings_are_given_back(server: Served) -> None:
    given = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "user": "me",
        "store": False,
    }
    answer = await server.ask(RESPONSES, {**ASKED, **given, "reasoning": {"effort": "low", "summary": "auto"}})
    assert {name: answer.json[name] for name in given} == given
    assert answer.json["reasoning"] == {"effort": "low", "summary": "auto"}
    assert answer.json["text"] == {"format": {"type": "text"}}


@on_server()
async def test_a_client_that_leaves_ends_its_generation_which_is_not_stored(server: Served) -> None:
    async with server.exchange(RESPONSES, {"input": "hello", "max_output_tokens": 500, "stream": True}) as leaving:
        await leaving.until(lambda answer: b"output_text.delta" in answer.body)
        leaving.leave()
    assert await server.outcomes() == {"cancelled": 1}
    id = leaving.named_events[0]["response"]["id"]
    assert (await server.ask(f"{RESPONSES}/{id}")).status == 404


# --- requests -------------------------------------------------------------------------------------


@on_server()
async def test_fields_are_the_settings_that_they_stand_for(server: Served) -> None:
    seen = watched_streams(server)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["☂"], "seed": 3, "lookahead": 2}
    await server.ask(RESPONSES, {**ASKED, **fields})
    wanted = {**fields, "max_tokens": 20, "reuse_prefix": True}
    assert [each for each, _ in seen] == [settings_from(wanted)]


def test_a_format_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    parsed = parse_response_request(json.dumps({"input": "a", "text": {"format": given}}).encode(), ResponseStore(0, 0))
    assert isinstance(parsed.chat.response_format, SchemaJson)
    assert parsed.chat.response_format.json_schema.schema_ == schema
    for given, type in (({"type": "json_object"}, "json_object"), ({"type": "text"}, None)):
        body = json.dumps({"input": "a", "text": {"format": given, "verbosity": "low"}}).encode()
        found = parse_response_request(body, ResponseStore(0, 0)).chat.response_format
        assert (None if found is None else found.type) == type


@pytest.mark.parametrize(
    ("effort", "variables"), [("none", {"enable_thinking": False}), ("high", {"reasoning_effort": "high"}), (None, {})]
)
def test_effort_is_what_the_template_is_told(effort: str | None, variables: Any) -> None:
    body = json.dumps({"input": "a", "reasoning": {"effort": effort}}).encode()
    assert parse_response_request(body, ResponseStore(0, 0)).chat.template_variables == variables


@on_server()
async def test_items_are_the_messages_of_a_chat(server: Served) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "three"},
    ]
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
        {"role": "user", "content": "three"},
    ]
    answer = await server.ask(RESPONSES, {"instructions": "be kind", "input": items, "max_output_tokens": 8})
    same = await server.ask(CHAT, {"messages": chat, "max_tokens": 8})
    assert server.tokenizer.seen[-1] == server.tokenizer.seen[-2] == chat
    assert text_of_response(answer.json) == same.text


@on_server()
async def test_what_a_client_sends_by_itself_is_not_refused(server: Served) -> None:
    by_itself = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "service_tier": "auto",
        "prompt_cache_key": "a",
        "safety_identifier": "me",
        "background": False,
        "conversation": None,
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": None,
        "tools": [{"type": "web_search"}],
        "text": {"verbosity": "low"},
    }
    answer = await server.ask(RESPONSES, {**ASKED, **by_itself})
    assert answer.status == 200
    assert text_of_response(answer.json) == text_of_response((await server.ask(RESPONSES, ASKED)).json)


@sweep(
    ("fields", "param", "message"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1, got 0"),
        ({"input": []}, "input", "input must have at least one message"),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content is missing"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "input.0 must be an object whose type is one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
            "whose type is one of",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input", "is not stored, or no longer"),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "is not stored, or no longer"),
        ({"background": True}, "background", "background is not supported"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20, got 21"),
        ({"metadata": {"a": [float("inf")]}}, "metadata", "metadata must be JSON"),
        ({"tools": [{"type": "x", "parameters": {"a": float("nan")}}]}, "tools", "tools must be JSON"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"input": "word " * 100}, "input", "the prompt must have at most 200 tokens"),
    ],
)
@on_server(limits=Limits(max_tokens_limit=100, max_prompt_tokens=200))
async def test_a_wrong_field_is_named(server: Served, fields: Any, param: str, message: str) -> None:
    answer = await server.ask(RESPONSES, {**ASKED, **fields})
    assert answer.status in (400, 404)
    assert answer.fault["param"] == param
    assert message in answer.fault["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_target_that_fails_is_a_failed_response(stream: bool) -> None:
    async def test(server: Served) -> None:
        answer = await server.ask(RESPONSES, {**ASKED, "lookahead": 0, "stream": stream})
        if not stream:
            assert (answer.status, answer.fault["code"]) == (503, "models_unavailable")
            return
        last = answer.named_events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "the target model failed" in last["response"]["error"]["message"]
        assert (await server.ask(f"{RESPONSES}/{last['response']['id']}")).status == 404

    simulated_server(test, ScriptedModel(looping, fails={"feed": range(8, 10_000)}))


@on_server()
async def test_embeddings_are_refused_with_a_sentence(server: Served) -> None:
    answer = await server.ask("/v1/embeddings", {"input": "a"}, method="POST")
    assert answer.status == 404
    assert "there are no embeddings here" in answer.fault["message"]


# --- stored responses -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@on_server()
async def test_a_response_continues_a_stored_one(server: Served, stream: bool) -> None:
    def whole(answer: Any) -> Any:
        return assembled_response(answer.named_events) if stream else answer.json

    asked = {"max_output_tokens": 6, "stream": stream}
    first = whole(await server.ask(RESPONSES, {**asked, "input": "hello", "instructions": "be brief"}))
    second = whole(await server.ask(RESPONSES, {**asked, "input": "more", "previous_response_id": first["id"]}))
    assert second["previous_response_id"] == first["id"]
    # Instructions are not carried on.
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text_of_response(first)}]
    assert server.tokenizer.seen[-1] == [*chat, {"role": "user", "content": "more"}]
    third = {**asked, "input": "on", "instructions": "be kind", "previous_response_id": second["id"]}
    assert whole(await server.ask(RESPONSES, third))["status"] == "incomplete"
    chat += [{"role": "user", "content": "more"}, {"role": "assistant", "content": text_of_response(second)}]
    wanted = [{"role": "system", "content": "be kind"}, *chat, {"role": "user", "content": "on"}]
    assert server.tokenizer.seen[-1] == wanted


def test_reasoning_is_kept_for_the_chat_template() -> None:
    tokenizer = Letters(thinks=True)
    start = len(tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True))

    async def test(server: Served) -> None:
        first = (await server.ask(RESPONSES, ASKED)).json
        await server.ask(RESPONSES, {**ASKED, "previous_response_id": first["id"]})
        assert server.tokenizer.seen[-1][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}

    simulated_server(test, ScriptedModel(saying("<t>hm</t>yes", start)), tokenizer=tokenizer)


@on_server()
async def test_a_stored_response_can_be_read_referred_to_and_dropped(server: Served) -> None:
    first = (await server.ask(RESPONSES, ASKED)).json
    address = f"{RESPONSES}/{first['id']}"
    assert (await server.ask(address)).json == first
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    again = [{"role": "user", "content": "hello"}, reference, {"role": "user", "content": "more"}]
    assert (await server.ask(RESPONSES, {**ASKED, "input": again})).status == 200
    assert server.tokenizer.seen[-1][1] == {"role": "assistant", "content": text_of_response(first)}
    deleted = await server.ask(address, method="DELETE")
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await server.ask(address, method=method)).status == 404
    assert (await server.ask(RESPONSES, {**ASKED, "input": again})).status == 404
    unstored = (await server.ask(RESPONSES, {**ASKED, "store": False})).json
    assert (await server.ask(f"{RESPONSES}/{unstored['id']}")).status == 404


@on_server(limits=Limits(max_stored_responses=2))
async def test_only_the_latest_responses_are_stored(server: Served) -> None:
    ids = [(await server.ask(RESPONSES, ASKED)).json["id"] for _ in range(2)]
    assert (await server.ask(f"{RESPONSES}/{ids[0]}")).status == 200  # used last
    ids.append((await server.ask(RESPONSES, ASKED)).json["id"])
    found = [(await server.ask(f"{RESPONSES}/{id}")).status for id in ids]
    assert found == [200, 404, 200]


@given(
    st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 6), st.integers(0, 40)), max_size=40),
    st.integers(0, 4),
    st.integers(0, 100),
)
@settings(deadline=None)
def test_a_store_keeps_within_its_bounds_what_was_used_last(steps: Any, max_responses: int, max_bytes: int) -> None:
    store = ResponseStore(max_responses, max_bytes)
    kept: dict[str, StoredResponse] = {}  # the plain definition: in the order of use
    for i, (step, which, size) in enumerate(steps):
        known = [*kept, "another"]
        id = known[which % len(known)]
        if step == "p":
            id = f"r{i}"
            kept[id] = StoredResponse(b"b" * size, b"m", {f"i{i}": b"i"})
            store.put(id, kept[id])
            while len(kept) > max_responses or sum(each.num_bytes for each in kept.values()) > max_bytes:
                del kept[next(iter(kept))]
        elif step == "g":
            assert store.get(id) is kept.get(id)
            if id in kept:
                kept[id] = kept.pop(id)
        else:
            assert store.delete(id) is (kept.pop(id, None) is not None)
        for j in range(i + 1):
            assert store.item(f"i{j}") == (b"i" if f"r{j}" in kept else None)
