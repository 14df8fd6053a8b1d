"""Several answers to a request, prompts that are repeated with their log-probabilities, and texts filled in."""

import math
from typing import Any

import pytest
import trio
from asgi import (
    CHAT,
    COMPLETIONS,
    FIM,
    HELLO,
    STREAMED,
    Letters,
    Served,
    direct,
    looping,
    on_server,
    simulated_server,
    watched_streams,
)
from scripted import Script, ScriptedModel
from sweeps import sweep

from runtime.server.answers.api import make_echo
from runtime.server.limits import Limits

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}


def always(logits: dict[str, float]) -> Script:
    """A script with the same logits after any history: 0 for all but some letters."""
    return lambda history: [logits.get(letter, 0.0) for letter in Letters.ALPHABET]


def texts(answer: Any) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


async def asked(server: Served, path: str, body: dict[str, Any]) -> Any:
    """The body of a response, or that of its events put together."""
    answer = await server.ask(path, body)
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        return answer.json
    assert answer.is_done
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in answer.events:
        usage = event.get("usage", usage)
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined = choices.setdefault(choice["index"], {"text": "", "finish_reason": None})
            assert joined["finish_reason"] is None
            joined["text"] += text
            joined["finish_reason"] = choice["finish_reason"]
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage, "id": {e["id"] for e in answer.events}}


# --- several answers ------------------------------------------------------------------------------


@STREAMED
@sweep(("path", "body"), [(COMPLETIONS, {"prompt": "def f"}), (CHAT, HELLO)])
@on_server()
async def test_a_seeded_request_repeats_its_answers_the_first_as_if_alone(server, path, body, stream):
    ask = {**body, **SAMPLED}
    one = texts(await asked(server, path, ask))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first, again = [await asked(server, path, {**ask, "n": 3, **options}) for _ in range(2)]
    assert texts(first) == texts(again)
    assert texts(first)[0] == one[0]
    assert len(set(texts(first))) == 3
    assert first["usage"]["completion_tokens"] == 36
    num_prompt_tokens = (await direct(server, body, max_tokens=1)).statistics.prompt_tokens
    assert first["usage"]["prompt_tokens"] == num_prompt_tokens
    assert first["usage"]["total_tokens"] == 36 + num_prompt_tokens
    if stream:
        assert len(first["id"]) == 1
    assert (await server.outcomes()) == {"finished": 3}


@on_server()
async def test_each_prompt_of_a_list_has_its_answers(server):
    prompts = ["def f", "import", "class C"]
    alone = [texts(await asked(server, COMPLETIONS, {"prompt": each, "max_tokens": 8}))[0] for each in prompts]
    assert texts(await asked(server, COMPLETIONS, {"prompt": prompts, "max_tokens": 8})) == alone
    ids = [server.tokenizer.encode(each) for each in prompts]
    both = await asked(server, COMPLETIONS, {"prompt": ids, "max_tokens": 8, "n": 2})
    assert texts(both) == [text for text in alone for _ in range(2)]
    assert [choice["index"] for choice in both["choices"]] == list(range(6))
    assert both["usage"]["prompt_tokens"] == sum(map(len, ids))
    streamed = await asked(server, COMPLETIONS, {"prompt": ids, "max_tokens": 8, "stream": True})
    assert texts(streamed) == alone


@sweep("fails", [False, True])
@STREAMED
@sweep(("max_streams", "max_tokens", "after_s"), [(8, 500, 1), (1, 3, 60)])  # all at once, or in turn
def test_a_client_that_leaves_or_an_answer_that_fails_ends_all_answers(max_streams, max_tokens, after_s, stream, fails):
    async def test(server: Served) -> None:
        seen = watched_streams(server)
        body = {"prompt": "def f", "n": 8, "max_tokens": max_tokens, "stream": stream}
        async with server.exchange(COMPLETIONS, body) as one:
            await trio.sleep(after_s)  # simulated: in one of the answers
            num_begun = len(seen)
            if fails:
                seen[-1][1].close()  # as the runtime does with a stream that fails
            else:
                one.leave()
        assert (1 < num_begun < 8) if max_streams == 1 else num_begun == 8
        assert len(seen) == num_begun
        assert all(each.is_closed and each.finish_reason is None for _, each in seen[-max_streams:])
        assert server.simulation.runtime.num_streams == 0
        assert await server.outcomes() == {"failed" if fails else "cancelled": 1}
        if fails and stream:
            assert "error" in one.events[-1]
            assert not one.is_done
        elif fails:
            assert one.status == 503

    simulated_server(test, max_streams=max_streams)


