"""What may be asked of a server, and what is refused: over scripted models in simulated time, and without sockets."""

import json
from typing import Any
from unittest import mock

import pytest
import trio
from asgi import (
    BOTH,
    CHAT,
    COMPLETIONS,
    DEF,
    HELLO,
    JSON,
    MESSAGES,
    MODEL,
    RESPONSES,
    Aside,
    Exchange,
    Letters,
    ScriptedCheck,
    Served,
    direct,
    looping,
    on_server,
    simulated_server,
    watched_streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import ScriptedModel
from sweeps import sweep

from protocol.settings import settings_from
from runtime.server import context
from runtime.server.answers import endpoint
from runtime.server.answers.body import parse_request
from runtime.server.errors import ErrorResponse
from runtime.server.limits import Limits
from runtime.server.openai.requests import ChatRequest, CompletionRequest

ASKED = [(COMPLETIONS, DEF), (CHAT, HELLO)]

# --- from fields to settings ----------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "seed": 3}

SAME: list[dict[str, Any]] = [
    *[{"max_tokens": 7}, SAMPLED, {"temperature": 1, "seed": 2**64 - 1}, {"ignore_eos": True}],
    *({**SAMPLED, **more} for more in ({"top_p": 0.1}, {"top_k": 2}, {"min_p": 0.6}, {"acceptance": "rejection"})),
    {**SAMPLED, "xtc_probability": 1.0, "xtc_threshold": 0.02},
    *[{"presence_penalty": 4}, {"frequency_penalty": 1.5}, {"repetition_penalty": 2.5}],
    *({"presence_penalty": 4, "presence_context_size": size} for size in (10, None)),
    {"frequency_penalty": 4, "frequency_context_size": 10},
    {"repetition_penalty": 2.5, "repetition_context_size": 10},
    *[{"lookahead": 0}, {"lookahead": 5}, {"draft_temperature": 0.5}, {"draft_temperature": 0}],
    *[{"stop": "☂"}, {"stop": ["☂", "12"]}],
]
NO_EFFECT: list[dict[str, Any]] = [
    {"temperature": None, "stop": None, "n": None, "stream": None, "logit_bias": None},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}},
    *[{}, {"lookahead": "auto"}, {"draft_temperature": None}, {"stop": []}, {"stop": ""}, {"cache_prompt": True}],
    *[{"seed": -1, "top_k": -1, "min_tokens": 0}, {"top_k": 0}, {"response_format": {"type": "text"}}],
    {"n": 1, "user": "me", "metadata": {"a": [1]}, "store": False, "service_tier": "auto"},
    {"safety_identifier": "me", "prompt_cache_key": "a", "prompt_cache_retention": "24h"},
    {"model": MODEL},
]
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((each, each) for each in SAME),
    *((each, {}) for each in NO_EFFECT),
    ({"repeat_penalty": 2.5}, {"repetition_penalty": 2.5}),
    ({"temperature": 1, "random_seed": 4}, {"temperature": 1.0, "seed": 4}),
    ({"logit_bias": {"5": 3.5, "0": -100}}, {"logit_bias": {5: 3.5, 0: -100}}),
    ({"logit_bias": {"fAf": 3.5, "0": -100}}, {"logit_bias": {5: 7.0, 26: 3.5, 0: -100}}),
    *(({name: [9]}, {"stop_tokens": [9]}) for name in ("stop_tokens", "stop_token_ids")),
    ({"num_draft_tokens": 5}, {"lookahead": 5}),
    ({"stop": ["", "☂"]}, {"stop": ["☂"]}),
    # The smallest of nuclei, and not none.
    ({"top_p": 0, **SAMPLED}, {"top_k": 1, **SAMPLED}),
    ({"cache_prompt": False}, {"reuse_prefix": False}),
]


@on_server(limits=Limits(max_tokens=8))
@BOTH
@sweep(("fields", "wanted"), FIELDS)
async def test_a_field_is_the_setting_that_it_stands_for_or_has_no_effect(server, fields, wanted, path, body):
    seen = watched_streams(server)
    answer = await server.ask(path, {**body, **fields})
    assert answer.status == 200
    assert seen[0][0] == settings_from({"max_tokens": 8, "reuse_prefix": True, **wanted})


