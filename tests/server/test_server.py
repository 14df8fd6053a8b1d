"""What a server answers, and to whom: over scripted models in simulated time, and without sockets."""

import itertools
import json
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
from apis import APIS
from asgi import (
    BOTH,
    CHAT,
    COMPLETIONS,
    DEF,
    HELLO,
    MESSAGES,
    MODEL,
    STREAMED,
    Exchange,
    Letters,
    Served,
    ask,
    direct,
    figures,
    looping,
    models,
    on_server,
    pieces,
    real_server,
    saying,
    simulated_server,
    watched_streams,
)
from chat_models import BEGUN_TEMPLATE, THINKING_TEMPLATE, target, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tokenizers import EMOJI_BYTES, byte_fallback, demo
from schemas import closed_object
from scripted import ScriptedModel, hashed, priced
from sweeps import sweep

import runtime
from runtime.generation.text import apply_chat_template
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.events import Answer
from runtime.server.answers.api import token_bytes
from runtime.server.context import RequestAdmission
from runtime.server.errors import ErrorResponse
from runtime.server.limits import Limits

FAILS = {"feed": range(8, 10_000)}

# --- answers --------------------------------------------------------------------------------------


@BOTH
@sweep("ending", ["length", "logprobs", "stop", "end"])
def test_chunks_add_up_to_the_whole_answer(ending, path, body):
    async def test(server: Served) -> None:
        whole = (await direct(server, body, max_tokens=30)).text
        more = {
            "length": {"max_tokens": 30},
            "logprobs": {"max_tokens": 30, "logprobs": True if path == CHAT else 2},
            "stop": {"max_tokens": 30, "stop": [whole[11:13]]},
            "end": {"max_tokens": 400},
        }[ending]
        asked = {**body, **more}
        answer = await server.ask(path, asked)
        streamed = await server.ask(path, {**asked, "stream": True})
        assert streamed.is_done
        assert streamed.is_whole
        assert streamed.text == answer.text
        assert len(answer.text) >= 3
        *choices, last = [event["choices"][0] for event in streamed.events]
        reason = "length" if ending in ("length", "logprobs") else "stop"
        assert last["finish_reason"] == answer.json["choices"][0]["finish_reason"] == reason
        assert {choice["finish_reason"] for choice in choices} == {None}
        # Some clients do not look for text where they find a finish reason.
        assert (last.get("text", ""), last.get("delta", {}), last["logprobs"]) == ("", {}, None)
        if ending != "stop":  # for a stop string, text is withheld
            assert choices[-1].get("text") or choices[-1]["delta"]
        assert len({(event["id"], event["created"], event["model"], event["object"]) for event in streamed.events}) == 1
        if path == CHAT:
            roles = [choice["delta"].get("role") for choice in (*choices, last)]
            assert roles == ["assistant"] + [None] * (len(roles) - 1)

    simulated_server(test, *models(hashed("ends", 4.0) if ending == "end" else looping))


@on_server(*models(hashed("clients", 4.0)), max_waiting=100)
async def test_each_of_a_hundred_clients_at_once_has_the_answer_that_it_has_alone(server):
    names = itertools.product("abcdefghij", repeat=2)
    bodies = [{"prompt": f"def {a}{b}", "max_tokens": 5 + number % 5} for number, (a, b) in enumerate(names)]
    alone = [(await direct(server, body, max_tokens=body["max_tokens"])).text for body in bodies]
    assert len(set(alone)) == 100
    answers: dict[int, str] = {}

    async def visit(number: int) -> None:
        answers[number] = (await server.ask(COMPLETIONS, {**bodies[number], "stream": number % 2 == 0})).text

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(visit, number)
    assert [answers[number] for number in range(100)] == alone


def two_ways(history: Sequence[int]) -> Sequence[float]:
    """Two tokens are possible after each, and no other."""
    return [math.log(0.75 if i == (history[-1] + 1) % 50 else 0.25) if i in likely(history) else -math.inf
            for i in range(64)]  # fmt: skip


def likely(history: Sequence[int]) -> tuple[int, int]:
    return ((history[-1] + 1) % 50, (history[-1] + 2) % 50)


