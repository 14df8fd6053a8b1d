"""Fields that other servers have: what they do here; or they are named as ignored, or refused by a strict server."""

import json
from typing import Any, ClassVar

import mlx.core as mx
import pytest
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
    Letters,
    direct,
    models,
    on_server,
    saying,
    watched_streams,
)
from assembled import text_of
from chat_models import calling_tokenizer
from scripted import ScriptedModel, hashed
from sweeps import sweep
from transformers import AddedToken

from runtime.generation.tokens import Token
from runtime.server.answers.api import ShownTokens
from runtime.server.answers.body import IgnoredFields, parse_request
from runtime.server.answers.preparation import min_tokens
from runtime.server.errors import ErrorResponse
from runtime.server.limits import Limits
from runtime.server.openai.requests import ChatRequest

HEADER = "x-outrider-ignored"
OTHERS = [(RESPONSES, {"input": "hello", "max_output_tokens": 30}), (MESSAGES, {**HELLO, "max_tokens": 30})]


@sweep(("path", "body"), [(COMPLETIONS, {**DEF, "max_tokens": 30}), (CHAT, {**HELLO, "max_tokens": 30}), *OTHERS])
@on_server()
async def test_a_text_ends_with_what_has_stopped_it_where_that_is_asked_for(server, path, body):
    whole = (await direct(server, DEF if path == COMPLETIONS else HELLO, max_tokens=30)).text
    stop = whole[11:13]
    token = {"stop": "", "stop_token_ids": [Letters.ALPHABET.index(whole[11])]}
    ends = (({"stop": stop}, whole[: whole.index(stop)] + stop), (token, whole[: whole.index(whole[11]) + 1]))
    for more, expected in ends:
        asked = {**body, "include_stop_str_in_output": True, **more}
        answer, streamed = await server.ask(path, asked), await server.ask(path, {**asked, "stream": True})
        assert HEADER not in answer.headers
        assert text_of(answer) == text_of(streamed) == expected


@on_server(hashed("ends", 4.0), hashed("draft", 1.0, hashed("ends", 4.0)))
async def test_an_answer_has_at_least_so_many_tokens_whether_it_is_drafted_or_not(server):
    short = await server.ask(COMPLETIONS, {**DEF, "max_tokens": 400})
    least = short.json["usage"]["completion_tokens"] + 8
    for manner in ({}, {"temperature": 1, "seed": 3}):
        asked = {**DEF, **manner, "max_tokens": 400, "min_tokens": least}
        drafted, plain = [await server.ask(COMPLETIONS, {**asked, "lookahead": lookahead}) for lookahead in (4, 0)]
        assert drafted.text == plain.text
        assert "\n" not in drafted.text
        assert drafted.json["usage"]["completion_tokens"] >= least
        assert drafted.json["usage"]["accepted_tokens"] > plain.json["usage"]["accepted_tokens"] == 0
    assert plain.json["choices"][0]["finish_reason"] == "stop"


@on_server()
async def test_a_stop_token_does_not_end_an_answer_before_its_least_length(server):
    token = Letters.ALPHABET.index((await direct(server, DEF, max_tokens=5)).text[0])
    stop = {**DEF, "max_tokens": 30, "stop_token_ids": [token]}
    assert (await server.ask(COMPLETIONS, stop)).json["usage"]["completion_tokens"] == 1
    longer = await server.ask(COMPLETIONS, {**stop, "min_tokens": 8})
    assert longer.json["usage"]["completion_tokens"] >= 8
    assert Letters.ALPHABET[token] not in longer.text


def test_a_text_may_end_where_nothing_else_is_allowed():
    processor = min_tokens(4, [1, 9])
    logits = mx.array([[0.5, 2.0, 1.0]])
    only_the_end = mx.array([[-mx.inf, 2.0, -mx.inf]])
    assert processor(mx.array([0, 0, 0]), logits).tolist() == [[0.5, -mx.inf, 1.0]]
    assert processor(mx.array([0, 0, 0]), only_the_end).tolist() == only_the_end.tolist()
    assert processor(mx.array([0, 0, 0, 0]), logits).tolist() == logits.tolist()