@on_server(limits=Limits(max_tokens=24))
@sweep(
    ("path", "body", "logprobs"),
    [
        *((COMPLETIONS, {**DEF, "logprobs": n}, n or 1) for n in (0, 4)),
        (CHAT, {**HELLO, "logprobs": True}, 1),
        *((CHAT, {**HELLO, "logprobs": True, "top_logprobs": n}, n or 1) for n in (0, 4)),
        (CHAT, {**HELLO, "logprobs": False, "top_logprobs": 4}, 0),
        (CHAT, {**HELLO, "max_completion_tokens": 9}, 0),
        (CHAT, {**HELLO, "max_completion_tokens": 9, "max_tokens": 4}, 0),
    ],
)
async def test_log_probabilities_and_the_newer_name_for_a_length(server, path, body, logprobs):
    seen = watched_streams(server)
    assert (await server.ask(path, body)).status == 200
    most = body.get("max_completion_tokens", 24)
    assert (seen[0][0].logprobs, seen[0][0].max_tokens) == (logprobs, most)


@on_server()
@sweep("prompt", ["def f", ["def f"], Letters().encode("def f"), [Letters().encode("def f")]])
async def test_a_prompt_is_text_or_ids_alone_or_in_a_list_of_one(server, prompt):
    expected = await direct(server, DEF, max_tokens=9)
    answer = await server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 9})
    assert (answer.text, answer.json["usage"]["prompt_tokens"]) == (expected.text, 5)


@on_server()
async def test_what_was_said_reaches_the_chat_template(server):
    said = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": [], "reasoning_content": "hm"},
        {"role": "user", "content": None},
    ]
    assert (await server.ask(CHAT, {"messages": said, "max_tokens": 3})).status == 200
    assert server.tokenizer.seen[-1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]


@on_server(tokenizer=Letters(template=None))
async def test_without_a_chat_template_what_was_said_is_a_running_text(server):
    said = [{"role": "user", "content": "de"}, {"role": "assistant", "content": "f f"}]
    answer = await server.ask(CHAT, {"messages": said, "max_tokens": 9})
    assert answer.text == (await direct(server, DEF, max_tokens=9)).text
    assert (await server.ask("/v1/models")).json["data"][0]["has_chat_template"] is False


# --- requests that are refused --------------------------------------------------------------------


@sweep(
    ("kind", "field", "value"),
    [
        *((CompletionRequest, "prompt", odd) for odd in ([-1] * 20_000, ["a"] * 20_000, [["a"] * 20_000])),
        (CompletionRequest, "stop", [3] * 20_000),
        (CompletionRequest, "stop_tokens", [-1] * 20_000),
        (CompletionRequest, "logit_bias", {f"x{i}": None for i in range(20_000)}),
        *((ChatRequest, name, [0] * 20_000) for name in ("messages", "tools")),
        *((ChatRequest, "messages", [{"role": "user", name: [0] * 20_000}]) for name in ("content", "tool_calls")),
    ],
)
def test_what_is_wrong_with_a_long_list_is_not_gathered_one_by_one(kind, field, value):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps({field: value}))
    assert caught.value.error_count() < 10


NOT_JSON = ("text/plain", "application/x-www-form-urlencoded", "application/jsonx")


