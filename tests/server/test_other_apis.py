"""What is special of `/v1/messages` and `/v1/responses`, over scripted models in simulated time."""

import json
from typing import Any, cast

from asgi import (
    CHAT,
    COUNT_TOKENS,
    HELLO,
    MESSAGES,
    RESPONSES,
    STREAMED,
    Letters,
    Served,
    answering,
    on_server,
    watched_streams,
)
from assembled import body_of, text_of
from hypothesis import given
from hypothesis import strategies as st
from sweeps import sweep

from runtime.generation.tokens import Token
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.server.answers.api import AnswerSplitter, BegunAnswer
from runtime.server.answers.body import parse_request
from runtime.server.answers.request import GenerationRequest
from runtime.server.anthropic.requests import MessagesRequest
from runtime.server.grammars.schemas import ANY_OBJECT, Constraint
from runtime.server.limits import Limits
from runtime.server.responses.requests import parse_response_request
from runtime.server.responses.serializer import ResponseSerializer
from runtime.server.responses.store import ResponseStore, StoredResponse


def message_of(**fields: Any) -> GenerationRequest:
    return parse_request(MessagesRequest, json.dumps({**HELLO, **fields}).encode()).generation()


def response_of(**fields: Any) -> GenerationRequest:
    return parse_response_request(json.dumps({"input": "hello", **fields}).encode(), ResponseStore(0, 0)).generation


MESSAGE: dict[str, Any] = {**HELLO, "max_tokens": 20}
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 20}