@on_server(ScriptedModel(lambda history: [float(i == history[-1]) for i in range(64)], context_length=40))
async def test_an_answer_that_may_be_longer_than_the_context_ends_there(server):
    for max_tokens in (-1, 36, 10**30):
        answer = await server.ask(COMPLETIONS, {**DEF, "max_tokens": max_tokens})
        assert answer.json["usage"]["total_tokens"] == 40
        answer = await server.ask(MESSAGES, {**HELLO, "max_tokens": max_tokens})
        usage = answer.json["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 40


VARIABLES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ({"reasoning_effort": "none"}, {"enable_thinking": False}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
    ({"enable_thinking": False}, {"enable_thinking": False}),
    ({"chat_template_kwargs": {"enable_thinking": True, "a": [1]}}, {"enable_thinking": True, "a": [1]}),
    ({"chat_template_args": {"a": 1}, "reasoning_effort": "none"}, {"enable_thinking": False, "a": 1}),
    # Names that Python functions on the way have for their own arguments.
    *(({"chat_template_kwargs": {name: 1}}, {name: 1}) for name in ("prompt", "tokenizer", "context_length")),
]


class Watched(Letters):
    """Letters whose template keeps the variables that it was given."""

    given: Any = None

    def apply_chat_template(self, messages: Any, **more: Any) -> Any:
        self.given = {name: more[name] for name in more if name not in ("add_generation_prompt", "tokenize")}
        return super().apply_chat_template(messages, **more)


@on_server(tokenizer=Watched())
async def test_variables_of_the_chat_template_reach_it(server):
    tokenizer: Any = server.tokenizer
    for fields, expected in VARIABLES:
        answer = await server.ask(CHAT, {**HELLO, **fields, "max_tokens": 1})
        assert (answer.status, tokenizer.given) == (200, expected)
        # They mean the same in the other APIs.
        if "thinking" not in fields:
            answer = await server.ask(RESPONSES, {"input": "hello", **fields, "max_output_tokens": 1})
            assert (answer.status, tokenizer.given) == (200, expected)


def test_special_tokens_but_reasoning_marks_are_left_out_on_request():
    tokenizer = calling_tokenizer()
    ids = tokenizer.encode("<think>a</think>b<|user|>", add_special_tokens=False)
    tokens = [Token(id, tokenizer.decode([id]), i, drafted_by=None) for i, id in enumerate(ids)]

    def shown(**fields: Any) -> str:
        request = parse_request(ChatRequest, json.dumps({**HELLO, **fields}).encode()).generation()
        return "".join(token.text for token in ShownTokens(request, tokenizer)(tokens))

    assert shown(skip_special_tokens=True) == "<think>a</think>b"
    assert shown() == shown(skip_special_tokens=False) == "<think>a</think>b<|user|>"
    with_tools = shown(skip_special_tokens=True, tools=[{"type": "function", "function": {"name": "f"}}])
    assert with_tools == "<think>a</think>b<|user|>"


class WithSpecialToken(Letters):
    """Letters, of which x is a special token."""

    added_tokens_decoder: ClassVar[Any] = {Letters.ALPHABET.index("x"): AddedToken("x", special=True)}


@on_server(saying("axbxc", len(DEF["prompt"])), tokenizer=WithSpecialToken())
async def test_special_tokens_that_are_left_out_have_no_place_in_the_text(server):
    asked = {**DEF, "skip_special_tokens": True, "logprobs": 0}
    (choice,) = (await server.ask(COMPLETIONS, asked)).json["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("abc", [0, 1, 1, 2, 2])
    assert choice["logprobs"]["tokens"] == list("axbxc")


OTHER_NAMES = [("seed", "random_seed", 4), ("thinking", "enable_thinking", False)]


@sweep(("name", "other", "value"), OTHER_NAMES)
def test_null_is_as_if_a_field_was_not_sent(name, other, value):
    def parsed(**fields: Any) -> ChatRequest:
        return parse_request(ChatRequest, json.dumps({**HELLO, **fields}).encode())

    for fields in ({name: None, other: value}, {other: value, name: None}, {name: value, other: None}):
        request = parsed(**fields)
        assert (getattr(request, name), request.ignored.header) == (value, None)
    with pytest.raises(ErrorResponse, match=f"{name} must be") as refused:
        parsed(**{name: None, other: "x"})
    assert refused.value.detail["param"] == name


@on_server(hashed("never the same", 4.0), hashed("draft", 20.0))
async def test_a_prediction_is_drafted_from(server):
    plain = await server.ask(CHAT, {**HELLO, "max_tokens": 40})
    seen = watched_streams(server)
    for content in (plain.text, [{"type": "text", "text": plain.text[:7]}, {"type": "text", "text": plain.text[7:]}]):
        predicted = {**HELLO, "max_tokens": 40, "prediction": {"type": "content", "content": content}}
        answer = await server.ask(CHAT, predicted)
        assert (answer.text, answer.headers.get(HEADER)) == (plain.text, None)
        assert seen[-1][0].prediction == tuple(Letters().encode(plain.text))
    assert answer.json["usage"]["accepted_tokens"] > plain.json["usage"]["accepted_tokens"]


@BOTH
@on_server()
async def test_each_chunk_has_the_usage_so_far_where_that_is_asked_for(server, path, body):
    options = {"continuous_usage_stats": True, "include_usage": True}
    answer = await server.ask(path, {**body, "max_tokens": 20, "stream": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in answer.events]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 20
    assert len(set(counts)) > 2
    options["include_usage"] = False
    answer = await server.ask(path, {**body, "max_tokens": 20, "stream": True, "stream_options": options})
    assert all("usage" not in event for event in answer.events)


@BOTH
@on_server(*models())
async def test_an_answer_or_its_last_chunk_has_llama_cpp_s_timings(server, path, body):
    seen = watched_streams(server)
    for options in (None, {"include_usage": True}):
        asked = {**body, "max_tokens": 20, "lookahead": 3}
        streamed = await server.ask(path, {**asked, "stream": True, "stream_options": options})
        *chunks, last = streamed.events
        assert not any("timings" in chunk for chunk in chunks)
        whole = (await server.ask(path, asked)).json
        for timings, (_, stream) in zip((last["timings"], whole["timings"]), seen[-2:], strict=True):
            s = stream.statistics()
            assert (timings["cache_n"] + timings["prompt_n"], timings["predicted_n"]) == (s.prompt_tokens, 20)
            assert (timings["draft_n"], timings["draft_n_accepted"]) == (s.proposed, s.accepted)
            assert timings["predicted_per_second"] == s.generation_tps
            assert timings["predicted_ms"] == pytest.approx(20 * timings["predicted_per_token_ms"])
            # Of a cached prompt, the first round reads the last token.
            read_s = s.prefilled_tokens / s.prompt_tps if s.prompt_tps else s.time_to_first_token
            assert timings["prompt_ms"] == pytest.approx(1e3 * read_s)
            assert timings["prompt_per_second"] == pytest.approx(timings["prompt_n"] / read_s)
            assert timings["prompt_n"] >= 1
    for several in ({"n": 2}, {"n": 2, "stream": True}):
        assert b"timings" not in (await server.ask(path, {**body, "max_tokens": 5, **several})).body
    assert "draft_n" not in (await server.ask(path, {**body, "max_tokens": 5, "lookahead": 0})).json["timings"]


# --- fields that mean nothing here ----------------------------------------------------------------

SAID = {"role": "user", "content": "hello"}
ASKED: dict[str, dict[str, Any]] = {COMPLETIONS: DEF, CHAT: HELLO, RESPONSES: {"input": "hello"}}
ASKED |= dict.fromkeys((MESSAGES, COUNT_TOKENS), HELLO)

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


CACHED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
# The same in every API, and within other objects.
NESTED: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": [{**SAID, "x": 1}, {**SAID, "x": 2}]}, "messages.x"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "refusal": "b", "annotations": [1]}, SAID]}, None),
    (RESPONSES, {"truncation": "auto", "include": ["x"], "min_p": 0.1}, "truncation, include"),
    (RESPONSES, {"text": {"verbosity": "a"}, "reasoning": {"summary": "b"}}, "text.verbosity, reasoning.summary"),
    (RESPONSES, {"input": [{**SAID, "id": "a", "status": "completed"}], "user": "me", "metadata": {}}, None),
    (MESSAGES, {"container": "a", "metadata": {"user_id": "me"}, "seed": 3}, "container, metadata"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9, "x": 1}}, "thinking.x"),
    (COUNT_TOKENS, {"system": [CACHED], "x": 1}, "x, system.cache_control"),
]


