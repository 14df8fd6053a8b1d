"""The access log: what it says of a request, and what it never says."""

from __future__ import annotations

import re
from typing import Any

import trio
from asgi import COMPLETIONS, DEF, MODEL, STREAMED, Served, ask, exchange, looping, on_server
from scripted import ScriptedModel
from sweeps import sweep

from runtime.server.connections.address import network
from runtime.server.middleware import AccessLog, ForwardedClients

WHEN = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@on_server()
async def test_each_request_is_one_line_when_it_is_over(server: Served) -> None:
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
        (PROXY, ["192.0.2.7"], "192.0.2.7"),
        (PROXY, ["192.0.2.7, 10.0.0.2"], "192.0.2.7"),
        (PROXY, ["192.0.2.7", OTHER], "192.0.2.7"),
        (PROXY, ["2001:db8::7"], "2001:db8::7"),
        (PROXY, ["192.0.2.7:5678, 10.0.0.2:80"], "192.0.2.7"),
        (PROXY, ["[2001:db8::7]:5678"], "2001:db8::7"),
        (PROXY, ["[2001:db8::7]"], "2001:db8::7"),
        (f"::ffff:{PROXY}", ["192.0.2.7"], "192.0.2.7"),
        # What a client has made up, before its address or without a proxy.
        (PROXY, ["127.0.0.1, 192.0.2.7"], "192.0.2.7"),
        ("192.0.2.8", ["127.0.0.1"], "192.0.2.8"),
        (PROXY, ["192.0.2.7, 'nobody'"], PROXY),
        (PROXY, [OTHER], OTHER),
    ],
)
def test_a_client_behind_trusted_proxies_has_its_own_address(peer: str, forwarded: list[str], client: str) -> None:
    async def note(scope: Any, *_: Any) -> None:
        seen.append(scope["client"][0])

    seen: list[str] = []
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    app: Any = ForwardedClients(note, [network("10.0.0.0/24")])
    trio.run(app, {"type": "http", "client": (peer, 5), "headers": headers}, None, None)
    assert seen == [client]


@on_server()
async def test_the_line_of_a_client_behind_a_trusted_proxy_has_its_address(server: Served) -> None:
    lines: list[str] = []
    app = ForwardedClients(AccessLog(server.app, lines.append), [network(PROXY)])
    await ask(app, "/nothing", headers={"x-forwarded-for": "2001:db8::7"}, address=PROXY)
    assert ' [2001:db8::7]:0 "GET /nothing" 404' in lines[0]


@STREAMED
@on_server()
async def test_a_client_that_leaves_has_a_line_that_says_so(server: Served, stream: bool) -> None:
    lines: list[str] = []
    async with exchange(
        AccessLog(server.app, lines.append), COMPLETIONS, body={**DEF, "max_tokens": 500, "stream": stream}
    ) as one:
        await trio.sleep(20)  # in the midst of it
        one.leave()
    (line,) = lines
    assert re.search(rf" {200 if stream else 499} tokens=5\+\d+ seconds=\S+ unfinished$", line)


@on_server(ScriptedModel(looping, fails={"feed": range(8, 10_000)}))
async def test_probes_have_a_line_only_where_something_is_wrong(server: Served) -> None:
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
async def test_neither_prompts_nor_keys_nor_commands_for_a_terminal_are_in_a_line(server: Served) -> None:
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
async def test_a_log_that_nobody_reads_any_more_hurts_no_request(server: Served) -> None:
    def fail(line: str) -> None:
        raise BrokenPipeError

    answer: Any = await ask(AccessLog(server.app, fail), COMPLETIONS, {**DEF, "max_tokens": 3})
    assert (answer.status, answer.error) == (200, None)
