"""What `examples/haproxy.cfg` and `examples/nginx.conf` take for granted of a server, checked without a proxy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import trio
from asgi import CHAT, COMPLETIONS, DEF, MESSAGES, RESPONSES, Served, looping, on_server

from runtime.cli.serve_command import _LOCAL_HOSTS

ROOT = Path(__file__).parents[2]
HAPROXY = (ROOT / "examples" / "haproxy.cfg").read_text(encoding="utf-8")
NGINX = (ROOT / "examples" / "nginx.conf").read_text(encoding="utf-8")


def setting(pattern: str, text: str = HAPROXY) -> str:
    """What a setting of a configuration is; asserts that it is there once."""
    (found,) = re.findall(pattern, text)
    return str(found)


@on_server(looping, hosts=_LOCAL_HOSTS)
async def test_the_health_check_passes_until_the_server_drains(server: Served) -> None:
    method, path, host = re.findall(r"http-check send meth (\S+) uri (\S+) ver HTTP/1.1 hdr Host (\S+)", HAPROXY)[0]
    expected = int(setting(r"http-check expect status (\d+)"))
    retried = setting(r"retry-on (.*)").split()

    async def check() -> int:
        return (await server.ask(path, method=method, headers={"host": host})).status

    assert await check() == expected
    async with server.exchange(COMPLETIONS, {**DEF, "max_tokens": 20, "lookahead": 0, "stream": True}) as running:
        await trio.sleep(5)
        server.app.admission.drain()
        assert await check() != expected
        refused = await server.ask(COMPLETIONS, DEF, headers={"host": host, "content-type": "application/json"})
        assert str(refused.status) in retried
        assert f"http_{refused.status}" in setting(r"proxy_next_upstream (.*);", NGINX).split()
        await running.until(lambda one: one.over_at is not None)
    assert running.is_whole
    # Only drained, and never marked down for what it had begun: that would cut the answer off.
    assert "on-marked-down" not in HAPROXY


HELLO = {"role": "user", "content": "hello"}
# Requests that have each of the fields that the configuration looks at.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt_cache_key": (CHAT, {"messages": [HELLO], "prompt_cache_key": "a"}),
    "messages[0].content": (CHAT, {"messages": [HELLO]}),
    "messages[0].content[0].text": (
        MESSAGES,
        {"messages": [{**HELLO, "content": [{"type": "text", "text": "hello"}]}]},
    ),
    "messages[0].role": (CHAT, {"messages": [{**HELLO, "role": "developer"}, HELLO]}),
    "messages[1].content": (CHAT, {"messages": [{**HELLO, "role": "system"}, HELLO]}),
    "messages[1].content[0].text": (
        CHAT,
        {"messages": [{**HELLO, "role": "system"}, {**HELLO, "content": [{"type": "text", "text": "hello"}]}]},
    ),
    "input[0].content": (RESPONSES, {"input": [HELLO]}),
    "input[0].content[0].text": (
        RESPONSES,
        {"input": [{**HELLO, "content": [{"type": "input_text", "text": "hello"}]}]},
    ),
    "input": (RESPONSES, {"input": "hello"}),
    "prompt": (COMPLETIONS, DEF),
}


def looked_up(path: str, body: Any) -> Any:
    """The value at a path such as `messages[0].content`."""
    for name in re.findall(r"\w+", path):
        body = body[int(name) if name.isdecimal() else name]
    return body


@on_server(looping)
async def test_each_field_that_chooses_a_server_is_one_that_requests_have(server: Served) -> None:
    paths = re.findall(r"json_query\('\$\.(.*?)'\)", HAPROXY)
    assert sorted(paths) == sorted(BODIES)
    for path in paths:
        endpoint, body = BODIES[path]
        assert isinstance(looked_up(path, body), str)
        limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
        assert (await server.ask(endpoint, {**body, limit: 1})).status == 200, path
