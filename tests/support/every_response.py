"""Responses of every kind that the server gives, of scripted models in simulated time."""

import functools
import itertools
from typing import Any

import trio
from asgi import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DEF,
    FIM,
    HELLO,
    MESSAGES,
    MODEL,
    RESPONSES,
    Exchange,
    Letters,
    Served,
    looping,
    models,
    saying,
    simulated_server,
)
from scripted import ScriptedModel
from tool_letters import ASKED, OSLO, TOOLS, USER, serve_calls

from runtime.server.limits import Limits

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {**DEF, "max_tokens": 6},
    FIM: {**DEF, "suffix": "x", "max_tokens": 6},
    CHAT: {**HELLO, "max_tokens": 6},
    RESPONSES: {"input": "hello", "max_output_tokens": 6, "user": "me"},
    MESSAGES: {**HELLO, "max_tokens": 6},
    COUNT_TOKENS: HELLO,
    "/v1/tokenize": {"prompt": "def f", "return_token_strs": True},
    "/v1/detokenize": {"tokens": [1, 2]},
}
LOGPROBS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"logprobs": 2},
    FIM: {"logprobs": 2},
    CHAT: {"logprobs": True, "top_logprobs": 2},
}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "include_speculation": True}}
KEYED = {"api_key": "s3cret"}
WITH_KEY = {"content-type": "application/json", "authorization": "Bearer s3cret"}

# The path in the description, and a response.
Seen = list[tuple[str, Exchange]]


async def usual(server: Served, seen: Seen) -> None:
    """Successes and the errors of requests, from a server with a key."""
    for path, body in BODIES.items():
        logprobs = LOGPROBS.get(path, {})
        for more in ({}, logprobs, STREAM, {**logprobs, **STREAM}):
            seen.append((path, await server.ask(path, {**body, **more}, headers=WITH_KEY)))
        if logprobs:
            seen.append((path, await server.ask(path, {**body, "prompt_logprobs": 2}, headers=WITH_KEY)))
        seen.append((path, await server.ask(path, {**body, "model": -1}, headers=WITH_KEY)))
        seen.append((path, await server.ask(path, b" " * 3000, headers=WITH_KEY)))
        seen.append((path, await server.ask(path, body, headers={**WITH_KEY, "content-type": "text/plain"})))
        seen.append((path, await server.ask(path, body)))
        async with server.exchange(path, headers=WITH_KEY) as slow:
            slow.give(b"{", more=True)
        seen.append((path, slow))
    stored = next(answer.json["id"] for path, answer in seen if path == RESPONSES)
    for method in ("GET", "DELETE"):
        for headers in (WITH_KEY, {}, WITH_KEY):
            answer = await server.ask(f"{RESPONSES}/{stored}", headers=headers, method=method)
            seen.append((f"{RESPONSES}/{{id}}", answer))
        seen.append((f"{RESPONSES}/{{id}}", await server.ask(f"{RESPONSES}/0", headers=WITH_KEY, method=method)))
    for path, address in (
        ("/v1/models", "/v1/models"),
        ("/v1/models/{model}", f"/v1/models/{MODEL}"),
        ("/v1/models/{model}", "/v1/models/another"),
    ):
        seen.append((path, await server.ask(address, headers=WITH_KEY)))
        seen.append((path, await server.ask(address)))
    seen.append(("/version", await server.ask("/version")))
    seen.append(("/health", await server.ask("/health")))
    seen.append(("/metrics", await server.ask("/metrics")))
    watched = next(answer for _, answer in seen if answer.headers["content-type"].startswith("text/event-stream"))
    for id in (watched.events[0]["id"], "unknown"):
        seen.append(("/timelines/{id}", await server.ask(f"/timelines/{id}")))


async def ended(server: Served, seen: Seen) -> None:
    """Answers that are ended by their ids, by a server with a key."""
    for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
        async with server.exchange(path, {**BODIES[path], "max_tokens": 500, **STREAM}, headers=WITH_KEY) as asked:
            await asked.until(lambda answer: bool(answer.sent))
            id = asked.headers["request-id" if path == MESSAGES else "x-request-id"]
            for word, headers in itertools.product(("end_thinking", "cancel"), (WITH_KEY, {})):
                answer = await server.ask(f"{path}/{id}/{word}", headers=headers, method="POST")
                seen.append((f"{path}/{{id}}/{word}", answer))
        seen.append((path, asked))
        for word in ("end_thinking", "cancel"):
            answer = await server.ask(f"{path}/{id}/{word}", headers=WITH_KEY, method="POST")
            seen.append((f"{path}/{{id}}/{word}", answer))


