"""What a server records: the access log, the figures of `/metrics`, and the timelines of answers that are watched."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from asgi import (
    CHAT,
    COMPLETIONS,
    DEF,
    HELLO,
    MODEL,
    STREAMED,
    Served,
    ask,
    at_once,
    exchange,
    figures,
    looping,
    models,
    on_server,
    real_server,
    simulated_server,
    watched_streams,
)
from assembled import adapter
from chat_models import pair
from scripted import ScriptedModel, hashed, priced
from sweeps import sweep

from protocol.prices import Prices
from protocol.trace import Instant
from runtime.server import timelines
from runtime.server.connections.address import network
from runtime.server.limits import Limits
from runtime.server.middleware import AccessLog, ForwardedClients
from runtime.server.openai.serializers import TextCompletion

WHEN = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@on_server()
async def test_each_request_is_one_line_when_it_is_over(server):
    lines: list[str] = []
    app = AccessLog(server.app, lines.append)
    answer = await ask(app, COMPLETIONS, {**DEF, "max_tokens": 3})
    assert answer.status == 200
    assert re.fullmatch(
        rf'{WHEN} 127\.0\.0\.1:50000 "POST /v1/completions" 200 tokens=5\+3 seconds=\d+\.\d{{3}}', lines.pop()
    )
    await ask(app, COMPLETIONS, {**DEF, "max_tokens": 3, "stream": True})
    assert re.search(r" 200 tokens=5\+3 seconds=\S+$", lines.pop())
    await ask(app, COMPLETIONS, {**DEF, "temperature": -1}, address="::1")
    assert re.search(rf'{WHEN} \[::1\]:50000 "POST /v1/completions" 400 seconds=\S+$', lines.pop())
    await ask(app, "/nothing")
    assert re.search(r'"GET /nothing" 404 seconds=0\.000$', lines.pop())
    assert lines == []


PROXY, OTHER = "10.0.0.1", "10.0.0.2"


@sweep(
    ("peer", "forwarded", "client"),
    [
        (PROXY, [], PROXY),
        *((PROXY, [one], "192.0.2.7") for one in ("192.0.2.7", "192.0.2.7, 10.0.0.2", "192.0.2.7:5678, 10.0.0.2:80")),
        (PROXY, ["192.0.2.7", OTHER], "192.0.2.7"),
        *((PROXY, [one], "2001:db8::7") for one in ("2001:db8::7", "[2001:db8::7]:5678", "[2001:db8::7]")),
        (f"::ffff:{PROXY}", ["192.0.2.7"], "192.0.2.7"),
        # What a client has made up, before its address or without a proxy.
        (PROXY, ["127.0.0.1, 192.0.2.7"], "192.0.2.7"),
        ("192.0.2.8", ["127.0.0.1"], "192.0.2.8"),
        *[(PROXY, ["192.0.2.7, 'nobody'"], PROXY), (PROXY, [OTHER], OTHER)],
    ],
)
def test_a_client_behind_trusted_proxies_has_its_own_address(peer, forwarded, client):
    async def note(scope: Any, *_: Any) -> None:
        seen.append(scope["client"][0])

    seen: list[str] = []
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    app: Any = ForwardedClients(note, [network("10.0.0.0/24")])
    trio.run(app, {"type": "http", "client": (peer, 5), "headers": headers}, None, None)
    assert seen == [client]


@STREAMED
@on_server()
async def test_a_client_that_leaves_has_a_line_that_says_so(server, stream):
    lines: list[str] = []
    async with exchange(
        AccessLog(server.app, lines.append), COMPLETIONS, body={**DEF, "max_tokens": 500, "stream": stream}
    ) as one:
        await trio.sleep(20)  # in the midst of it
        one.leave()
    (line,) = lines
    assert re.search(rf" {200 if stream else 499} tokens=5\+\d+ seconds=\S+ unfinished$", line)


@on_server(ScriptedModel(looping, fails={"feed": range(8, 10_000)}))
async def test_probes_have_a_line_only_where_something_is_wrong(server):
    lines: list[str] = []
    app = AccessLog(server.app, lines.append)
    for path in ("/health", "/metrics"):
        assert (await ask(app, path)).status == 200
    assert lines == []
    await ask(app, COMPLETIONS, {**DEF, "lookahead": 0})
    for _ in range(3):
        await ask(app, "/health")
    assert ['"GET /health" 503' in line for line in lines] == [False, True]


@on_server(api_key="s3cret", max_streams=1)
async def test_neither_prompts_nor_keys_nor_commands_for_a_terminal_are_in_a_line(server):
    lines: list[str] = []
    app = AccessLog(server.app, lines.append)
    headers = {"content-type": "application/json", "authorization": "Bearer s3cret"}
    asked = {"prompt": "topsecret", "model": MODEL, "max_tokens": 1}
    answer = await ask(app, f"{COMPLETIONS}?key=s3cret", asked, headers=headers, method="POST")
    assert answer.status == 200
    await ask(app, '/\x1b[31m\n\xff"' + "x" * 1000)
    assert len(lines) == 2
    assert not re.search(r"s3cret|topsecret|[\x00-\x1f]", "".join(lines))
    assert '"GET /%1B[31m%0A%C3%BF%22xxx' in lines[1]
    assert max(map(len, lines)) < 300


@on_server()
async def test_a_log_that_nobody_reads_any_more_hurts_no_request(server):
    def fail(line: str) -> None:
        raise BrokenPipeError

    answer: Any = await ask(AccessLog(server.app, fail), COMPLETIONS, {**DEF, "max_tokens": 3})
    assert (answer.status, answer.error) == (200, None)


# --- figures --------------------------------------------------------------------------------------


@on_server(looping)
async def test_metrics_say_of_each_prompt_token_whether_it_was_reused_and_why_not(server):
    prompt = "a long prompt " * 5
    for more in ({}, {"cache_prompt": False}, {"prompt": prompt[:20] + "and another"}):
        await server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **more})
    found = await figures(server.app)
    names = ("", "cached_", "mismatched_", "parted_", "evicted_")
    counts = [found[f"outrider_{name}prompt_tokens_total", MODEL] for name in names]
    assert counts == [2 * len(prompt) + 31, 20, len(prompt) - 1, 0, 0]


@on_server(*models())
async def test_figures_add_up(server):
    before = await figures(server.app)
    assert before["outrider_requests_total", "finished"] == 0
    usages = [
        (await server.ask(path, {**body, "max_tokens": 20, "lookahead": 3})).json["usage"]
        for path, body in ((COMPLETIONS, DEF), (CHAT, HELLO), (COMPLETIONS, DEF))
    ]
    found = await figures(server.app)
    assert found["outrider_requests_total", "finished"] == 3
    for name in ("prompt_tokens", "completion_tokens", "proposed_tokens", "accepted_tokens"):
        ours = name.replace("completion", "generated")
        assert found[f"outrider_{ours}_total", MODEL] == sum(usage[name] for usage in usages)
    assert found["outrider_time_to_first_token_seconds_count", MODEL] == 3
    assert found["outrider_answer_seconds_count", MODEL] == 3
    assert found["outrider_streams", MODEL] == found["outrider_waiting", MODEL] == 0
    assert found["outrider_healthy", MODEL] == 1
    assert found["outrider_busy_seconds_total", "target" + MODEL] > 0
    assert set(before) <= set(found)


@on_server(*models())
async def test_passes_that_requests_share_are_counted_once_and_their_rows_for_each(server):
    await at_once(server, [(COMPLETIONS, {**DEF, "max_tokens": 20, "lookahead": 3})] * 3)
    found = await figures(server.app)
    spans = [span for span in server.simulation.spans("target") if span.kind in ("verify", "decode")]
    assert any(span.shares for span in spans)
    assert found["outrider_target_passes_total", MODEL] == len(spans)
    assert found["outrider_target_pass_rows_total", MODEL] == sum(len(span.shares) or 1 for span in spans)
    waits = found["outrider_pass_wait_seconds_total", MODEL]
    assert waits >= found["outrider_longest_pass_wait_seconds_sum", MODEL] > 0
    assert found["outrider_longest_pass_wait_seconds_count", MODEL] == 3


def test_figures_of_two_servers_add_up_to_those_of_one(monkeypatch):
    # Otherwise prices decide, which one server knows better than two.
    monkeypatch.setattr(Prices, "works_ahead", lambda *_: True)
    # No prompt begins as another does: what is cached of earlier ones depends on who had them.
    prompts = ("def f", "import g", "x = 2", "while h")
    asked = [{"prompt": prompt, "max_tokens": 20, "lookahead": 3} for prompt in prompts]
    # Memory is the process's; a model is there and well once a server. What ends in "created" is a time.
    of_each_server = ("outrider_model_loaded", "outrider_healthy", "outrider_model_loads_total")
    of_the_process = ("process_", "outrider_memory_bytes", "outrider_peak_memory_bytes")

    def figures_after(requests: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
        found = {}

        async def test(server: Served) -> None:
            for body in requests:
                await server.ask(COMPLETIONS, body)
            found.update(await figures(server.app))

        simulated_server(test, *models())
        kept = [key for key in found if not key[0].startswith(of_the_process) and not key[0].endswith("_created")]
        return {key: found[key] for key in kept}

    first, second, one = (figures_after(requests) for requests in (asked[:1], asked[1:], asked))
    assert first.keys() == second.keys() == one.keys()
    assert one["outrider_stale_rejected_tokens_total", MODEL] == 0 < one["outrider_accepted_tokens_total", MODEL]
    by_position = [n for key, n in one.items() if key[0] == "outrider_spec_decode_num_accepted_tokens_per_pos_total"]
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == one["outrider_accepted_tokens_total", MODEL]
    for key, n in one.items():
        times = 2 if key[0] in of_each_server else 1
        assert first[key] + second[key] == pytest.approx(times * n), key


# --- answers that are watched ---------------------------------------------------------------------

WATCHED = {**DEF, "max_tokens": 4, "stream": True, "stream_options": {"include_speculation": True}}


@on_server(*models())
async def test_who_watches_hears_of_every_token_and_of_each_span_once(server):
    asked = {**DEF, "max_tokens": 12, "lookahead": 3, "stream": True}
    plain = await server.ask(COMPLETIONS, asked)
    assert all("speculation" not in event for event in plain.events)
    seen = watched_streams(server)
    answer = await server.ask(COMPLETIONS, {**asked, "stream_options": {"include_speculation": True}})
    assert max(b - a for a, b in itertools.pairwise(answer.times)) <= 0.25
    told = [event["speculation"] for event in answer.events]
    tokens = [token for part in told for token in part["tokens"]]
    assert "".join(token["text"] for token in tokens) == plain.text
    assert len(tokens) == 12
    assert 0 < sum(token["from_draft"] for token in tokens) < 12
    statistics = [part["statistics"] for part in told]
    for name in ("generated_tokens", "proposed", "accepted", "elapsed"):
        grown = [each[name] for each in statistics]
        assert grown == sorted(grown)
    end = seen[0][1].statistics()
    assert (statistics[-1]["generated_tokens"], statistics[-1]["accepted"]) == (12, end.accepted)
    assert statistics[0]["time_to_first_token"] is None
    assert statistics[-1]["time_to_first_token"] > 0
    spans = [json.dumps(span) for part in told for span in part["spans"]]
    assert len(spans) == len(set(spans))
    of_this = [
        span
        for actor in ("target", "draft")
        for span in server.simulation.spans(actor, session=seen[0][1].session)
        if span.kind in ("prefill", "draft", "verify", "decode")
    ]
    heard = [json.loads(span) for span in spans]
    # All but what happens once the last token was given.
    assert {"target", "draft"} == {span["actor"] for span in heard}
    assert len(of_this) - 3 <= len([s for s in heard if s["kind"] in ("prefill", "draft", "verify", "decode")])
    assert all(0 <= span["began"] <= span["ended"] <= statistics[-1]["elapsed"] + 8 for span in heard)
    adapter(TextCompletion).validate_python(answer.events[0], strict=True)


@on_server(looping, price=priced(prefill=2.0), limits=Limits(prefill_step_size=512))
async def test_who_watches_hears_how_far_the_prompt_was_read(server):
    prompt = "a long prompt " * 150
    asked = {**WATCHED, "prompt": prompt}
    answer = await server.ask(COMPLETIONS, asked)
    told = [event["speculation"]["statistics"] for event in answer.events]
    read = [statistics["cached_tokens"] + statistics["prefilled_tokens"] for statistics in told]
    assert list(dict.fromkeys(read)) == [0, 512, 1024, 1536, 2048, len(prompt) - 1]
    assert {statistics["prompt_tokens"] for statistics in told} == {len(prompt)}
    again = await server.ask(COMPLETIONS, asked)
    assert again.events[-1]["speculation"]["statistics"]["cached_tokens"] == len(prompt) - 1
    unwatched = await server.ask(COMPLETIONS, {**DEF, "prompt": prompt, "max_tokens": 4, "stream": True})
    assert b"prefilled" not in unwatched.body


@on_server(looping, hashed("wrong", 4.0), price=priced(draft=1.0, verify=1.25, decode=1.0))
async def test_who_watches_hears_when_the_drafter_rests_and_when_it_drafts_again(server):
    answer = await server.ask(COMPLETIONS, {**WATCHED, "max_tokens": 200})
    changes = [change for event in answer.events for change in event["speculation"]["drafter"]]
    states = [change["state"] for change in changes]
    assert {"drafting", "resting"} == set(states)
    assert all(before != after for before, after in itertools.pairwise(states))
    rested = [i.at for i in server.simulation.instants("rest")]
    assert [change["at"] for change in changes if change["state"] == "resting"] == pytest.approx(rested)
    adapter(TextCompletion).validate_python(answer.events[0], strict=True)


def test_changes_of_the_drafter_are_told_once_and_with_their_times():
    kinds = "open proposal verdict overdue miss rejoin proposal rest proposal overdue proposal withdraw"
    states = "- drafting - overdue - drafting - resting drafting overdue drafting left"
    record = timelines.Timeline(0, [], began=10.0)
    for at, kind in enumerate(kinds.split(), start=10):
        record.add(Instant("draft", kind, 0, float(at)))
    expected = [{"at": float(at), "state": state} for at, state in enumerate(states.split()) if state != "-"]
    assert record.new_activity()["drafter"] == expected
    assert record.new_activity() == {"spans": [], "drafter": []}


@on_server(looping)
async def test_only_answers_that_were_watched_are_remembered_and_only_so_many(server, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_TIMELINES", 3)
    unwatched = await server.ask(COMPLETIONS, {**DEF, "max_tokens": 4, "stream": True})
    told = [(await server.ask(COMPLETIONS, WATCHED)).events[0]["id"] for _ in range(5)]
    assert len(set(told)) == len(told)
    assert list(server.timelines._timelines) == told[2:]
    assert len(server.timelines._by_session) == 3
    for gone in (unwatched.events[0]["id"], told[0], told[1]):
        assert (await server.ask(f"/timelines/{gone}")).status == 404


@on_server(*models())
async def test_of_an_answer_only_so_much_is_remembered(server, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_EVENTS", 10)
    id = (await server.ask(COMPLETIONS, {**WATCHED, "max_tokens": 30})).events[0]["id"]
    record = server.timelines._timelines[id]
    assert len(record.events) == 10
    assert record.num_lost > 0


async def test_the_timeline_of_an_answer_is_a_page_of_its_own():
    async with real_server(*pair()) as (app, _):
        answer = await ask(app, COMPLETIONS, {**WATCHED, "ignore_eos": True})
        page = await ask(app, f"/timelines/{answer.events[0]['id']}")
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'self'" in policy
        assert page.headers["cache-control"] == "no-store"
        assert b"<html" in page.body