NOTHING = {"audio": None, "web_search_options": None, "annotations": [], "user": None, "model": "gpt-4o", "seed": 3}


@on_server(limits=Limits(max_tokens=3))
@sweep(
    ("path", "fields", "named"),
    [
        *((path, *each) for path in (COMPLETIONS, CHAT) for each in IGNORED),
        *NESTED,
        *((path, NOTHING, None) for path in ASKED),
    ],
)
async def test_a_field_that_means_nothing_is_ignored_and_named(server, path, fields, named):
    answer = await server.ask(path, {**ASKED[path], **fields})
    assert (answer.status, answer.headers.get(HEADER)) == (200, named)
    if path in (COMPLETIONS, CHAT) and "messages" not in fields:
        assert answer.text == (await direct(server, ASKED[path], max_tokens=3)).text


@on_server(is_strict=True, limits=Limits(max_tokens=3))
async def test_a_strict_server_describes_what_it_refuses(server):
    described = (await server.ask("/openapi.json")).json
    for path, body in ASKED.items():
        assert (await server.ask(path, {**body, "zzz": 1})).status == 400
        accepted = await server.ask(path, {**body, "service_tier": "auto", "audio": None})
        assert (accepted.status, accepted.headers[HEADER]) == (200, "service_tier")
        name = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert described["components"]["schemas"][name.rpartition("/")[2]]["additionalProperties"] is False


