"""Fields that mean nothing here: ignored and named in a header of the response, or refused by a strict server."""

from __future__ import annotations

from typing import Any

from asgi import (
    BOTH,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DEF,
    HELLO,
    MESSAGES,
    MODEL,
    RESPONSES,
    Served,
    direct,
    on_server,
)

from runtime.server.answers.body import IgnoredFields
from runtime.server.limits import Limits

HEADER = "x-outrider-ignored"

SAID = {"role": "user", "content": "hello"}
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: DEF,
    CHAT: HELLO,
    RESPONSES: {"input": "hello"},
    MESSAGES: HELLO,
    COUNT_TOKENS: HELLO,
}

# What clients of OpenAI, vLLM, llama.cpp and Ollama send, and what is named of it.
IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"web_search_options": {}, "verbosity": "low"}, "web_search_options, verbosity"),
    ({"keep_alive": "5m", "priority": 0, "request_id": "a"}, "keep_alive, priority, request_id"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "f"}}, "functions, function_call"),
    ({"best_of": 2, "guided_json": {}, "n_predict": 5}, "best_of, guided_json, n_predict"),
    ({"modalities": ["text", "audio"], "audio": {"voice": "a"}}, "modalities, audio"),
    ({"user": "me", "metadata": {"a": [1]}, "store": False}, "user, metadata, store"),
    ({"safety_identifier": 3, "prompt_cache_key": "a"}, "prompt_cache_key, safety_identifier"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
    ({"a\r\nb: c": 1, "ü": 2, "z": 3}, "z, +2 more"),
    ({"x" * 5000: 1}, "+1 more"),
]  # fmt: skip


@on_server()
@BOTH
async def test_a_field_that_means_nothing_is_ignored_and_named(server: Served, path: str, body: Any) -> None:
    expected = await direct(server, body, max_tokens=9)
    for fields, named in IGNORED:
        answer = await server.ask(path, {**body, **fields, "max_tokens": 9})
        assert (answer.status, answer.text, answer.headers[HEADER]) == (200, expected.text, named)


# The same in every API, and within other objects.
NESTED: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": [{**SAID, "x": 1}, {**SAID, "x": 2}]}, "messages.x"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "refusal": "b", "annotations": [1]}, SAID]}, None),
    (RESPONSES, {"truncation": "auto", "include": ["x"], "min_p": 0.1}, "truncation, include"),
    (RESPONSES, {"text": {"verbosity": "a"}, "reasoning": {"summary": "b"}}, "text.verbosity, reasoning.summary"),
    (RESPONSES, {"input": [{**SAID, "id": "a", "status": "completed"}], "user": "me", "metadata": {}}, None),
    (MESSAGES, {"container": "a", "metadata": {"user_id": "me"}, "seed": 3}, "container, metadata"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9, "x": 1}}, "thinking.x"),
    (
        COUNT_TOKENS,
        {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "x": 1},
        "x, system.cache_control",
    ),
]


@on_server(limits=Limits(max_tokens=3))
async def test_what_is_ignored_in_any_api_and_within_other_objects_is_named(server: Served) -> None:
    for path, fields, named in NESTED:
        answer = await server.ask(path, {**ASKED[path], **fields})
        assert (answer.status, answer.headers.get(HEADER)) == (200, named)


@on_server(limits=Limits(max_tokens=3))
async def test_nothing_is_named_where_nothing_was_ignored(server: Served) -> None:
    nothing = {"audio": None, "web_search_options": None, "annotations": [], "user": None, "model": "gpt-4o"}
    for path, body in ASKED.items():
        answer = await server.ask(path, {**body, **nothing, "seed": 3})
        assert (answer.status, answer.headers.get(HEADER)) == (200, None)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "no field \"temprature\" here; did you mean 'temperature'?"),
    ({"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
    ({"look_ahead": 1}, "look_ahead", "did you mean 'lookahead'?"),
    ({"zzz": 1}, "zzz", "leave it out"),
    ({"web_search_options": {}}, "web_search_options", "the server searches nothing; leave it out"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", 'no field "x" here'),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "leave it out"),
    ({"x" * 5000: 1}, "x" * 100, "…"),
]


@on_server(is_strict=True)
@BOTH
async def test_a_strict_server_refuses_an_unknown_field(server: Served, path: str, body: Any) -> None:
    for fields, param, said in REFUSED:
        answer = await server.ask(path, {**body, **fields})
        assert (answer.status, answer.fault["param"]) == (400, param)
        assert said in answer.fault["message"]
    assert server.simulation.target_worker.handed == []


@on_server(is_strict=True, limits=Limits(max_tokens=3))
async def test_a_strict_server_describes_what_it_refuses(server: Served) -> None:
    described = (await server.ask("/openapi.json")).json
    for path, body in ASKED.items():
        assert (await server.ask(path, {**body, "zzz": 1})).status == 400
        accepted = await server.ask(path, {**body, "service_tier": "auto", "audio": None})
        assert (accepted.status, accepted.headers[HEADER]) == (200, "service_tier")
        name = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert described["components"]["schemas"][name.rpartition("/")[2]]["additionalProperties"] is False


def test_a_header_has_only_so_many_names() -> None:
    header = IgnoredFields({f"a{i}": False for i in range(40)}).header
    assert header.split(", ") == [*(f"a{i}" for i in range(32)), "+8 more"]


@on_server(limits=Limits(max_tokens=3))
async def test_any_model_name_means_the_one_model(server: Served) -> None:
    for path, body in ASKED.items():
        answer = await server.ask(path, {**body, "model": "gpt-4o"})
        assert answer.status == 200
        assert path == COUNT_TOKENS or answer.json["model"] == MODEL
        assert path not in (COMPLETIONS, CHAT) or answer.json["system_fingerprint"].startswith("outrider-")


@on_server(api_key="s3cret", limits=Limits(max_tokens=3))
async def test_paths_without_a_version_are_those_with_it_and_need_the_key(server: Served) -> None:
    for path, body in {**ASKED, "/v1/models": None}.items():
        headers = {} if body is None else {"content-type": "application/json"}
        short = path.removeprefix("/v1")
        keyed = {**headers, "authorization": "Bearer s3cret"}
        for same in (short, f"{short}/", f"{path}/"):
            how = {"method": "GET" if body is None else "POST", "body": body}
            assert (await server.ask(same, **how, headers=headers)).status == 401
            assert (await server.ask(same, **how, headers=keyed)).status == 200
