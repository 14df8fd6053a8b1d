"""Tools in Python: calls are told apart, a grammar holds the model to them, and conversations call the functions."""

from __future__ import annotations  # types of a tool may be texts

import io
import json
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
from chat_models import calling_pair, calling_tokenizer, says
from faces import all_of, got, next_of, on_every_face, within
from schemas import closed_object
from sweeps import sweep

import runtime

USER = {"role": "user", "content": "weather?"}


def weather(city: str, days: int = 1) -> str:
    """The weather forecast.

    Args:
        city: name of a city.
        days: how many days ahead.
    """
    return f"rain in {city} for {days} days"


async def clock() -> dict[str, int]:
    """The time of day."""
    return {"hour": 12}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


OSLO = call_of("weather", city="Oslo")


def speaks(*answers: str) -> dict[str, Any]:
    return {"max_tokens": 200, "logits_processors": (says(calling_tokenizer(), *answers),), "lookahead": 3}


async def test_tokens_of_a_call_are_told_apart():
    async with runtime.open(*calling_pair()) as rt:
        async with rt.stream([USER], tools=[weather], **speaks(f"Let me see. {OSLO}")) as stream:
            tokens = [token async for token in stream]
        assert "".join(token.text for token in tokens if token.is_tool_call).endswith("</tool_call>")
        assert "Let me see." in "".join(token.text for token in tokens if not token.is_tool_call)
        deltas = [delta for token in tokens for delta in token.deltas]
        assert "".join(delta.source for delta in deltas) == "".join(token.text for token in tokens)
        arguments = [delta.text for delta in deltas if delta.kind == "call_arguments"]
        assert len(arguments) > 1
        assert "".join(arguments) == '{"city": "Oslo"}'
        [call] = stream.tool_calls
        assert (call.name, call.values, stream.content) == ("weather", {"city": "Oslo"}, "Let me see.")
        completion = await rt.generate([USER], tools=[weather], **speaks(OSLO))
        assert (completion.text, completion.content) == (OSLO, "")
        assert [call.name for call in completion.tool_calls] == ["weather"]


async def test_the_template_is_told_of_the_tools_and_without_them_nothing_is_told_apart():
    async with runtime.open(*calling_pair()) as rt:
        told = await rt.generate([USER], tools=[weather, clock], **speaks("yes"))
        plain = await rt.generate([USER], **speaks(OSLO))
        none = await rt.generate([USER], tools=[weather], tool_choice="none", **speaks(OSLO))
        for completion in (plain, none):
            assert (completion.text, completion.content, completion.tool_calls) == (OSLO, OSLO, ())
            assert not any(token.is_tool_call or token.deltas for token in completion.tokens)
        assert told.statistics.prompt_tokens > plain.statistics.prompt_tokens == none.statistics.prompt_tokens


@sweep("lookahead", [0, 4])
async def test_a_required_call_is_held_to_its_schema_under_speculation(lookahead):
    schema = closed_object(city={"enum": ["Oslo", "Lisbon"]})
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    async with runtime.open(*calling_pair()) as rt:
        # Reasoning is free, and this model would never end it.
        settings: Any = {"logit_bias": {calling_tokenizer().think_start_id: -1e6}, "temperature": 1.0, "seed": 3}
        settings |= {"max_tokens": 300, "lookahead": lookahead}
        completion = await rt.generate([USER], tools=[tool], tool_choice="weather", **settings)
        assert completion.finish_reason == "stop"
        [call] = completion.tool_calls
        assert call.values["city"] in ("Oslo", "Lisbon")
        assert completion.content == ""


async def test_tools_that_cannot_be_are_refused_before_any_model_work():
    def bare(x):
        return x

    async with runtime.open(*calling_pair()) as rt:
        for tools, says_what in (
            ([bare], "the function 'bare' cannot be described to a model"),
            ("weather", "tools must be a list"),
            ([5], r"tools\[0\] must be a mapping"),
        ):
            with pytest.raises(runtime.SettingsError, match=says_what):
                rt.stream([USER], tools=tools)
        with pytest.raises(runtime.SettingsError, match="tool_choice 'required' needs tools"):
            rt.stream([USER], tool_choice="required")
        with pytest.raises(runtime.PromptError, match="this prompt is text"):
            rt.stream("weather?", tools=[weather])
        assert rt.num_streams == 0


