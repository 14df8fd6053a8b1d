"""What holds in each API of conversations: answers, usage, ends, errors and settings."""

import itertools
from typing import Any
from unittest import mock

import trio
from apis import EACH, NUM_TOKENS, Api, is_streamed
from asgi import (
    CHAT,
    HELLO,
    MESSAGES,
    MODEL,
    RESPONSES,
    STREAMED,
    Exchange,
    Letters,
    Served,
    answering,
    direct,
    figures,
    looping,
    models,
    on_server,
    simulated_server,
    watched_streams,
)
from assembled import adapter, body_of, text_of
from scripted import ScriptedModel, priced
from sweeps import sweep

from protocol.settings import settings_from


async def both_ways(server: Served, api: Api, **more: Any) -> list[Any]:
    """The bodies of two answers, of which the second is streamed."""
    usage = {"stream_options": {"include_usage": True}} if api.path == CHAT else {}
    bodies = []
    for fields in ({}, {"stream": True, **usage}):
        answer = await server.ask(api.path, {**api.asked, **more, **fields})
        assert answer.is_whole
        bodies.append(body_of(answer))
    return bodies


@EACH
@sweep("at_length", [True, False])
def test_events_add_up_to_the_whole_answer(at_length, api):
    async def test(server: Served) -> None:
        whole = (await direct(server, HELLO, max_tokens=NUM_TOKENS)).text
        for stream in (False, True):
            answer = await server.ask(api.path, {**api.asked, "stream": stream})
            body = body_of(answer)
            if not (stream and api.path == CHAT):
                adapter(api.kind).validate_python(body, strict=True)
            assert (answer.is_whole, text_of(answer), body["model"]) == (True, whole, "scripted")
            assert api.end(body) == api.ends[0 if at_length else 1]
            assert body["id"].startswith(api.prefix)
            if api.path == RESPONSES:
                assert body["output"][0]["status"] == body["status"]
                assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if at_length else None)
                assert (body["error"], body["max_output_tokens"]) == (None, NUM_TOKENS)

    simulated_server(test, *(models() if at_length else (answering("yes, a word."),)))


@EACH
@on_server()
async def test_usage_is_what_the_statistics_say(server, api):
    seen = watched_streams(server)
    usages = [body["usage"] for body in await both_ways(server, api)]
    assert usages == [api.usage(stream.statistics()) for _, stream in seen]
    # The same prompt again is not read again, but for its last token.
    assert seen[0][1].statistics().cached_tokens == 0 < seen[1][1].statistics().cached_tokens


@EACH
@on_server()
async def test_a_stop_string_ends_an_answer(server, api):
    whole = (await direct(server, HELLO, max_tokens=NUM_TOKENS)).text
    for stream in (False, True):
        answer = await server.ask(api.path, {**api.asked, api.stop: [whole[7:10]], "stream": stream})
        assert text_of(answer) == whole.partition(whole[7:10])[0]
        body = body_of(answer)
        if api.path == MESSAGES:
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", whole[7:10])
        else:
            assert api.end(body) == api.ends[1]


@EACH
@on_server(*models())
async def test_fields_are_the_settings_that_they_stand_for(server, api):
    seen = watched_streams(server)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "lookahead": 2}
    # Extensions that are not simply settings are the same everywhere, too.
    more = {"cache_prompt": False, "logit_bias": {"7": -100}}
    await server.ask(api.path, {**api.asked, **fields, **more, api.stop: ["☂"]})
    wanted = {**fields, "stop": ["☂"], "max_tokens": NUM_TOKENS, "reuse_prefix": False, "logit_bias": {7: -100}}
    assert [each for each, _ in seen] == [settings_from(wanted)]


@EACH
@on_server(looping, price=priced(prefill=40.0, decode=40.0, verify=40.0))
async def test_a_stream_without_news_is_kept_alive(server, api):
    answer = await server.ask(api.path, {**api.asked, api.length: 3, "stream": True, "lookahead": 0})
    sign = b"event: ping" if api.path == MESSAGES else b": keep-alive\n\n"
    assert answer.body.count(sign) >= 2 * 3
    assert max(after - before for before, after in itertools.pairwise(answer.times)) <= 15
    assert len(text_of(answer)) == 3


@EACH
@on_server()
async def test_a_client_that_leaves_ends_its_generation_which_is_not_stored(server, api):
    async with server.exchange(api.path, {**api.asked, api.length: 500, "stream": True}) as leaving:
        await leaving.until(lambda answer: api.delta in answer.body)
        leaving.leave()
    assert server.simulation.runtime.num_streams == 0
    assert await server.outcomes() == {"cancelled": 1}
    if api.path == RESPONSES:
        id = leaving.named_events[0]["response"]["id"]
        assert (await server.ask(f"{RESPONSES}/{id}")).status == 404