@on_server(settings={"seed": 7})
async def test_answers_differ_where_the_seed_is_the_servers(server):
    body = {"prompt": "def f", "temperature": 1.0, "max_tokens": 12}
    named = texts(await asked(server, COMPLETIONS, {**body, "n": 3, "seed": 7}))
    assert len(set(named)) == 3
    assert texts(await asked(server, COMPLETIONS, {**body, "n": 3})) == named
    assert texts(await asked(server, COMPLETIONS, {**body, "n": 3, "seed": -1})) != named


# --- more answers than the models work on at once ---------------------------------------------------


@STREAMED
def test_answers_that_begin_when_others_have_ended_are_the_same(stream):
    body = {"prompt": ["def f", "import", "class C"], "n": 2, **SAMPLED, "max_tokens": 6, "stream": stream}
    answers: list[list[str]] = []

    async def test(server: Served) -> None:
        answers.append(texts(await asked(server, COMPLETIONS, body)))
        assert await server.outcomes() == {"finished": 1}

    for max_streams in (1, 2, 6):
        simulated_server(test, max_streams=max_streams)
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 6


@on_server(max_streams=2)
async def test_a_request_for_many_answers_leaves_others_their_turn(server):
    runtime, seen = server.simulation.runtime, watched_streams(server)
    many = {"prompt": ["def f", "import", "class C"], "n": 4, "max_tokens": 12, "stream": True}
    async with server.exchange(COMPLETIONS, many) as first:
        await first.until(lambda one: bool(one.sent))
        assert (runtime.num_streams, runtime.num_waiting, len(seen)) == (2, 0, 2)
        async with server.exchange(COMPLETIONS, {"prompt": "def", "max_tokens": 1}, address="10.0.0.1") as other:
            await other.until(lambda one: one.is_whole)
            assert len(seen) <= 5
    assert first.is_done
    assert len(seen) == 13


@on_server(ScriptedModel(looping, context_length=12))
async def test_only_what_fits_in_the_context_counts_for_the_length_of_a_response(server):
    body = {"prompt": "abcd", "logprobs": 20, "n": 2, "max_tokens": 10**6}
    assert (await server.ask(COMPLETIONS, body)).status == 200


# --- echoes ---------------------------------------------------------------------------------------


def logits_of(script: Any, history: list[int]) -> list[float]:
    logits = script(history)
    total = math.log(sum(math.exp(each) for each in logits))
    return [each - total for each in logits]


@STREAMED
@sweep(("max_tokens", "echo"), [(0, True), (1, True), (5, True), (5, False)])
@sweep("num_top", [0, 2])
@on_server()
async def test_log_probabilities_of_a_text_and_of_the_prompt_that_it_repeats(server, max_tokens, echo, num_top, stream):
    prompt = "def f and g"
    ids = server.tokenizer.encode(prompt)
    body = {"prompt": [ids], "max_tokens": max_tokens, "logprobs": num_top, "echo": echo, "stream": stream}
    generated = (await direct(server, {"prompt": prompt}, max_tokens=max_tokens)).text if max_tokens else ""
    answer = await server.ask(COMPLETIONS, body)
    choices = [choice for event in (answer.events if stream else [answer.json]) for choice in event["choices"]]
    if stream:
        *before, last = choices
        # Some clients do not look for text where they find a finish reason.
        assert (last["text"], {choice["finish_reason"] for choice in before}) == ("", {None})
    else:
        usage = answer.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)
    begin = 0 if echo else len(prompt)
    text = (prompt + generated)[begin:]
    assert ("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]) == (text, "length")
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    joined = {name: [each for part in parts for each in part[name]] for name in parts[0]}
    assert (joined["tokens"], joined["text_offset"]) == (list(text), list(range(len(text))))
    whole = server.tokenizer.encode(prompt + generated)
    told = zip(joined["token_logprobs"], joined["top_logprobs"], strict=True)
    for end, (logprob, top) in enumerate(told, start=begin):
        if end == 0:
            assert logprob is top is None
            continue
        expected = logits_of(looping, whole[:end])
        assert logprob == top[(prompt + generated)[end]] == pytest.approx(expected[whole[end]], abs=1e-4)
        named = {*sorted(expected)[len(expected) - num_top :], expected[whole[end]]}
        assert sorted(top.values()) == pytest.approx(sorted(named), abs=1e-4)
    assert await server.outcomes() == {"finished": 1}


@on_server()
@sweep("num_top", [0, 2])
@sweep("max_tokens", [1, 5])
@sweep("path", [COMPLETIONS, CHAT])
async def test_log_probabilities_of_the_prompt_are_those_of_its_score(server, path, max_tokens, num_top):
    said = {"prompt": "def f and g"} if path == COMPLETIONS else HELLO
    body = {**said, "max_tokens": max_tokens, "n": 2, "prompt_logprobs": num_top}
    answer = await asked(server, path, body)
    if path == COMPLETIONS:
        ids = server.tokenizer.encode("def f and g")
        given, again = (choice["prompt_logprobs"] for choice in answer["choices"])
        assert given == again
    else:
        ids = server.tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True)
        given = answer["prompt_logprobs"]
    first, *others = given
    assert first is None
    assert len(others) == len(ids) - 1
    for i, found in enumerate(others, start=1):
        expected = logits_of(looping, ids[:i])
        order = sorted(range(64), key=lambda id: expected[id], reverse=True)
        named = [ids[i], *(id for id in order[:num_top] if id != ids[i])]
        assert list(found) == list(map(str, named))
        for id, told in found.items():
            assert told["logprob"] == pytest.approx(expected[int(id)], abs=1e-4)
            assert told["rank"] == order.index(int(id)) + 1
            assert told["decoded_token"] == server.tokenizer.decode([int(id)])