@on_server(limits=Limits(max_body_bytes=100))
@sweep(
    ("headers", "status", "said"),
    [
        ({}, 415, "Content-Type: application/json"),
        *(({"content-type": kind}, 415, "Content-Type: application/json") for kind in NOT_JSON),
        *(({**JSON, "content-length": length}, 413, "longer than 100 bytes") for length in ("101", "9" * 5000)),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_or_to_be_short_is_not_read(server, headers, status, said):
    answer = await server.ask(COMPLETIONS, headers=headers)  # the body never comes
    assert answer.status == status
    assert said in answer.fault["message"]


@on_server(limits=Limits(max_body_bytes=100))
async def test_a_body_that_turns_out_too_long_is_not_read_to_its_end(server):
    async with server.exchange(COMPLETIONS) as answer:
        answer.give(b" " * 60, more=True)
        answer.give(b" " * 41, more=True)
    assert answer.status == 413
    whole = b'{"prompt": "a", "max_tokens": 1}'.ljust(100)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await server.ask(COMPLETIONS, whole, headers=headers)).status == 200


@on_server()
async def test_a_body_must_come_in_time(server):
    began = trio.current_time()
    async with server.exchange(COMPLETIONS) as answer:
        answer.give(b'{"prompt"', more=True)
        await trio.sleep(20)
        answer.give(b': "a"', more=True)
    assert (answer.status, answer.over_at) == (408, began + 30)
    assert "within 30 s" in answer.fault["message"]


@sweep(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")])
@sweep("limited", ["context", "server"])
def test_a_prompt_that_is_too_long_says_so_before_model_work(limited, path, param):
    async def test(server: Served) -> None:
        long = "a" * 60
        said = [{"role": "user", "content": long}] if param == "messages" else long
        answer = await server.ask(path, {param: said})
        assert answer.status == 400
        # Clients know by the code that a context is full, or by the beginning of the message.
        if path != MESSAGES:
            assert (answer.fault["code"], answer.fault["param"]) == ("context_length_exceeded", param)
        length = 60 if path == COMPLETIONS else len("user:.assistant:") + 60
        message = answer.json["error"]["message"]
        assert message.startswith(f"prompt is too long: {length} tokens > {most} maximum")
        assert "shorten it" in message
        assert server.simulation.target_worker.handed == []
        assert (await server.ask(COMPLETIONS, {"prompt": "a" * 30, "max_tokens": 1})).status == 200

    bounds, most = {"context": (40, 39), "server": (None, 40)}[limited]
    limits = Limits(max_prompt_tokens=40 if limited == "server" else None)
    simulated_server(test, ScriptedModel(looping, context_length=bounds), limits=limits)


@on_server(limits=Limits(max_tokens_limit=20))
async def test_a_text_is_no_longer_than_the_server_allows(server):
    for max_tokens in (None, 20, 21, 10**9, -1):
        answer = await server.ask(COMPLETIONS, {**DEF, "max_tokens": max_tokens})
        assert answer.json["usage"]["completion_tokens"] == 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def bodies(kind: type[ChatRequest] | type[CompletionRequest], base: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Bodies with the right names and any values, and some that mean something."""
    plausible = {
        "temperature": st.floats(0, 2),
        "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=2), max_size=3),
        "lookahead": st.integers(0, 8) | st.just("auto"),
        "stream": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 70).map(str), st.floats(-100, 100), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": st.text()}),
            max_size=3,
        ),
        "prompt": st.text(max_size=9) | st.lists(st.integers(0, 70), max_size=5),
        "seed": st.integers(0, 2**64),
    }
    names = {*kind.model_fields, "random_seed", "another"} - {"max_tokens"}
    fields = {name: plausible[name] | json_values if name in plausible else json_values for name in sorted(names)}
    return st.fixed_dictionaries({}, optional=fields).map(lambda body: {**base, "max_tokens": 3, **body}) | json_values


@settings(max_examples=40)
@given(asked=st.sampled_from(ASKED), data=st.data())
@on_server(limits=Limits(max_tokens_limit=6))
async def test_whatever_comes_gets_an_answer_or_is_told_what_is_wrong(server, asked, data):
    path, body = asked
    kind = ChatRequest if path == CHAT else CompletionRequest
    sent = data.draw(bodies(kind, body))
    answer = await server.ask(path, json.dumps(sent).encode())
    if answer.status == 200:
        assert answer.is_done or answer.json["choices"]
    else:
        assert answer.status in (400, 404)
        assert answer.fault["message"]
    assert server.simulation.runtime.num_streams == 0


@settings(max_examples=40)
@given(body=st.binary(max_size=40) | st.text(alphabet='{}[]":,tf0-promt \\u', max_size=30).map(str.encode))
def test_any_bytes_are_told_what_is_wrong_with_them(body):
    for kind in (CompletionRequest, ChatRequest):
        with pytest.raises(ErrorResponse) as refused:
            parse_request(kind, body).generation()
        assert refused.value.status == 400
        assert refused.value.detail["message"]


def test_a_schema_that_takes_too_long_is_given_up_and_keeps_nobody_else_waiting():
    async def test(server: Served) -> None:
        wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 5}}}
        began = trio.current_time()
        answers = []

        async def visit(after_s: float) -> None:
            await trio.sleep(after_s)
            answers.append(await server.ask(COMPLETIONS, {**DEF, "response_format": wanted}))

        async with trio.open_nursery() as nursery:
            for after_s in (0, 0, 1, 1, 2):
                nursery.start_soon(visit, after_s)
            await trio.sleep(3)
            plain = await server.ask(COMPLETIONS, {**DEF, "max_tokens": 1})
            assert plain.status == 200
            assert plain.over_at <= began + 3 + 16  # a pass or two
        by_time = [(answer.over_at - began, answer.status) for answer in answers]
        assert by_time == [(10, 400), (10, 400), (12, 429), (20, 400), (20, 400)]
        assert "was not compiled within 10 s; simplify it" in answers[0].fault["message"]
        assert (answers[0].fault["param"], answers[2].headers["retry-after"]) == ("response_format", "10")
        assert answers[2].fault["message"].endswith("has waited 10 s for its turn; try again in 10 s")
        assert check.num_at_once == 0

    check = ScriptedCheck(seconds=100.0)
    simulated_server(test, check=check)


# --- addresses, names, keys -----------------------------------------------------------------------


@on_server(ScriptedModel(looping, context_length=40), small="small")
async def test_the_one_model_is_listed(server):
    listed = (await server.ask("/v1/models")).json
    assert listed["object"] == "list"
    (one,) = listed["data"]
    assert {"id": MODEL, "object": "model", "owned_by": "outrider", "draft": "small"}.items() <= one.items()
    assert one["has_chat_template"] is True
    assert (await server.ask(f"/v1/models/{MODEL}")).json == one
    # By vLLM's name: its clients shorten their prompts to it.
    assert one["max_model_len"] == 40
    missing = await server.ask("/v1/models/a/b")
    assert (missing.status, missing.fault["code"]) == (404, "model_not_found")


OLLAMA = "Ollama's API is not served; use OpenAI's, with a base URL that ends in /v1"
LISTED = "/docs lists what there is"


@on_server()
@sweep(
    ("path", "method", "status", "remedy"),
    [
        *((path, "GET", 404, f"there is nothing at {path}; {LISTED}") for path in ("/nothing", "/apis")),
        *((path, "POST", 404, f"{path}; {OLLAMA}") for path in ("/api/chat", "/api/generate", "/v1/api/show")),
        ("/v1/v1/messages", "POST", 404, "/v1/v1/messages; leave /v1 out of the client's base URL"),
        ("/v1/embeddings", "POST", 404, "there are no embeddings here: "),
        ("/timelines/cmpl-none", "GET", 404, "there is no timeline with this id"),
        *((COMPLETIONS, method, 405, f"does not support {method}; use POST") for method in ("GET", "OPTIONS")),
        *[(CHAT, "DELETE", 405, "; use POST"), ("/health", "POST", 405, "/health does not support POST; use ")],
    ],
)
async def test_what_is_not_there_is_an_error_that_says_what_is(server, path, method, status, remedy):
    answer = await server.ask(path, {"input": "x"}, method=method)
    assert answer.status == status
    assert remedy in answer.fault["message"]
    if status == 405:
        assert method not in answer.headers["allow"]
        assert answer.fault["message"].endswith(f"; use {answer.headers['allow']}")


KEYED = {"api_key": "s3cret"}
WRONG = [None, "", "Bearer", "Bearer wrong", "Bearer s3cre", "Bearer s3crets", "Basic s3cret", "Bearer \xe9"]


@on_server(**KEYED)
@sweep(("path", "body"), [(COMPLETIONS, {**DEF, "max_tokens": 1}), ("/v1/models", None)])
async def test_a_key_is_asked_for(server, path, body):
    for authorization in ("Bearer s3cret", "bearer s3cret"):
        assert (await server.ask(path, body, headers={**JSON, "authorization": authorization})).status == 200
    for wrong in WRONG:
        answer = await server.ask(path, body, headers=JSON if wrong is None else {**JSON, "authorization": wrong})
        assert (answer.status, answer.fault["code"]) == (401, "invalid_api_key"), wrong
        assert "Authorization: Bearer KEY" in answer.fault["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in str(answer.sent)


@on_server(**KEYED)
async def test_all_but_the_pages_and_the_figures_wants_a_key(server):
    open_paths = {"/", "/docs", "/health", "/metrics", "/openapi.json", "/version"}
    for path in open_paths:
        assert (await server.ask(path)).status == 200, path
    assert (await server.ask("/timelines/unknown")).status == 404
    for route in server.app.app.routes:
        if route.path not in {*open_paths, "/page", "/timelines/{id}"}:
            assert (await server.ask(route.path)).status == 401, route.path
    for path in ("/next", "/v2/models", "/healthy", "/api/chat", "//v1/models", "/v1"):
        assert (await server.ask(path, method="GET")).status == 401, path


OURS = ["localhost", "localhost:8000", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "[::1]"]
THEIRS = ["evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:8000", "", "[", "\xff"]


@on_server(hosts=["localhost", "127.0.0.1", "::1"])
@sweep("path", ["/health", "/", "/v1/models", "/timelines/x"])
async def test_a_server_answers_to_its_own_names_alone(server, path):
    for host in OURS:
        assert (await server.ask(path, method="GET", headers={"host": host})).status in (200, 404), host
    for host in THEIRS:
        answer = await server.ask(path, method="GET", headers={"host": host})
        assert (answer.status, answer.fault["code"]) == (400, "unknown_host"), host
        assert "--allow-host" in answer.fault["message"]


@on_server(hosts=["*"])
async def test_any_name_will_do_where_that_is_said(server):
    assert (await server.ask("/health", method="GET", headers={"host": "any.example"})).status == 200


@sweep(("origin", "is_allowed"), [("https://ours.example", True), ("https://theirs.example", False)])
@on_server(origins=["https://ours.example"], **KEYED)
async def test_pages_of_other_origins_may_ask_only_where_that_is_said(server, origin, is_allowed):
    async def may_ask(path: str, body: Any = None, **more: Any) -> Exchange:
        headers = {"origin": origin, **more.pop("headers", {})}
        answer = await server.ask(path, body, headers=headers, **more)
        assert (answer.headers.get("access-control-allow-origin") == origin) is is_allowed
        return answer

    await may_ask("/health", method="GET")
    # An error can be read too; without the key there is nothing else.
    assert (await may_ask(COMPLETIONS, DEF)).status == 401
    # Before it asks, a browser asks whether the page may: with any headers, also from a public network.
    asks = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    for name in ("authorization", "content-type", "x-stainless-os", "x-anything"):
        headers = {**asks, "access-control-request-headers": f"authorization,{name}"}
        before = await may_ask(COMPLETIONS, method="OPTIONS", headers=headers)
        assert before.status == (200 if is_allowed else 400)
        assert before.headers["access-control-allow-private-network"] == "true"
        named = set(before.headers["access-control-allow-headers"].replace(" ", "").split(","))
        assert {"authorization", name} <= named or not is_allowed


@on_server()
@sweep("path", ["/", "/health", "/nothing", "/v1/models", "/metrics"])
async def test_every_answer_has_the_headers_that_keep_browsers_careful(server, path):
    answer = await server.ask(path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    if path == "/":
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy


@on_server()
async def test_a_failure_of_the_server_s_own_is_an_error_as_any_other(server, monkeypatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(server.simulation.runtime, "encode", fail)
    answer = await server.ask(COMPLETIONS, DEF)
    assert (answer.status, answer.fault["code"]) == (500, "internal_error")
    assert "on purpose" not in answer.fault["message"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert isinstance(answer.error, BaseException)  # for the log
    assert await server.outcomes() == {"failed": 1}


# --- long requests beside others ------------------------------------------------------------------


@on_server(limits=Limits(max_body_bytes=100_000, max_bodies_bytes=150_000))
async def test_bodies_together_are_bounded_and_a_short_one_never_waits(server):
    body = json.dumps({**DEF, "max_tokens": 1}).encode().ljust(100_000)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    async with server.exchange(COMPLETIONS, headers=headers) as first:
        first.give(body[:50_000], more=True)
        await trio.sleep(1)
        async with server.exchange(COMPLETIONS, headers=headers) as second:
            second.give(body[:50_000], more=True)
            second.give(body[50_000:])
            await trio.sleep(1)
            # The rest of the second body is left to its sender.
            assert second._coming[1].statistics().current_buffer_used == 1
            assert (await server.ask(COMPLETIONS, {**DEF, "max_tokens": 1})).status == 200
            assert not second.sent
            first.give(body[50_000:])
    assert (first.status, second.status) == (200, 200)


@sweep("way", ["leaves", "is silent"])
@on_server(limits=Limits(max_body_bytes=100_000, max_bodies_bytes=100_000))
async def test_memory_that_a_body_had_is_free_when_its_client_has_gone(server, way):
    body = json.dumps({**DEF, "max_tokens": 1}).encode().ljust(90_000)
    for _ in range(3):
        async with server.exchange(COMPLETIONS) as answer:
            answer.give(body[:50_000], more=True)
            await trio.sleep(1)
            if way == "leaves":
                answer.leave()
    assert (await server.ask(COMPLETIONS, body)).status == 200


@on_server(limits=Limits(max_body_bytes=100_000, max_bodies_bytes=100_000))
async def test_a_body_that_got_no_memory_is_to_be_sent_again(server):
    body = json.dumps({**DEF, "max_tokens": 1}).encode().ljust(90_000)
    async with server.exchange(COMPLETIONS) as other:
        other.give(body[:10], more=True)
        await trio.sleep(1)
        async with server.exchange(COMPLETIONS) as silent:
            silent.give(body[:50_000], more=True)
            await trio.sleep(1)
            other.give(body[10:50_000], more=True)
    assert silent.status == 408
    assert (other.status, other.headers["retry-after"], other.fault["code"]) == (429, "30", "bodies_waiting")


@on_server(looping, tokenising_s=1000.0, max_streams=16)
async def test_a_short_prompt_does_not_wait_for_long_ones(server, monkeypatch):
    monkeypatch.setattr(context, "SHORT", 100)
    over: list[str] = []

    async def go(prompt: str) -> None:
        assert (await server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})).status == 200
        over.append(prompt[0])

    async with trio.open_nursery() as nursery:
        for prompt in (*["a" * 200] * 4, "short"):
            nursery.start_soon(go, prompt)
            await trio.sleep(0.1)
    # Two long ones are tokenised at once, and then the other two.
    assert "s" in over[:3]


# --- long responses, which are made in another thread --------------------------------------------


LONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 11}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 11}, {"n": 6}),
    (COMPLETIONS, {"prompt": "def f" * 6, "max_tokens": 0, "echo": True}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f" * 6, "max_tokens": 1, "echo": True}, {"logprobs": 5}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 11}, {"top_logprobs": 5}),
]


@sweep(("path", "body", "more"), LONG)
@sweep("stream", [False, True])
@on_server()
async def test_a_response_with_log_probabilities_or_of_many_tokens_is_made_in_a_thread(
    server, path, body, more, stream, monkeypatch
):
    monkeypatch.setattr(endpoint, "SHORT_RESPONSE", 64)
    num_calls = []
    for asked in (body, {**body, **more}):
        with mock.patch.object(Aside, "__call__", autospec=True, side_effect=Aside.__call__) as in_a_thread:
            answer = await server.ask(path, {**asked, "stream": stream})
        assert answer.status == 200, answer.body
        num_calls.append(in_a_thread.call_count)
    # The events of several texts are short each.
    assert (num_calls[1] > num_calls[0]) is not (stream and "n" in more)