# --- conversations --------------------------------------------------------------------------------


async def test_a_result_with_half_a_character_does_not_block_the_conversation():
    def files() -> str:
        """The names of the files."""
        return "caf\udce9.txt"

    async with runtime.open(*calling_pair()) as rt:
        conversation = rt.conversation(tools=[files], **speaks(call_of("files"), "so"))
        assert (await conversation.generate("which?")).text == "so"
        assert conversation.messages[2]["content"] == r"caf\udce9.txt"


async def test_rounds_of_calls_are_bounded():
    num_calls = 0

    def count() -> int:
        """Count."""
        nonlocal num_calls
        num_calls += 1
        return num_calls

    async with runtime.open(*calling_pair()) as rt:
        conversation = rt.conversation(tools=[count], **speaks(*[call_of("count")] * 20))
        completion = await conversation.generate("count")
        assert num_calls == 8
        assert [call.name for call in completion.tool_calls] == ["count"]
        assert len(conversation.pending_calls) == 1


async def test_nothing_else_is_done_with_a_conversation_while_its_functions_are_called():
    called, go_on = trio.Event(), trio.Event()

    async def waits() -> str:
        """Wait."""
        called.set()
        await go_on.wait()
        return "done"

    async with runtime.open(*calling_pair()) as rt:
        conversation = rt.conversation(tools=[waits], **speaks(call_of("waits"), "so"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.generate, "wait")
            await called.wait()
            for begun in (lambda: conversation.stream("and now?"), conversation.reset):
                with pytest.raises(runtime.ConversationBusyError, match="functions are being called"):
                    begun()
            with pytest.raises(runtime.ConversationBusyError, match="call its tools"):
                await conversation.call_tools()
            go_on.set()
        assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]


# --- conversations, on every face ----------------------------------------------------------------


def where() -> str:
    """The name of the thread."""
    return threading.current_thread().name


async def where_async() -> list[str]:
    """The name of the thread, in a list."""
    await anyio.lowlevel.checkpoint()
    return [threading.current_thread().name]


def where_wrapped() -> Any:
    """The name of the thread, by an async function."""
    return where_async()


def fails(city: str) -> str:
    """Fail.

    Args:
        city: name of a city.
    """
    raise ValueError(f"no {city}")


def results_in(conversation: runtime.aio.Conversation | runtime.sync.Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "tool"]


@on_every_face
async def test_functions_are_called_and_the_model_goes_on_with_their_results(open):
    is_async = open is not runtime.open_sync
    tools = [where, where_wrapped, *([where_async] if is_async else ()), fails]
    names = [*(tool.__name__ for tool in tools), "fails", "unheard_of"]
    arguments = [{}] * len(tools[:-1]) + [{"city": "Oslo"}, {"town": "Oslo"}, {}]
    asked = "".join(call_of(name, **given) for name, given in zip(names, arguments, strict=True))
    async with within(open(*calling_pair())) as rt:
        conversation = rt.conversation("Be kind.", tools=tools, **speaks(asked, "so", call_of("where"), "there"))
        assert conversation.pending_calls == ()
        completion = await got(conversation.generate("where?"))
        assert (completion.text, completion.tool_calls) == ("so", ())
        called_in, wrapped, *in_loop, error, misused, unknown = results_in(conversation)
        asked_for = conversation.messages[2]["tool_calls"]
        assert [call["function"]["name"] for call in asked_for] == names
        answered = [message["tool_call_id"] for message in conversation.messages if message["role"] == "tool"]
        assert answered == [call["id"] for call in asked_for]
        ours = threading.current_thread().name
        assert (called_in == ours) == (not is_async)
        assert in_loop == [f'["{ours}"]'] * is_async
        # Only asyncio awaits what a function that is not async returns.
        refused = "Error: TypeError: Trio expected" if is_async else "Error: TypeError: the tool is async"
        is_awaited = open is runtime.aio.open
        assert wrapped == f'["{ours}"]' if is_awaited else wrapped.startswith(refused)
        assert error == "Error: ValueError: no Oslo"
        assert misused.startswith("Error: TypeError: ")
        assert unknown == "Error: there is no function 'unheard_of'"

        # Streamed, saved with a call pending, and loaded: whoever is given the functions makes the call.
        stream = conversation.stream("where?")
        first = await next_of(stream)
        assert conversation.pending_calls == ()
        assert first.text + "".join(token.text for token in await all_of(stream)) == call_of("where")
        assert [call.name for call in stream.tool_calls] == ["where"]
        await got(conversation.save(file := io.BytesIO()))
        script = speaks("", "", "", "there")["logits_processors"]
        loaded = await got(rt.load(io.BytesIO(file.getvalue()), tools=tools, logits_processors=script))
        for each in (conversation, loaded):
            assert [call.name for call in each.pending_calls] == ["where"]
            assert await got(each.call_tools())
            assert not await got(each.call_tools())
            stream = each.stream()
            assert "".join(token.text for token in await all_of(stream)) == "there"
            # Functions are part of the prompt's beginning: with the same ones, nothing of it is read again.
            assert stream.statistics().cached_tokens > 0
            with pytest.raises(runtime.PromptError, match="there are no results of tools"):
                await all_of(each.stream())
        loaded.reset()
        assert loaded.pending_calls == ()


