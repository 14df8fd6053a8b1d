"""A server of several models: loaded for the first request, waited for, cancelled, unloaded; in simulated time."""

import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from asgi import COMPLETIONS, ask, figures, with_parameters_of
from model_pools import LOAD_S, PROMPT, ScriptedLoads, ServedModels, served_models, spec, text_of
from scripted import run

from runtime.server.models.loaded_model import free_memory
from runtime.server.models.served_model import ServedModel

A, B, C = spec("a"), spec("b"), spec("c")


def with_models(*specs: ServedModel, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of an async function whose argument `server` is a server of its own."""

    def decorate(test: Callable[[ServedModels], Awaitable[None]]) -> Callable[..., Any]:
        async def main() -> None:
            async with served_models(*specs, **options) as server:
                await test(server)

        return with_parameters_of(test, lambda: run(main))

    return decorate


# --- loading --------------------------------------------------------------------------------------


@with_models(A, B)
async def test_a_model_is_loaded_for_its_first_request_and_stays(server):
    assert server.loads.history == []
    began = trio.current_time()
    answer = await server.complete("b")
    assert (answer.status, answer.text, answer.json["model"]) == (200, text_of("b", 4), "b")
    assert trio.current_time() - began > LOAD_S
    began = trio.current_time()
    assert (await server.complete("b", 6)).text == text_of("b", 6)
    assert trio.current_time() - began < LOAD_S
    assert server.loads.history == [("load", "b")]
    assert await server.states() == {"a": "unloaded", "b": "loaded"}


@with_models(A, B)
async def test_the_first_model_is_the_default_and_unknown_ones_an_error(server):
    assert (await server.complete(None)).json["model"] == "a"
    answer = await server.complete("gpt")
    assert (answer.status, answer.fault["code"], answer.fault["param"]) == (404, "model_not_found", "model")
    assert answer.fault["message"] == "there is no model \"gpt\" here; the models are 'a', 'b'"
    assert (await ask(server.app, "/v1/models/gpt")).fault["message"] == answer.fault["message"]
    assert server.loads.history == [("load", "a")]


@with_models(A, B)
async def test_requests_for_a_model_that_loads_share_its_load_and_others_go_on_meanwhile(server):
    await server.complete("a")
    began, asked = trio.current_time(), []
    async with AsyncExitStack() as stack:
        for model in ("b", "b", "a", "b", "a"):
            asked.append((model, await stack.enter_async_context(server.completing(model))))
        await trio.sleep(LOAD_S / 2)
        health = (await ask(server.app, "/health")).json
        assert (health["status"], health["waiting"]) == ("ok", 3)
        known = {"state": "loading", "status": "ok", "streams": 0, "waiting": 3}
        assert health["models"]["b"] == {**known, "context_in_memory": None, "reserved_bytes": 0}
    assert server.loads.history == [("load", "a"), ("load", "b")]
    for model, answer in asked:
        assert answer.text == text_of(model, 4)
        assert (answer.over_at - began < LOAD_S) is (model == "a")


@with_models(A, B, C)
async def test_models_are_loaded_one_by_one_in_order_of_request(server):
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(server.loads.in_memory) - len(server.pool.in_memory()))
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        async with trio.open_nursery() as requests:
            for name in "cab":
                requests.start_soon(server.complete, name)
                await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert server.loads.history == [("load", "c"), ("load", "a"), ("load", "b")]
    assert most == 1


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(stream, autojump_clock):
    async def leave_after(seconds: float) -> None:
        async with served_models(A, spec("b", idle_s=3.0)) as server:
            began = trio.current_time()
            async with server.completing("b", 8, stream=stream) as leaving:
                await trio.sleep(seconds)
                leaving.leave()
            assert trio.current_time() - began <= seconds + 1
            await server.settled()
            # The load was finished. The next client has the model at once, unless it was idle for long enough.
            assert server.loads.history[0] == ("load", "b")
            assert (await server.complete("b")).text == text_of("b", 4)
            await trio.sleep(4)
            assert server.loads.in_memory == []

    seconds = 0.0
    while seconds < LOAD_S + 80:
        await leave_after(seconds)
        seconds += 20 if seconds < LOAD_S - 20 else 4.25


@with_models(A, B)
async def test_a_load_that_nobody_waits_for_any_more_before_it_begins_is_forgotten(server):
    async with server.completing("a") as patient:
        await trio.sleep(1)
        async with server.completing("b") as first, server.completing("b") as second:
            await trio.sleep(1)
            first.leave()
            await trio.sleep(1)
            assert (await server.states())["b"] == "loading"
            second.leave()
        assert (await server.states())["b"] == "unloaded"
    assert patient.text == text_of("a", 4)
    await server.settled()
    assert server.loads.history == [("load", "a")]


async def test_a_server_that_ends_in_the_middle_of_a_load_leaves_nothing(autojump_clock):
    for seconds in (0.0, 1.0, LOAD_S, LOAD_S + 1):
        with trio.CancelScope() as scope:
            async with served_models(A, B) as server, trio.open_nursery() as nursery:
                nursery.start_soon(server.complete, "a")
                nursery.start_soon(server.complete, "b")
                await trio.sleep(seconds)
                scope.cancel()
        assert scope.cancelled_caught
        assert server.loads.in_memory == []


# --- unloading ------------------------------------------------------------------------------------


@with_models(spec("a", idle_s=30.0), B)
async def test_a_model_is_unloaded_after_its_idle_time_never_at_work(server):
    await server.complete("a", 200)  # takes longer than its time
    assert server.loads.history == [("load", "a")]
    for _ in range(3):
        await trio.sleep(29)
        assert (await server.complete("a", 1)).status == 200
    await trio.sleep(29)
    assert (await server.states())["a"] == "loaded"
    await trio.sleep(2)
    assert server.loads.history == [("load", "a"), ("unload", "a")]
    assert await server.states() == {"a": "unloaded", "b": "unloaded"}
    assert (await server.complete("a")).text == text_of("a", 4)
    # The other one stays: it has no time.
    await server.complete("b")
    await trio.sleep(10_000)
    assert await server.states() == {"a": "unloaded", "b": "loaded"}


@with_models(A, B, C, memory_limit=25)
async def test_for_a_load_the_idle_model_that_was_used_least_recently_is_unloaded(server):
    for name in ("a", "b", "a", "c"):
        assert (await server.complete(name)).text == text_of(name, 4)
    assert server.loads.history == [("load", "a"), ("load", "b"), ("unload", "b"), ("load", "c")]
    await server.complete("b")
    assert server.loads.history[4:] == [("unload", "a"), ("load", "b")]


@with_models(A, B, memory_limit=15)
async def test_a_model_waits_for_an_idle_one_to_be_unloaded(server):
    await server.complete("a")
    async with server.completing("a", 300) as long:
        await trio.sleep(1)
        async with server.completing("b") as other:
            await trio.sleep(1)
            # The one at work takes nobody new, or the other would never have its turn.
            async with server.completing("a") as late:
                await trio.sleep(1)
                assert server.loads.history == [("load", "a")]
                assert await server.states() == {"a": "loading", "b": "loading"}
    assert (long.text, other.text, late.text) == (text_of("a", 300), text_of("b", 4), text_of("a", 4))
    assert server.loads.history == [
        ("load", "a"), ("unload", "a"), ("load", "b"), ("unload", "b"), ("load", "a"),
    ]  # fmt: skip
    assert long.over_at < other.over_at < late.over_at


@with_models(A, B, C, memory_limit=25)
async def test_one_model_is_unloaded_for_a_load_though_another_becomes_idle_meanwhile(server):
    for name in ("a", "b"):
        await server.complete(name)
    async with server.completing("a", 300) as first, server.completing("b", 200) as second:
        await trio.sleep(1)
        async with server.completing("c") as other:
            pass
    assert second.over_at < first.over_at < other.over_at
    assert (first.text, second.text, other.text) == (text_of("a", 300), text_of("b", 200), text_of("c", 4))
    assert server.loads.history == [("load", "a"), ("load", "b"), ("unload", "a"), ("load", "c")]


async def test_memory_is_freed_although_another_thread_collects_garbage_meanwhile():
    collecting, go_on = threading.Event(), threading.Event()

    class Holds:
        def __del__(self) -> None:
            collecting.set()
            assert go_on.wait(30)

    class Model:
        def __init__(self) -> None:
            self.runtime = self

    held = Holds()
    held.itself = held
    del held
    thread = threading.Thread(target=gc.collect)
    thread.start()
    assert collecting.wait(30)
    model = Model()
    left = weakref.ref(model)
    del model

    def still_there() -> object:
        go_on.set()
        thread.join()
        return left()

    assert gc.collect() == 0
    await free_memory(still_there)
    assert left() is None


@with_models(A, spec("large", num_bytes=30), memory_limit=25)
async def test_a_model_beyond_the_limit_is_refused_and_unloads_nothing(server):
    await server.complete("a")
    answer = await server.complete("large")
    assert (answer.status, answer.fault["code"]) == (503, "model_not_loaded")
    assert "its files have 30 bytes, and --memory-limit is 25" in answer.fault["message"]
    assert server.loads.history == [("load", "a")]


@with_models(A, B, C, memory_limit=35)
async def test_idle_models_but_the_last_are_unloaded_where_caches_outgrow_the_limit(server):
    for name in ("a", "b", "c"):
        await server.complete(name)
    assert [event for event, _ in server.loads.history] == ["load"] * 3
    server.loads.extra_bytes = 40
    await server.complete("a")
    await trio.sleep(1)
    assert server.loads.history[3:] == [("unload", "b"), ("unload", "c")]
    assert (await server.complete("a")).text == text_of("a", 4)
    assert server.loads.history[5:] == []


# --- failures -------------------------------------------------------------------------------------


@with_models(A, B)
async def test_a_model_that_fails_to_load_concerns_only_its_clients(server):
    await server.complete("b")
    server.loads.failing.add("a")
    async with server.completing("a") as one, server.completing("a") as another, server.completing("b") as other:
        pass
    assert other.text == text_of("b", 4)
    for answer in (one, another):
        assert (answer.status, answer.fault["code"]) == (503, "model_not_loaded")
        assert answer.fault["message"] == "model 'a' cannot be loaded: path/of/a is damaged"
    assert (await ask(server.app, "/health")).json["status"] == "ok"
    assert (await figures(server.app))["outrider_model_loads_total", "afailed"] == 1
    server.loads.failing.clear()
    assert (await server.complete("a")).text == text_of("a", 4)


@with_models(A, B, loads=ScriptedLoads(fails={"a": [{"feed": range(8, 10_000)}]}))
async def test_a_model_whose_target_fails_is_unloaded_and_loaded_anew(server):
    await server.complete("b")
    answer = await server.complete("a", 20, stream=True)
    assert answer.events[-1]["error"]["code"] == "models_unavailable"
    await trio.sleep(1)
    assert server.loads.history == [("load", "b"), ("load", "a"), ("unload", "a")]
    health = await ask(server.app, "/health")
    assert (health.status, health.json["status"]) == (200, "ok")
    assert (await server.complete("a", 20)).text == text_of("a", 20)
    assert (await server.complete("b")).text == text_of("b", 4)


# --- reports --------------------------------------------------------------------------------------


@with_models(A, spec("b", draft_name="small"), spec("c", draft="auto", draft_name="auto"))
async def test_the_models_are_listed_loaded_or_not(server):
    await server.complete("b")
    assert (await ask(server.app, "/v1/models/c")).json["draft"] == "auto"
    await server.complete("c")  # in which "auto" finds none
    *listed, found_none = (await ask(server.app, "/v1/models")).json["data"]
    assert (found_none["state"], found_none["draft"]) == ("loaded", None)
    assert [(each["id"], each["state"], each["draft"], each["has_chat_template"]) for each in listed] == [
        ("a", "unloaded", None, None),
        ("b", "loaded", "small", True),
    ]
    assert (await ask(server.app, "/v1/models/b")).json == listed[1]


@with_models(A, B, memory_limit=15)
async def test_counters_are_by_model_and_survive_its_unloading(server):
    seen = []
    for name in ("a", "a", "b", "a"):
        await server.complete(name)
        await server.complete(name, 2)
        seen.append(await figures(server.app))
    assert server.loads.history.count(("load", "a")) == 2
    for name in ("a", "b"):
        for counter in ("generated_tokens_total", "target_passes_total", "prompt_tokens_total"):
            values = [each[f"outrider_{counter}", name] for each in seen]
            assert values == sorted(values)
        busy = [each["outrider_busy_seconds_total", "target" + name] for each in seen]
        assert busy == sorted(busy)
    last = seen[-1]
    assert [last["outrider_generated_tokens_total", name] for name in ("a", "b")] == [18, 6]
    assert [last["outrider_answer_seconds_count", name] for name in ("a", "b")] == [6, 2]
    assert [last["outrider_model_loaded", name] for name in ("a", "b")] == [1, 0]
    assert [last["outrider_model_loads_total", name + "loaded"] for name in ("a", "b")] == [2, 1]


STOP = text_of("b", 2)[1]


@with_models(spec("a", settings={"max_tokens": 3}), spec("b", settings={"stop": [STOP]}))
async def test_the_settings_of_a_model_are_those_of_requests_without_others(server):
    assert (await ask(server.app, COMPLETIONS, {"prompt": PROMPT, "model": "a"})).text == text_of("a", 3)
    assert (await server.complete("a", 8)).text == text_of("a", 8)
    assert (await server.complete("b", 8)).text == text_of("b", 8).partition(STOP)[0]
    assert (await server.complete("b", 8, stop=[])).text == text_of("b", 8)
