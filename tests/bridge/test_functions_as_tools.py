"""Conversations that call Python functions: where, and how that ends."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from chat_models import calling_pair, calling_tokenizer, says
from faces import all_of, got, next_of, on_every_face, within

import runtime


def call_of(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def speaks(*answers: str) -> dict[str, Any]:
    return {"max_tokens": 120, "logits_processors": (says(calling_tokenizer(), *answers),), "lookahead": 3}


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
async def test_functions_are_called_and_the_model_goes_on_with_their_results(open: Any) -> None:
    is_async = open is not runtime.open_sync
    tools = [where, where_wrapped, *([where_async] if is_async else ()), fails]
    asked = "".join(call_of(tool.__name__) for tool in tools[:-1]) + call_of("fails", '{"city": "Oslo"}')
    async with within(open(*calling_pair())) as rt:
        conversation = rt.conversation("Be kind.", tools=tools, **speaks(asked, "so", call_of("where"), "there"))
        assert conversation.pending_calls == ()
        completion = await got(conversation.generate("where?"))
        assert (completion.text, completion.tool_calls) == ("so", ())
        called_in, wrapped, *in_loop, error = results_in(conversation)
        asked_for = conversation.messages[2]["tool_calls"]
        assert [call["function"]["name"] for call in asked_for] == [tool.__name__ for tool in tools]
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
async def test_bad_functions_are_refused_at_once_and_many_prompts_take_tools(open: Any) -> None:
    async with within(open(*calling_pair())) as rt:
        with pytest.raises(runtime.SettingsError, match="two tools have the name"):
            rt.conversation(tools=[where, where])
        with pytest.raises(runtime.SettingsError, match="tool_choice"):
            rt.generate_many([], tool_choice="required")
        if open is runtime.open_sync:
            for refused in (rt.conversation, lambda tools: rt.load(io.BytesIO(), tools=tools)):
                with pytest.raises(runtime.SettingsError, match="the tool 'where_async' is async"):
                    refused(tools=[where_async])
        prompts = [[{"role": "user", "content": "where?"}]] * 2
        many = await got(rt.generate_many(prompts, tools=[where], **speaks(call_of("where"))))
        assert [[call.name for call in each.tool_calls] for each in many] == [["where"]] * 2


def test_on_asyncio_a_cancelled_call_leaves_the_conversation_as_it_was() -> None:
    async def main(rt: runtime.aio.Runtime) -> None:
        called, ended = asyncio.Event(), asyncio.Event()

        async def waits() -> str:
            """Wait."""
            called.set()
            try:
                await asyncio.sleep(0 if ended.is_set() else 3600)
            finally:
                ended.set()
            return "done"

        conversation = rt.conversation(tools=[waits], **speaks(call_of("waits"), "so"))
        task = asyncio.create_task(conversation.generate("wait"))
        await called.wait()
        with pytest.raises(runtime.ConversationBusyError, match="functions are being called"):
            conversation.stream("and now?")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        assert [call.name for call in conversation.pending_calls] == ["waits"]
        assert await conversation.call_tools()
        assert results_in(conversation) == ["done"]

    async def opened() -> None:
        async with runtime.aio.open(*calling_pair()) as rt:
            await main(rt)

    asyncio.run(opened())


def test_a_ctrl_c_in_a_function_leaves_a_sync_conversation_unchanged() -> None:
    pressed = [True]

    def interrupted() -> str:
        """Wait."""
        if pressed:
            pressed.clear()
            raise KeyboardInterrupt
        return "done"

    with runtime.open_sync(*calling_pair()) as rt:
        conversation = rt.conversation(tools=[interrupted], **speaks(call_of("interrupted"), "so"))
        with pytest.raises(KeyboardInterrupt):
            conversation.generate("wait")
        assert [call.name for call in conversation.pending_calls] == ["interrupted"]
        assert conversation.call_tools()
        assert results_in(conversation) == ["done"]


def test_a_function_that_uses_its_own_sync_conversation_finds_it_busy() -> None:
    with runtime.open_sync(*calling_pair()) as rt:

        def again() -> str:
            """Ask again."""
            return conversation.generate("again").text

        conversation = rt.conversation(tools=[again], **speaks(call_of("again"), "so"))
        assert conversation.generate("ask").text == "so"
        [result] = results_in(conversation)
        assert result.startswith("Error: ConversationBusyError: cannot say something while")