@EACH
@STREAMED
@on_server(ScriptedModel(looping, fails={"feed": range(8, 10_000)}))
async def test_a_target_that_fails_is_an_error_in_the_form_of_each_api(server, stream, api):
    answer = await server.ask(api.path, {**api.asked, "lookahead": 0, "stream": stream})
    message, kind = api.error(answer)
    assert "the target model failed" in message
    assert kind == ("overloaded_error" if api.path == MESSAGES else "models_unavailable")
    assert (answer.status, is_streamed(answer)) == ((200, True) if stream else (503, False))
    assert not answer.is_done
    assert await server.outcomes() == {"failed": 1}
    later = await server.ask(api.path, api.asked)
    assert (later.status, api.error(later)[1]) == (503, kind)
    health = await server.ask("/health")
    assert health.status == 503
    assert {"ok": False, "target": False, "status": "broken"}.items() <= health.json.items()
    found = await figures(server.app)
    assert (found["outrider_healthy", MODEL], found["outrider_degraded", MODEL]) == (0, 0)
    if api.path == RESPONSES and stream:
        id = answer.named_events[-1]["response"]["id"]
        assert (await server.ask(f"{RESPONSES}/{id}")).status == 404


# --- prompts that are only read ------------------------------------------------------------------------


def num_cached(usage: Any, api: Api) -> int:
    if api.path == MESSAGES:
        return int(usage["cache_read_input_tokens"])
    return int(usage["input_tokens_details" if api.path == RESPONSES else "prompt_tokens_details"]["cached_tokens"])


@EACH
@on_server(*models())
async def test_a_request_for_no_tokens_reads_its_prompt_for_the_next_one(server, api):
    bodies = await both_ways(server, api, **{api.length: 0})
    for body in bodies:
        if api.path != CHAT:
            adapter(api.kind).validate_python(body, strict=True)
        assert api.end(body) == api.ends[0]
        assert body["usage"]["completion_tokens" if api.path == CHAT else "output_tokens"] == 0
        assert told(body, api, may_think=False) == ("", "")
    answer = await server.ask(api.path, api.asked)
    cached = [num_cached(body["usage"], api) for body in (*bodies, body_of(answer))]
    assert cached[0] == 0 < cached[1] == cached[2]
    for actor in ("target", "draft"):  # each has read it once
        assert sum(span.num_tokens for span in server.simulation.spans(actor, "prefill")) == cached[1]
    assert text_of(answer) == (await direct(server, HELLO, max_tokens=NUM_TOKENS)).text
    assert await server.outcomes() == {"finished": 3}


# --- answers that are ended by their ids --------------------------------------------------------------


def id_of(answer: Exchange) -> str:
    return next(answer.headers[name] for name in ("x-request-id", "request-id") if name in answer.headers)


def is_cancelled(body: Any, api: Api) -> bool:
    if api.path == RESPONSES:
        return bool(api.end(body) == "incomplete" and body["incomplete_details"] == {"reason": "cancelled"})
    return api.end(body) == "cancelled"


def post(server: Served, path: str) -> Any:
    return server.ask(path, method="POST", headers={})


@EACH
@on_server()
async def test_whoever_knows_its_id_cancels_an_answer_which_ends_with_what_there_is(server, api):
    async with server.exchange(api.path, {**api.asked, api.length: 500, "stream": True}) as asking:
        await asking.until(lambda answer: answer.body.count(api.delta) > 4)
        id = id_of(asking)
        cancelled = await post(server, f"{api.path}/{id}/cancel")
        assert (cancelled.status, cancelled.json) == (200, {"id": id, "status": "cancelled"})
    body, runtime = body_of(asking), server.simulation.runtime
    if api.path != CHAT:
        adapter(api.kind).validate_python(body, strict=True)
    assert (asking.is_whole, body["id"], is_cancelled(body, api)) == (True, id, True)
    assert (await direct(server, HELLO, max_tokens=500)).text.startswith(text_of(asking))
    assert len(text_of(asking)) >= 3
    assert (runtime.num_streams, await server.outcomes()) == (0, {"cancelled": 1})
    if api.path == RESPONSES:
        stored = await server.ask(f"{RESPONSES}/{id}")
        assert stored.json["output"][0]["content"][0]["text"] == text_of(asking)
    for unknown in (id, "msg_0"):
        for word in ("cancel", "end_thinking"):
            refused = await post(server, f"{api.path}/{unknown}/{word}")
            assert refused.status == 404
            assert "no such answer" in api.error(refused)[0]


