"""A server that is about to stop: what it says of itself, what it ends and what it refuses."""

from contextlib import AsyncExitStack
from typing import Any

import trio
from asgi import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DEF,
    HELLO,
    MESSAGES,
    RESPONSES,
    STREAMED,
    Served,
    figures,
    looping,
    on_server,
)
from scripted import ScriptedModel

LONG: dict[str, Any] = {**DEF, "max_tokens": 40, "lookahead": 0}


async def over(server: Served) -> bool:
    """Whether the server would end now."""
    with trio.move_on_after(1) as waited:
        await server.app.admission.wait_drained()
    return not waited.cancelled_caught


@STREAMED
@on_server(looping, max_streams=1)
async def test_requests_that_run_and_wait_end_and_others_are_told_to_ask_elsewhere(server, stream):
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.exchange(COMPLETIONS, {**LONG, "stream": stream}))
        await trio.sleep(1)
        waiting = await stack.enter_async_context(server.exchange(COMPLETIONS, {**LONG, "stream": stream}))
        await trio.sleep(1)
        health = await server.ask("/health")
        assert (health.status, health.json["status"], health.json["waiting"]) == (200, "ok", 1)
        assert (await figures(server.app))["outrider_draining", ""] == 0
        server.app.admission.drain()
        health = await server.ask("/health")
        assert (health.status, health.json["status"], health.json["streams"]) == (503, "draining", 1)
        assert (await figures(server.app))["outrider_draining", ""] == 1
        assert (await server.ask("/v1/models")).status == 200
        for path, body in ((COMPLETIONS, DEF), (CHAT, HELLO), (RESPONSES, {"input": "hello"})):
            refused = await server.ask(path, body)
            assert (refused.status, refused.fault["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
        for path in (MESSAGES, COUNT_TOKENS):
            refused = await server.ask(path, {**HELLO, "max_tokens": 1})
            assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
        assert not await over(server)
        await running.until(lambda one: one.over_at is not None)
        assert not await over(server)
        await waiting.until(lambda one: one.over_at is not None)
    assert await over(server)
    assert [(one.status, one.is_whole) for one in (running, waiting)] == [(200, True)] * 2
    # The count of tokens is no generation, and so no outcome.
    assert await server.outcomes() == {"finished": 2, "refused": 4}


@on_server()
async def test_a_request_whose_body_was_under_way_is_refused(server):
    async with server.exchange(COMPLETIONS) as late:
        late.give(b'{"prompt": ', more=True)
        await trio.sleep(1)
        server.app.admission.drain()
        late.give(b'"def f"}')
    assert (late.status, late.fault["code"]) == (503, "draining")
    assert await over(server)


@on_server(ScriptedModel(looping, fails={"feed": range(8, 10_000)}))
async def test_a_failed_target_is_of_more_interest_than_the_end(server):
    await server.ask(COMPLETIONS, DEF)
    server.app.admission.drain()
    assert (await server.ask("/health")).json["status"] == "broken"