async def strict(server: Served, seen: Seen) -> None:
    """The error of a request for a model that there is not."""
    for path, body in BODIES.items():
        seen.append((path, await server.ask(path, {**body, "model": "another"})))


async def reasoning(server: Served, seen: Seen) -> None:
    """Answers with reasoning."""
    for more in ({}, STREAM):
        answer = await server.ask(CHAT, {**HELLO, **more})
        assert answer.thought == "hm"
        seen.append((CHAT, answer))
        for path, part in ((RESPONSES, b'"reasoning_text"'), (MESSAGES, b'"thinking"')):
            answer = await server.ask(path, {**BODIES[path], "max_output_tokens": 50, "max_tokens": 50, **more})
            assert part in answer.body
            seen.append((path, answer))


async def calling(server: Served, seen: Seen) -> None:
    """Answers with calls."""
    functions = [{"type": "function", **each["function"]} for each in TOOLS]
    schemas = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    for path, body in (
        (CHAT, ASKED),
        (RESPONSES, {"input": [USER], "tools": functions, "max_output_tokens": 300}),
        (MESSAGES, {"messages": [USER], "tools": schemas, "max_tokens": 300}),
    ):
        for more in ({}, STREAM):
            seen.append((path, await server.ask(path, {**body, **more})))


async def calling_others(server: Served, seen: Seen) -> None:
    """Answers with calls of tools that are no functions, but in the prompt."""
    tools = [{"type": "custom", "name": "edit"}, {"type": "local_shell"}]
    for more in ({}, STREAM):
        body = {"input": [USER], "tools": tools, "max_output_tokens": 300, **more}
        seen.append((RESPONSES, await server.ask(RESPONSES, body)))


async def busy(server: Served, seen: Seen) -> None:
    """Errors of a server whose one place is taken."""
    async with server.exchange(COMPLETIONS, {**DEF, "max_tokens": 500}) as first:
        await trio.sleep(1)  # in simulated time: until it is admitted
        for path, body in BODIES.items():
            seen.append((path, await server.ask(path, body)))
        first.leave()


async def failing(server: Served, seen: Seen) -> None:
    """Errors of generations, and of the server's health if they broke it."""
    for path, body in BODIES.items():
        for more in ({}, STREAM) if path != COUNT_TOKENS else ():
            limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
            asked = {**body, limit: 50, "lookahead": 0, **more}
            seen.append((path, await server.ask(path, asked)))
    seen.append(("/health", await server.ask("/health")))


@functools.cache
def all_seen() -> Seen:
    """Responses of each kind."""
    seen: Seen = []
    simulated_server(
        lambda server: usual(server, seen), *models(), limits=Limits(max_body_bytes=2000), small="small", **KEYED
    )
    simulated_server(lambda server: ended(server, seen), *models(), **KEYED)
    simulated_server(lambda server: strict(server, seen), is_strict=True)
    tokenizer = Letters(thinks=True)
    start = len(tokenizer.apply_chat_template(HELLO["messages"], add_generation_prompt=True))
    thinks = ScriptedModel(saying("<t>hm</t>yes", start))
    simulated_server(lambda server: reasoning(server, seen), thinks, tokenizer=tokenizer)
    serve_calls(lambda server: calling(server, seen), OSLO, has_drafter=True)  # which makes fewer events
    for name, arguments in (("edit", '{"input": "a"}'), ("local_shell", '{"command": ["ls"], "user": "me"}')):
        says = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        serve_calls(lambda server: calling_others(server, seen), says, has_drafter=True)
    simulated_server(lambda server: busy(server, seen), ScriptedModel(looping), max_streams=1, max_waiting=0)
    for fails in ({"feed": range(8, 10_000)}, {"check": range(6, 10_000)}):
        simulated_server(lambda server: failing(server, seen), ScriptedModel(looping, fails=fails))
    return seen