@EACH
@on_server(price=priced(prefill=50.0))
async def test_a_cancelled_answer_whose_prompt_is_being_read_is_empty(server, api):
    async with server.exchange(api.path, {**api.asked, "stream": True}) as asking:
        await asking.until(lambda answer: bool(answer.sent))
        began = trio.current_time()
        await post(server, f"{api.path}/{id_of(asking)}/cancel")
    # The client need not wait for the pass that is running.
    assert (asking.over_at, asking.is_whole, is_cancelled(body_of(asking), api)) == (began, True, True)


@EACH
@on_server()
async def test_an_answer_as_one_body_has_its_id_in_a_header_and_is_cancelled_alike(server, api):
    with mock.patch("secrets.token_hex", return_value="7"):
        async with server.exchange(api.path, {**api.asked, api.length: 500}) as asking:
            await trio.sleep(20)
            assert (await post(server, f"{api.path}/{api.prefix}7/cancel")).status == 200
    assert (id_of(asking), is_cancelled(asking.json, api)) == (asking.json["id"], True)


LONG = "".join(Letters.ALPHABET[i % 26] for i in range(100))


@EACH
@on_server(answering("<t>" + LONG), tokenizer=Letters(thinks=True))
async def test_reasoning_is_ended_by_the_id_of_its_answer(server, api):
    async with server.exchange(api.path, {**api.asked, api.length: 200, "stream": True}) as asking:
        await asking.until(lambda answer: b"re" in answer.body and len(answer.sent) > 8)
        id = id_of(asking)
        ended = await post(server, f"{api.path}/{id}/end_thinking")
        assert (ended.status, ended.json) == (200, {"id": id, "status": "in_progress"})
    thought, said = told(body_of(asking), api)
    # By position, each letter is where it would be, but for the tag.
    assert thought + said == LONG[: len(thought)] + LONG[len(thought) + 4 :]
    assert 0 < len(thought) < len(LONG) - 4


# --- reasoning --------------------------------------------------------------------------------------


@sweep(
    ("text", "parts"),
    [
        ("<t> hm so </t> yes", [("thinking", "hm so"), ("text", "yes")]),
        ("first <t>hm</t> then", [("text", "first <t>hm</t> then")]),
        ("<t>never ends", [("thinking", "never ends")]),
        ("", []),
    ],
)
@EACH
def test_reasoning_is_parts_of_their_own_in_their_order(text, parts, api):
    tokenizer = Letters(thinks=True)

    async def test(server: Served) -> None:
        for body in await both_ways(server, api):
            if api.path == MESSAGES:
                assert [(block["type"], block[block["type"]]) for block in body["content"]] == parts
                assert all(block["signature"] == "" for block in body["content"] if block["type"] == "thinking")
            elif api.path == RESPONSES:
                names = {"thinking": "reasoning", "text": "message"}
                # Clients look for a message in a response.
                no_message = [] if any(kind == "text" for kind, _ in parts) else [("message", "")]
                items = [(item["type"], item["content"][0]["text"]) for item in body["output"]]
                assert items == [(names[kind], said) for kind, said in parts] + no_message
                assert (body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) is text.startswith("<t>")
            else:
                said, message = dict(parts), body["choices"][0]["message"]
                assert message["content"] == said.get("text", "")
                assert message.get("reasoning_content") == said.get("thinking")

    simulated_server(test, answering(text, tokenizer), tokenizer=tokenizer)


# In the form of each API, and in others'.
BUDGETS: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 4}},
    {"thinking_token_budget": 4, "thinking": True},
    {"thinking_budget_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 9}},
]


@sweep("budget", BUDGETS)
@EACH
@on_server(answering("<t>never enso yes"), tokenizer=Letters(thinks=True))
async def test_reasoning_ends_where_its_budget_does_and_the_answer_follows(server, budget, api):
    # The script goes on by position, behind the tag of four letters.
    for body in await both_ways(server, api, **budget):
        assert told(body, api) == ("neve", "so yes")
        assert api.end(body) == api.ends[1]


def told(body: Any, api: Api, *, may_think: bool = True) -> tuple[str, str]:
    """The reasoning of a body, and its text."""
    if api.path == MESSAGES:
        parts = [block[block["type"]] for block in body["content"]]
    elif api.path == RESPONSES:
        parts = [item["content"][0]["text"] for item in body["output"]]
    else:
        message = body["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]
    return ("", "".join(parts)) if not may_think else (parts[0], "".join(parts[1:]))