@on_server()
async def test_log_probabilities_of_a_prompt_stand_beside_an_echo_and_not_in_a_stream(server):
    body = {"prompt": ["abc", "a"], "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    long, short = (await asked(server, COMPLETIONS, body))["choices"]
    assert {len(each) for each in long["prompt_logprobs"][1:]} <= {3, 4}
    assert {len(each) for each in long["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert long["logprobs"]["token_logprobs"][1] == long["prompt_logprobs"][1]["1"]["logprob"]
    assert (short["prompt_logprobs"], short["logprobs"]["token_logprobs"]) == ([None], [None])
    plain = await asked(server, COMPLETIONS, {"prompt": "def f", "max_tokens": 1})
    assert plain["choices"][0]["prompt_logprobs"] is None


class Pieces:
    """A tokenizer of some tokens, which drops a space at the beginning of a text, as those like sentencepiece's do."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Any) -> str:
        return "".join(self.pieces[id] for id in ids).removeprefix(" ")


LLAMA, GLM = ["<s>", " Hello", " world", "!"], ["[gMASK]", "<sop>", "Hello", " world"]


@sweep(
    ("pieces", "prompt", "offsets"),
    [
        *[(LLAMA, "Hello world!", [0, 0, 5, 11]), (LLAMA, "<s>Hello world!", [0, 3, 8, 14])],
        (LLAMA, None, [0, 3, 9, 15]),
        (GLM, "Hello world", [0, 0, 0, 5]),
    ],
)
def test_tokens_that_the_tokenizer_has_put_in_front_move_no_offsets(pieces, prompt, offsets):
    tokenizer: Any = Pieces(pieces)
    echo = make_echo(prompt, tuple(range(len(pieces))), tokenizer)
    assert (echo.offsets, echo.text) == (offsets, "".join(pieces) if prompt is None else prompt)


@on_server()
async def test_the_log_likelihoods_that_lm_eval_reads(server):
    """The request of lm-eval's `local-completions`, and how it reads the response."""
    context, continuation = "def f", " and g"
    ids = [server.tokenizer.encode(context + continuation), server.tokenizer.encode(context + ". No")]
    body = {"model": "x", "prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}
    answer = await asked(server, COMPLETIONS, body)
    for choice, tokens in zip(sorted(answer["choices"], key=lambda each: each["index"]), ids, strict=True):
        logprobs = choice["logprobs"]
        told = logprobs["token_logprobs"][len(context) : -1]
        score = await server.simulation.runtime.score(context, tokens[len(context) :])
        assert sum(told) == pytest.approx(score.logprob, abs=1e-4)
        tops = logprobs["top_logprobs"][len(context) : -1]
        is_greedy = all(own == max(top.values()) for own, top in zip(told, tops, strict=True))
        assert is_greedy == score.is_greedy


@on_server(always({"\n": 9.0}))
async def test_an_empty_answer_counts_in_the_log_probabilities_of_an_echo(server):
    # What ends the text has no text. Clients count tokens from the end.
    body = {"prompt": "abc", "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = (await asked(server, COMPLETIONS, body))["choices"]
    assert choice["text"] == "abc"
    assert [len(each) for each in choice["logprobs"].values()] == [4, 4, 4, 4]


@on_server()
async def test_an_echo_without_log_probabilities_is_the_prompt_in_front(server):
    body = {"prompt": ["abc", "b"], "max_tokens": 0, "echo": True}
    answer = await asked(server, COMPLETIONS, body)
    assert texts(answer) == ["abc", "b"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert server.simulation.runtime.statistics().prompt_tokens == 0
    (one,) = (await asked(server, COMPLETIONS, {**body, "prompt": "a", "logprobs": 0}))["choices"]
    assert one["logprobs"] == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@on_server(limits=Limits(prefill_step_size=5))
async def test_the_prompt_of_an_echo_is_read_as_the_request_has_it(server):
    ids = list(range(3, 23))
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    runtime = server.simulation.runtime
    await asked(server, COMPLETIONS, {**body, "cache_prompt": False})
    assert (await runtime.score(ids[:-1], ids[-1:])).cached_tokens == 0
    # In passes of five tokens.
    kinds = [span for span in server.simulation.spans("target", "prefill") if span.session == 0]
    assert len(kinds) >= 4


@pytest.mark.parametrize("max_tokens", [0, 1])
@on_server(ScriptedModel(looping, context_length=40))
async def test_the_settings_and_the_lengths_of_all_prompts_are_checked_before_one_is_read(server, max_tokens):
    body = {"prompt": ["abc", "abd"], "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    long = {"prompt": ["abc", "a" * 40]}
    for more, message in (({"stop_tokens": [64]}, "stop_tokens"), ({"logit_bias": {"99": 1}}, "logit_bias")):
        refused = await server.ask(COMPLETIONS, {**body, **more})
        assert refused.status == 400
        assert message in refused.fault["message"]
    for more in ({}, {"echo": False, "max_tokens": 1}):
        refused = await server.ask(COMPLETIONS, {**body, **long, **more})
        assert refused.fault["code"] == "context_length_exceeded"
        assert refused.fault["message"].startswith("prompt is too long: 40 tokens > ")
        assert "(prompt[1])" in refused.fault["message"]
    assert server.simulation.spans("target") == []


@on_server(limits=Limits(max_prompt_tokens=5))
async def test_the_longest_prompt_is_named_where_prompts_are_bounded(server):
    refused = await server.ask(COMPLETIONS, {"prompt": ["abc", "abcdef"]})
    assert refused.fault["message"] == (
        "prompt is too long: 6 tokens > 5 maximum; for prompts, this model's maximum context length is 5 tokens here "
        "(prompt[1]); shorten it"
    )


# --- fill in the middle ----------------------------------------------------------------------------


# `Letters` has the tokens of one family; test_fill_in_middle.py has all families, with their tokenizers.


@on_server()
async def test_an_editor_s_completions_are_answered_in_either_form(server):
    """The requests of Continue's providers `mistral`, and `openai` and `vllm`, which write the markers themselves."""
    stop = ["/src/", "#- coding: utf-8", "```"]
    # They send no seed. Without one, two texts at this temperature may still differ.
    asks = {"model": "codestral-latest", "max_tokens": 6, "temperature": 0.01, "seed": 3, "stop": stop, "stream": True}
    headers = {"content-type": "application/json", "x-api-key": "", "authorization": "Bearer undefined"}
    # At the beginning of a file nothing precedes the cursor, and for nothing after it Continue sends a newline.
    for prefix, suffix in (("def f", "return"), ("", "return"), ("def f", "n")):
        filled = await server.ask(FIM, {**asks, "prompt": prefix, "suffix": suffix}, headers=headers)
        chunks = [event["choices"][0] for event in filled.events]
        assert {event["object"] for event in filled.events} == {"chat.completion.chunk"}
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == filled.text
        assert chunks[-1]["finish_reason"] == "length"
        written = await server.ask(COMPLETIONS, {**asks, "prompt": f"P{prefix}S{suffix}M"}, headers=headers)
        assert written.text == filled.text != ""
        assert "x-outrider-ignored" not in filled.headers.keys() | written.headers.keys()


@on_server()
async def test_in_front_of_nothing_mistrals_endpoint_fills_in_and_a_completion_goes_on(server):
    answer = await asked(server, FIM, {"prompt": "ab", "max_tokens": 2})
    assert answer["object"] == "chat.completion"
    await asked(server, COMPLETIONS, {"prompt": "ab", "suffix": "", "max_tokens": 2})
    begun = server.simulation.instants("open", "target")
    assert [server.tokenizer.decode(instant.tokens) for instant in begun] == ["PabSM", "ab"]


@on_server(always({"S": 9.0, "x": 5.0}))
async def test_tokens_of_the_family_end_a_text_as_an_end_of_text_does(server):
    body = {"prompt": "ab", "max_tokens": 6}
    assert texts(await asked(server, FIM, body)) == [""]
    assert texts(await asked(server, FIM, {**body, "min_tokens": 4})) == ["xxxx"]
    assert texts(await asked(server, FIM, {**body, "ignore_eos": True})) == ["SSSSSS"]
    stop = Letters.ALPHABET.index("S")
    assert texts(await asked(server, FIM, {**body, "ignore_eos": True, "stop_tokens": [stop]})) == [""]


STOPS_AT_X = {"stop_tokens": [Letters.ALPHABET.index("x")]}


@on_server(always({"x": 9.0}), settings=STOPS_AT_X)
async def test_tokens_that_end_texts_by_the_servers_default_do_so_in_the_middle_too(server):
    body = {"prompt": "ab", "max_tokens": 6}
    assert texts(await asked(server, FIM, body)) == [""]