def logprobs_of(answer: Exchange, *names: str) -> dict[str, list[Any]]:
    """The lists of log-probabilities in the first choice, from one body or from chunks."""
    is_streamed = answer.headers["content-type"].startswith("text/event-stream")
    parts = [event["choices"][0]["logprobs"] for event in (answer.events if is_streamed else [answer.json])]
    return {name: [item for part in parts if part is not None for item in part[name]] for name in names}


@STREAMED
@on_server(two_ways)
async def test_log_probabilities_of_a_chat(server, stream):
    start = server.tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True)
    for most in (None, 0, 3):
        asked = {**HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": most, "stream": stream}
        answer = await server.ask(CHAT, asked)
        content = logprobs_of(answer, "content")["content"]
        assert "".join(item["token"] for item in content) == answer.text
        assert [bytes(item["bytes"]).decode() for item in content] == list(answer.text)
        assert [item["logprob"] for item in content] == pytest.approx([math.log(0.75)] * 4, abs=1e-5)
        assert [len(item["top_logprobs"]) for item in content] == [most or 0] * 4
        if most == 3:
            assert [top["token"] for top in content[0]["top_logprobs"][:2]] == [
                server.tokenizer.decode([token]) for token in likely(start)
            ]
            assert content[0]["top_logprobs"][2]["logprob"] == -9999.0


@on_server(ScriptedModel(saying("yes", 5)))
async def test_the_token_that_ends_a_text_is_no_text_and_has_no_log_probability(server):
    answer = await server.ask(COMPLETIONS, {**DEF, "logprobs": 1})
    assert (answer.text, answer.json["choices"][0]["logprobs"]["tokens"]) == ("yes", ["y", "e", "s"])
    assert answer.json["usage"]["completion_tokens"] == 4
    chat = await server.ask(COMPLETIONS, {**DEF, "stop": "es", "logprobs": 1})
    assert (chat.text, chat.json["choices"][0]["finish_reason"]) == ("y", "stop")


def test_the_bytes_of_parts_of_characters_add_up_to_them():
    fallback = byte_fallback()
    emoji = [fallback.convert_tokens_to_ids(name) for name in EMOJI_BYTES]
    cases: list[tuple[Any, list[int], str]] = [(demo(), demo().encode("é🙂"), "é🙂"), (fallback, emoji, "🙂")]
    for tokens, ids, expected in cases:
        texts = [tokens.decode([id]) for id in ids]
        assert "\ufffd" in "".join(texts)
        parts = [token_bytes(tokens, id, text) for id, text in zip(ids, texts, strict=True)]
        assert bytes(byte for part in parts for byte in part or []).decode() == expected


def test_bytes_that_a_tokenizer_does_not_tell_are_unknown():
    tokenizer: Any = Letters()
    assert token_bytes(tokenizer, 3, "é") == [0xC3, 0xA9]
    assert token_bytes(tokenizer, 3, "\ufffd") is None


@on_server(ScriptedModel(saying("yesno", 5)))
async def test_offsets_of_tokens_count_what_is_withheld_for_a_stop_string(server):
    # "ye" may become the first stop string, and "sno" is the second.
    asked = {**DEF, "stop": ["yet", "sno"], "logprobs": 1, "max_tokens": 20}
    for stream in (False, True):
        answer = await server.ask(COMPLETIONS, {**asked, "stream": stream})
        assert answer.text == "ye"
        assert logprobs_of(answer, "tokens", "text_offset") == {"tokens": list("yesno"), "text_offset": [0, 1, 2, 3, 4]}


@BOTH
@on_server(looping, price=priced(prefill=8.0, decode=2.0, verify=2.0))
async def test_the_first_chunk_of_each_choice_comes_with_its_first_token(server, path, body):
    seen = watched_streams(server)
    answer = await server.ask(path, {**body, "max_tokens": 3, "n": 2, "stream": True, "lookahead": 0})
    sent = zip(answer.sent, answer.times, strict=True)
    times = [time for message, time in sent if b"data: " in message.get("body", b"")]
    waited = [stream.statistics().time_to_first_token for _, stream in seen]
    assert times[0] - answer.times[0] == pytest.approx(min(waited), abs=0.1)
    assert min(waited) > 5
    for index in range(2):
        first, *others = [event["choices"][0] for event in answer.events if event["choices"][0]["index"] == index]
        if path == CHAT:
            # As OpenAI's service has it: the role in a chunk of its own.
            assert first["delta"] == {"role": "assistant", "content": ""}
            first, *others = others
        assert first.get("text") or first["delta"]["content"]
        assert len(others) == 3


# --- thoughts -------------------------------------------------------------------------------------

TAGS = ("<t>", "</t>")


def told_apart(text: str, *, is_thinking: bool) -> tuple[str, str]:
    """What is said and what is thought in a text, in a few plain lines."""
    apart = {False: "", True: ""}
    is_first = not is_thinking
    while True:
        part, tag, rest = text.partition(TAGS[is_thinking])
        if part.strip() and not is_thinking:
            part, tag = text, ""  # after other text the opening tag is a word
        text = rest
        part = part if is_first else part.lstrip()
        apart[is_thinking] += part.rstrip() if is_thinking else part
        if not tag:
            return apart[False], apart[True]
        is_thinking, is_first = not is_thinking, False


@settings(max_examples=120)
@given(
    st.lists(st.sampled_from(["<t>", "</t>", "<", "t", ">", "/", " ", "\n", "a", "b", "<t", "</"]), max_size=14),
    st.lists(st.integers(0, 30), max_size=8),
    st.booleans(),
)
def test_thoughts_are_told_apart_however_a_text_is_cut(parts, cuts, is_thinking):
    text = "".join(parts)
    reader, answer = AnswerReader(tags=TAGS, is_thinking=is_thinking), Answer()
    for piece in pieces(text, cuts):
        answer.add(reader.add(piece))
    answer.add(reader.finish(is_complete=True))
    assert (answer.content, answer.reasoning) == told_apart(text, is_thinking=is_thinking)


# --- a full house ---------------------------------------------------------------------------------


@on_server(looping, max_streams=2, max_waiting=1)
async def test_a_full_house_says_when_to_come_again(server):
    async with AsyncExitStack() as stack:
        long = {**DEF, "max_tokens": 50, "lookahead": 0}
        asked = [await stack.enter_async_context(server.exchange(COMPLETIONS, long)) for _ in range(3)]
        await trio.sleep(100)
        assert (server.simulation.runtime.num_streams, server.simulation.runtime.num_waiting) == (2, 1)
        for path, body in ((COMPLETIONS, DEF), (CHAT, HELLO)):
            refused = await server.ask(path, body)
            assert (refused.status, refused.fault["type"]) == (429, "rate_limit_error")
            seconds = int(refused.headers["retry-after"])
            assert 1 <= seconds <= 60
            assert "2 requests are being answered and 1 wait" in refused.fault["message"]
        for api in APIS.values():
            refused = await server.ask(api.path, api.asked)
            kind = "rate_limit_error" if api.path == MESSAGES else "rate_limit_exceeded"
            assert (refused.status, api.error(refused)[1]) == (429, kind)
        assert (await server.ask("/health")).json["waiting"] == 1
    assert [answer.status for answer in asked] == [200] * 3
    assert await server.outcomes() == {"finished": 3, "refused": 5}
    assert (await figures(server.app))["outrider_refusals_total", "429"] == 5


@on_server(looping, memory_limit=100)
async def test_requests_wait_for_memory_and_a_prompt_that_never_fits_is_refused(server):
    rt = server.simulation.runtime
    async with AsyncExitStack() as stack:
        long = {**DEF, "max_tokens": 50}
        asked = [await stack.enter_async_context(server.exchange(COMPLETIONS, long)) for _ in range(3)]
        await trio.sleep(100)
        assert rt.num_waiting > 0
        health = (await server.ask("/health")).json["models"][MODEL]
        assert (health["waiting"], health["reserved_bytes"]) == (rt.num_waiting, rt.memory.reserved)
        assert health["context_in_memory"] == rt.context_in_memory
        found = await figures(server.app)
        assert found["outrider_reserved_bytes", MODEL] == rt.memory.reserved
        assert found["outrider_context_in_memory_tokens", MODEL] == rt.context_in_memory
    assert [answer.status for answer in asked] == [200] * 3
    refused = await server.ask(COMPLETIONS, {**DEF, "prompt": [1] * 150})
    assert (refused.status, refused.fault["code"]) == (400, "context_length_exceeded")
    assert "prompt is too long: 150 tokens > 99 maximum" in refused.fault["message"]
    assert "memory_limit is 100 bytes" in refused.fault["message"]


@on_server(max_streams=1, max_waiting=0)
async def test_a_full_house_is_not_sent_a_body(server):
    async with server.exchange(COMPLETIONS, {**DEF, "max_tokens": 50}) as first:
        await trio.sleep(1)
        assert (await server.ask(COMPLETIONS)).status == 429  # though its body never comes
        first.leave()


def test_retry_after_follows_the_time_of_valid_answers():
    now = 0.0
    admission = RequestAdmission(lambda: 2, 1, lambda: now)
    assert admission.retry_after_s == 1
    for seconds in (30.0, 10.0):
        with admission.admit():
            now += seconds
        with suppress(ErrorResponse), admission.admit():
            raise ErrorResponse(400, "no")
    assert admission.retry_after_s == 10
    with admission.admit(), admission.admit():
        now += 60  # longer than the others took
        assert admission.retry_after_s == 30
        with admission.admit():
            assert admission.num_admitted == 3
            with pytest.raises(ErrorResponse, match=r"2 requests are being answered and 1 wait, .* in 20 s") as full:
                admission.check()
        assert full.value.headers == {"Retry-After": "20"}
    assert admission.num_admitted == 0
    with admission.admit():
        now += 10_000
    assert admission.retry_after_s == 60


def test_rejected_clients_are_told_to_come_one_after_the_other():
    now = 0.0
    admission = RequestAdmission(lambda: 4, 0, lambda: now)

    def told() -> int:
        with pytest.raises(ErrorResponse) as full:
            admission.check()
        return int(full.value.headers["Retry-After"])

    with admission.admit():
        now += 10
    with admission.admit(), admission.admit(), admission.admit(), admission.admit():
        # A request ends every 2.5 s.
        assert [told() for _ in range(5)] == [3, 5, 8, 10, 13]
        now += 5
        assert told() == 10
        # Clients do not wait for longer, or not for as long as they are told.
        assert [told() for _ in range(50)][-1] == 60
        now += 100
        assert told() > 3


# --- clients that leave ---------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.integers(0, 400), st.booleans(), st.sampled_from([0, 3, "auto"]), st.integers(0, 1000))
def test_a_client_may_leave_at_any_time_beside_another(quarters, stream, lookahead, schedule):
    leaves_at = quarters / 4

    async def test(server: Served) -> None:
        simulation = server.simulation
        expected = (await direct(server, DEF, max_tokens=12, lookahead=0)).text
        began = trio.current_time()
        async with server.exchange(COMPLETIONS, {**DEF, "max_tokens": 12}) as other:
            asked = {"prompt": "a" * 3000, "max_tokens": 30, "lookahead": lookahead, "stream": stream}
            async with server.exchange(COMPLETIONS, asked) as one:
                left_at = began + leaves_at
                await trio.sleep_until(left_at)
                one.leave()
            assert one.over_at <= left_at, "it was not let go at once"
        assert other.text == expected
        sessions = {span.session for span in simulation.spans("target", "prefill") if span.num_tokens > 100}
        late = [
            span
            for actor in ("target", "draft")
            for session in sessions
            for span in simulation.spans(actor, "prefill", "draft", "verify", "decode", session=session)
            if span.began > left_at
        ]
        assert late == []
        assert await server.outcomes() in ({"finished": 2}, {"finished": 1, "cancelled": 1})

    simulated_server(test, *models(), tokenising_s=2.0, schedule=schedule)


# --- models that fail -----------------------------------------------------------------------------


@on_server(ScriptedModel(looping, fails=FAILS))
async def test_waiting_for_a_break_ends_after_all_streams_have_their_error(server):
    rt, broken = server.simulation.runtime, []

    async def wait() -> None:
        assert str(await rt.wait_broken()).startswith("the target model failed, and the runtime with it: ")
        broken.append(rt.num_streams)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        assert (await server.ask(COMPLETIONS, {**DEF, "max_tokens": 2, "lookahead": 0})).status == 200
        assert broken == []
        await server.ask(COMPLETIONS, {**DEF, "lookahead": 0})
    assert broken == [0]
    await rt.wait_broken()


@on_server(*models())
async def test_a_server_without_its_drafter_stays_in_service(server, monkeypatch):
    assert (await server.ask("/health")).json["status"] == "ok"
    monkeypatch.setattr(runtime.Runtime, "health", lambda _: runtime.Health(target=True, draft=False))
    health = await server.ask("/health")
    assert (health.status, health.json["status"], health.json["draft"]) == (200, "degraded", False)
    found = await figures(server.app)
    assert (found["outrider_healthy", MODEL], found["outrider_degraded", MODEL]) == (1, 1)


@STREAMED
@on_server(ScriptedModel(looping, fails={"check": {6}}))
async def test_a_text_that_cannot_be_trusted_is_not_given(server, stream):
    answer = await server.ask(COMPLETIONS, {**DEF, "max_tokens": 50, "stream": stream})
    if stream:
        assert answer.events[-1]["error"]["code"] == "generation_failed"
        assert not answer.is_done
    else:
        assert (answer.status, answer.fault["code"]) == (500, "generation_failed")
    # The cache of one stream was wrong; the models are there.
    assert (await server.ask(COMPLETIONS, {**DEF, "max_tokens": 3})).status == 200


@on_server(looping, price=priced(prefill=4.0, decode=4.0, verify=4.0))
async def test_a_stream_whose_text_is_withheld_is_kept_alive(server):
    asked = {**DEF, "max_tokens": 16, "lookahead": 0}
    stop = (await server.ask(COMPLETIONS, asked)).text + "and more"
    answer = await server.ask(COMPLETIONS, {**asked, "stream": True, "stop": stop})
    assert answer.body.count(b": keep-alive\n\n") >= 3
    assert max(after - before for before, after in itertools.pairwise(answer.times)) < 20


# --- real models ----------------------------------------------------------------------------------


SCHEMA = closed_object(side={"enum": ["left", "right"]}, far={"type": "boolean"})
_SWITCHED = THINKING_TEMPLATE.replace("enable_thinking is false", "thinking is defined and not thinking")
_OFF: list[dict[str, Any]] = [{}, {"thinking": {"type": "disabled"}}]
_ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled"}},
    {"enable_thinking": True},
    {"reasoning_effort": "high"},
    {"chat_template_kwargs": {"enable_thinking": True}},
]