def test_a_header_has_only_so_many_names():
    header = IgnoredFields({f"a{i}": False for i in range(40)}).header
    assert header.split(", ") == [*(f"a{i}" for i in range(32)), "+8 more"]


@on_server(limits=Limits(max_tokens=3))
async def test_any_model_name_means_the_one_model(server):
    for path, body in ASKED.items():
        answer = await server.ask(path, {**body, "model": "gpt-4o"})
        assert answer.status == 200
        assert path == COUNT_TOKENS or answer.json["model"] == MODEL
        assert path not in (COMPLETIONS, CHAT) or answer.json["system_fingerprint"].startswith("outrider-")


@on_server(api_key="s3cret", limits=Limits(max_tokens=3))
async def test_paths_without_a_version_are_those_with_it_and_need_the_key(server):
    for path, body in {**ASKED, "/v1/models": None}.items():
        headers = {} if body is None else {"content-type": "application/json"}
        short = path.removeprefix("/v1")
        keyed = {**headers, "authorization": "Bearer s3cret"}
        for same in (short, f"{short}/", f"{path}/", f"/{path}", f"/{short}", path.replace("/", "//")):
            how = {"method": "GET" if body is None else "POST", "body": body}
            assert (await server.ask(same, **how, headers=headers)).status == 401
            assert (await server.ask(same, **how, headers=keyed)).status == 200