@on_every_face
async def test_bad_functions_are_refused_at_once_and_each_of_many_prompts_may_have_its_own(open):
    async with within(open(*calling_pair())) as rt:
        with pytest.raises(runtime.SettingsError, match="two tools have the name"):
            rt.conversation(tools=[where, where])
        with pytest.raises(runtime.SettingsError, match="tool_choice"):
            rt.generate_many([], tool_choice="required")
        if open is runtime.open_sync:
            for refused in (rt.conversation, lambda tools: rt.load(io.BytesIO(), tools=tools)):
                with pytest.raises(runtime.SettingsError, match="the tool 'where_async' is async"):
                    refused(tools=[where_async])
        other = ([USER], {"tools": [clock], **speaks(call_of("clock"))})
        prompts = [[USER], other, ([USER], {"tools": None, **speaks("dry")})]
        many = await got(rt.generate_many(prompts, tools=[where], **speaks(call_of("where"))))
        assert [[call.name for call in each.tool_calls] for each in many] == [["where"], ["clock"], []]
        for prompts, settings, error, complaint in (
            ([[USER], "weather?"], {"tools": [weather]}, runtime.PromptError, "the chat template .* prompt is text"),
            ([([USER], {"tool_choice": "required"})], {}, runtime.SettingsError, "tool_choice 'required' needs tools"),
        ):
            with pytest.raises(error, match=rf"prompts\[{len(prompts) - 1}\]: {complaint}"):
                await got(rt.generate_many(prompts, **settings))


@on_every_face
async def test_a_call_that_is_broken_off_leaves_the_conversation_as_it_was_and_can_be_made_again(open):
    is_broken_off = True

    def interrupted() -> str:
        """Wait."""
        nonlocal is_broken_off
        if is_broken_off:
            is_broken_off = False
            raise KeyboardInterrupt
        return "done"

    async def cancelled() -> str:
        """Wait."""
        try:
            return interrupted()
        except KeyboardInterrupt:
            scope.cancel()
            await anyio.sleep_forever()

    function = interrupted if open is runtime.open_sync else cancelled
    async with within(open(*calling_pair())) as rt:
        conversation = rt.conversation(tools=[function], **speaks(call_of(function.__name__), "so"))
        with pytest.raises(KeyboardInterrupt) if function is interrupted else anyio.CancelScope() as scope:
            await got(conversation.generate("wait"))
        assert not is_broken_off
        assert [call.name for call in conversation.pending_calls] == [function.__name__]
        assert await got(conversation.call_tools())
        assert results_in(conversation) == ["done"]


def test_a_function_that_uses_its_own_sync_conversation_finds_it_busy():
    with runtime.open_sync(*calling_pair()) as rt:

        def again() -> str:
            """Ask again."""
            return conversation.generate("again").text

        conversation = rt.conversation(tools=[again], **speaks(call_of("again"), "so"))
        assert conversation.generate("ask").text == "so"
        [result] = results_in(conversation)
        assert result.startswith("Error: ConversationBusyError: cannot say something while")