@sweep(
    ("template", "cases"),
    [
        (THINKING_TEMPLATE, [*_OFF, *_ON]),
        (_SWITCHED, [*_OFF, _ON[0], {"chat_template_kwargs": {"thinking": True}}]),
        (BEGUN_TEMPLATE, [{}]),  # has no switch
    ],
)
async def test_reasoning_comes_before_json_if_it_was_asked_for_or_has_begun(template, cases):
    """vllm-project/vllm #47027."""
    wanted = {"type": "json_schema", "json_schema": {"name": "way", "schema": SCHEMA}}
    of = tokenizer(template, thinks=True)
    biased = {"response_format": wanted, "logit_bias": {"<think>": 100, "</think>": 100}}
    async with real_server((target(), of), limits=Limits(max_tokens=120)) as (app, _):
        for fields in cases:
            reasons = template == BEGUN_TEMPLATE or fields not in _OFF
            answer = await ask(app, CHAT, {**HELLO, **fields, **biased})
            assert json.loads(answer.text)["side"] in ("left", "right")
            usage = answer.json["usage"]
            assert bool(usage["completion_tokens_details"]["reasoning_tokens"]) is reasons
            told = apply_chat_template(HELLO["messages"], of, enable_thinking=reasons)
            assert usage["prompt_tokens"] == len(told)
        streamed = await ask(app, CHAT, {**HELLO, **cases[-1], **biased, "stream": True})
        assert json.loads(streamed.text)["side"] in ("left", "right")


@sweep(
    ("template", "fields", "named"),
    [
        (BEGUN_TEMPLATE, {"thinking": {"type": "disabled"}}, "thinking"),
        (BEGUN_TEMPLATE, {"enable_thinking": True}, "thinking"),
        (BEGUN_TEMPLATE, {"reasoning_effort": "none"}, "reasoning_effort"),
        (BEGUN_TEMPLATE, {"reasoning_effort": "low"}, None),
        (_SWITCHED, {"enable_thinking": False}, None),
    ],
)
async def test_a_switch_that_the_template_does_not_have_is_named(template, fields, named):
    """sgl-project/sglang #9488."""
    async with real_server((target(), tokenizer(template, thinks=True))) as (app, _):
        for path, more in ((CHAT, {"max_tokens": 2}), ("/v1/tokenize", {})):
            answer = await ask(app, path, {**HELLO, **fields, **more})
            assert (answer.status, answer.headers.get("x-outrider-ignored")) == (200, named)