async def both_ways(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The bodies of two answers, of which the second is streamed."""
    return [body_of(await server.ask(path, {**body, "stream": stream})) for stream in (False, True)]


# --- answers --------------------------------------------------------------------------------------


@on_server()
async def test_the_length_of_a_prompt_is_known_from_the_beginning_of_a_message(server):
    whole = await server.ask(MESSAGES, MESSAGE)
    streamed = await server.ask(MESSAGES, {**MESSAGE, "cache_prompt": False, "stream": True})
    assert streamed.named_events[0]["message"]["usage"]["input_tokens"] == whole.json["usage"]["input_tokens"]


LOGPROBS = {"include": ["message.output_text.logprobs"]}


@on_server()
async def test_log_probabilities_are_those_of_a_chat(server):
    chat = await server.ask(CHAT, {**HELLO, "max_tokens": 20, "logprobs": True, "top_logprobs": 2})
    expected = chat.json["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in expected} == {2}
    for fields in ({**LOGPROBS, "top_logprobs": 2}, {"top_logprobs": 2}):
        for response in await both_ways(server, RESPONSES, {**RESPONSE, **fields}):
            assert response["output"][0]["content"][0]["logprobs"] == expected
            assert response["top_logprobs"] == 2
    bare = (await server.ask(RESPONSES, {**RESPONSE, **LOGPROBS})).json["output"][0]["content"][0]["logprobs"]
    assert bare == [{**token, "top_logprobs": []} for token in expected]


@on_server(answering("<t> hm so </t> yes"), tokenizer=Letters(thinks=True))
async def test_log_probabilities_are_those_of_the_text_and_not_of_the_reasoning(server):
    for response in await both_ways(server, RESPONSES, {**RESPONSE, **LOGPROBS}):
        reasoning, message = (item["content"][0] for item in response["output"])
        assert "logprobs" not in reasoning
        assert "".join(token["token"] for token in message["logprobs"]).strip() == message["text"] == "yes"


def test_log_probabilities_come_beside_reasoning_opened_by_the_template():
    # With a constraint, the whole text is the answer.
    letters: Any = Letters(thinks=True)
    parsed = parse_response_request(json.dumps({**RESPONSE, **LOGPROBS}).encode(), ResponseStore(1, 1))
    splitter = AnswerSplitter(AnswerReader())
    begun = BegunAnswer(parsed.generation, "x", letters, splitter, lambda id: None)
    serializer = ResponseSerializer(parsed, ResponseStore(1, 1), begun)
    texts, statistics = list("yes"), cast(Any, None)
    tokens = [
        Token(letters.encode(text)[0], text, i, drafted_by=None, logprob=-1.0, is_thinking=True)
        for i, text in enumerate(texts)
    ]
    deltas = [json.loads(event.data) for event in serializer.events(tokens, statistics)]
    assert [each["token"] for delta in deltas for each in delta.get("logprobs", ())] == texts


@on_server()
async def test_settings_are_given_back_with_a_response(server):
    given = {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.25, "user": "me"}
    given |= {"parallel_tool_calls": False, "tool_choice": "auto", "store": False}
    answer = await server.ask(RESPONSES, {**RESPONSE, **given, "reasoning": {"effort": "low", "summary": "auto"}})
    assert {name: answer.json[name] for name in given} == given
    assert answer.json["reasoning"] == {"effort": "low", "summary": "auto"}
    assert answer.json["text"] == {"format": {"type": "text"}}


@on_server(settings={"temperature": 0.7})
async def test_a_response_names_the_servers_default_where_the_request_sets_none(server):
    for sent, temperature in (({}, 0.7), ({"temperature": None}, 0.7), ({"temperature": 0}, 0.0)):
        body = (await server.ask(RESPONSES, {**RESPONSE, **sent})).json
        assert (body["temperature"], body["top_p"]) == (temperature, 1.0)


# --- requests -------------------------------------------------------------------------------------


def of(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any) -> dict[str, Any]:
    return of("user", content)


CHATTED = [of("system", "be brief"), user("one"), of("assistant", "two", reasoning_content="hm"), user("three")]
THOUGHT = [{"type": "thinking", "thinking": "hm", "signature": "abc"}, {"type": "redacted_thinking", "data": "xyz"}]
TO_MESSAGES = {
    "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": None}],
    "messages": [
        user([{"type": "text", "text": "one"}]),
        of("assistant", [*THOUGHT, {"type": "text", "text": "two"}]),
        user([{"type": "document", "source": {"type": "text", "data": "three"}}]),
    ],
}
TWO = [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}]
TO_RESPONSES = [
    of("developer", "be brief"),
    user([{"type": "input_text", "text": "one"}]) | {"type": "message"},
    {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}]},
    of("assistant", TWO, type="message", id="msg_1", status="completed"),
    user("three"),
]


@on_server()
@sweep(
    ("path", "conversation", "chat"),
    [
        (MESSAGES, TO_MESSAGES, CHATTED),
        (RESPONSES, {"instructions": "be kind", "input": TO_RESPONSES}, [of("system", "be kind"), *CHATTED]),
    ],
)
async def test_a_conversation_is_that_of_a_chat(server, path, conversation, chat):
    answer = await server.ask(path, {**conversation, "max_tokens": 8, "max_output_tokens": 8})
    same = await server.ask(CHAT, {"messages": chat, "max_tokens": 8})
    assert server.tokenizer.seen[-1] == server.tokenizer.seen[-2] == chat
    assert text_of(answer) == same.text


HELLO_CACHED = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "5m"}, "citations": None}
OF_MESSAGES: dict[str, Any] = {
    **{"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "tools": []},
    **{"container": None, "context_management": {"edits": []}, "output_config": {"effort": "high"}, "system": ""},
    **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": [user([HELLO_CACHED])]},
}
OF_RESPONSES: dict[str, Any] = {
    **{"include": ["reasoning.encrypted_content"], "truncation": "auto", "service_tier": "auto"},
    **{"prompt_cache_key": "a", "safety_identifier": "me", "background": False, "conversation": None},
    **{"stream_options": {"include_obfuscation": False}, "text": {"verbosity": "low"}},
    **{"max_tool_calls": None, "tools": [{"type": "web_search"}]},
}


@on_server()
@sweep(("path", "asked", "by_itself"), [(MESSAGES, MESSAGE, OF_MESSAGES), (RESPONSES, RESPONSE, OF_RESPONSES)])
async def test_what_a_client_sends_by_itself_is_not_refused(server, path, asked, by_itself):
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = await server.ask(path, {**asked, **by_itself}, headers=headers)
    assert answer.status == 200
    assert text_of(answer) == text_of(await server.ask(path, asked))


@sweep(
    ("request_", "variables"),
    [
        (message_of(thinking=None), {}),
        (message_of(thinking={"type": "enabled"}), {"enable_thinking": True}),
        (message_of(thinking={"type": "adaptive"}), {"enable_thinking": True}),
        (message_of(thinking={"type": "disabled"}), {"enable_thinking": False}),
        (message_of(output_config={"effort": "low"}), {"reasoning_effort": "low"}),
        (response_of(reasoning={"effort": "none"}), {"enable_thinking": False}),
        (response_of(reasoning={"effort": "high"}), {"reasoning_effort": "high"}),
        (response_of(reasoning={"effort": None}), {}),
    ],
)
def test_reasoning_is_what_the_template_is_told(request_, variables):
    assert request_.chat.variables == variables


def test_a_format_is_that_of_a_chat():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "schema": schema}
    given = {**format, "name": "thing", "strict": True}
    for request in (message_of(output_config={"format": format}), response_of(text={"format": given})):
        assert request.constraint == Constraint("json", schema, "response_format")
    for kind, expected in (("json_object", Constraint("json", ANY_OBJECT, "response_format")), ("text", None)):
        assert response_of(text={"format": {"type": kind}, "verbosity": "low"}).constraint == expected


@on_server(limits=Limits(max_prompt_tokens=100))
async def test_tokens_are_counted_without_generating(server):
    seen = watched_streams(server)
    counted = await server.ask(COUNT_TOKENS, HELLO)
    assert seen == []
    answer = await server.ask(MESSAGES, MESSAGE)
    assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}
    # Also of a prompt that would be refused, so that a client knows by how much.
    long = await server.ask(COUNT_TOKENS, {"messages": [user("word " * 100)]})
    assert long.json["input_tokens"] > 500
    assert await server.outcomes() == {"finished": 1}


# --- errors ---------------------------------------------------------------------------------------


@on_server(api_key="s3cret", limits=Limits(max_body_bytes=2000))
async def test_every_error_of_messages_has_the_form_and_the_type_of_this_api(server):
    async def told(path: str, body: Any, key: dict[str, str], **more: Any) -> tuple[int, str | None]:
        answer = await server.ask(path, body, headers={"content-type": "application/json", **key}, **more)
        return answer.status, answer.json.get("error", {}).get("type")

    key = {"x-api-key": "s3cret"}
    assert await told(MESSAGES, MESSAGE, {"x-api-key": "another"}) == (401, "authentication_error")
    assert await told(MESSAGES, MESSAGE, key) == (200, None)
    assert await told(MESSAGES, MESSAGE, {"authorization": "Bearer s3cret"}) == (200, None)
    assert await told(MESSAGES, b" " * 3000, key) == (413, "request_too_large")
    assert await told(f"{MESSAGES}/batches", None, key) == (404, "not_found_error")
    assert await told(MESSAGES, None, key, method="GET") == (405, "invalid_request_error")


# --- stored responses -----------------------------------------------------------------------------


@STREAMED
@on_server()
async def test_a_response_continues_a_stored_one(server, stream):
    async def respond(text: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        answer = await server.ask(RESPONSES, {"max_output_tokens": 6, "stream": stream, "input": text, **fields})
        return body_of(answer), {"role": "assistant", "content": text_of(answer)}

    first, said = await respond("hello", instructions="be brief")
    second, more = await respond("more", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    # Instructions are not carried on.
    chat = [user("hello"), said, user("more")]
    assert server.tokenizer.seen[-1] == chat
    third, _ = await respond("on", instructions="be kind", previous_response_id=second["id"])
    assert third["status"] == "incomplete"
    assert server.tokenizer.seen[-1] == [{"role": "system", "content": "be kind"}, *chat, more, user("on")]


@on_server(answering("<t>hm</t>yes"), tokenizer=Letters(thinks=True))
async def test_reasoning_is_kept_for_the_chat_template(server):
    first = (await server.ask(RESPONSES, RESPONSE)).json
    await server.ask(RESPONSES, {**RESPONSE, "previous_response_id": first["id"]})
    assert server.tokenizer.seen[-1][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


@on_server()
async def test_a_stored_response_can_be_read_referred_to_and_dropped(server):
    answer = await server.ask(RESPONSES, RESPONSE)
    first = answer.json
    address = f"{RESPONSES}/{first['id']}"
    assert (await server.ask(address)).json == first
    again = [user("hello"), {"type": "item_reference", "id": first["output"][0]["id"]}, user("more")]
    assert (await server.ask(RESPONSES, {**RESPONSE, "input": again})).status == 200
    assert server.tokenizer.seen[-1][1] == {"role": "assistant", "content": text_of(answer)}
    deleted = await server.ask(address, method="DELETE")
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await server.ask(address, method=method)).status == 404
    assert (await server.ask(RESPONSES, {**RESPONSE, "input": again})).status == 404
    unstored = (await server.ask(RESPONSES, {**RESPONSE, "store": False})).json
    assert (await server.ask(f"{RESPONSES}/{unstored['id']}")).status == 404


@on_server(limits=Limits(max_stored_responses=2))
async def test_only_the_latest_responses_are_stored(server):
    ids = [(await server.ask(RESPONSES, RESPONSE)).json["id"] for _ in range(2)]
    assert (await server.ask(f"{RESPONSES}/{ids[0]}")).status == 200  # used last
    ids.append((await server.ask(RESPONSES, RESPONSE)).json["id"])
    found = [(await server.ask(f"{RESPONSES}/{id}")).status for id in ids]
    assert found == [200, 404, 200]


STEPS = st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 6), st.integers(0, 40)), max_size=40)


@given(STEPS, st.integers(0, 4), st.integers(0, 100))
def test_a_store_keeps_within_its_bounds_what_was_used_last(steps, max_responses, max_bytes):
    store = ResponseStore(max_responses, max_bytes)
    kept: dict[str, StoredResponse] = {}  # the plain definition: in the order of use
    for i, (step, which, size) in enumerate(steps):
        known = [*kept, "another"]
        id = known[which % len(known)]
        if step == "p":
            id = f"r{i}"
            response = StoredResponse(b"b" * size, b"m", {f"i{i}": b"i"})
            store.put(id, response)
            if response.num_bytes <= max_bytes:
                kept[id] = response
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
