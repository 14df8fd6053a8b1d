"""Pydantic AI with `outrider serve`: a stream, tools, structured output, and an answer that is broken off.

Only the base URL is Outrider's. Run with pydantic-ai-slim[openai] 2.68.0.
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import BASE_URL, KEY, MODEL, Weather, forecast, show


@asynccontextmanager
async def agent(settings: dict[str, Any], **options: Any) -> AsyncIterator[Agent[None, Any]]:
    """An agent, whose connections are closed on exit."""
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as client:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        yield Agent(model, model_settings={"max_tokens": 200, **settings}, **options)


async def stream() -> AsyncIterator[str]:
    """The pieces of an answer."""
    async with (
        agent({"max_tokens": 24}) as one,
        one.run_stream("Write a haiku about a dog that runs ahead.") as answer,
    ):
        async for piece in answer.stream_text(delta=True):
            yield piece


async def call() -> tuple[dict[str, Any], str]:
    """The arguments of the model's tool call, and what the tool returns, which ends the run."""
    async with agent({"parallel_tool_calls": False}, output_type=forecast) as one:
        run = await one.run("What is the weather in Oslo?")
    (wanted,) = [part for message in run.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    return wanted.args_as_dict(), run.output


async def structured() -> Weather:
    """An answer of a type, by the server's grammar."""
    async with agent({}, output_type=NativeOutput(Weather)) as one:
        answer = await one.run("How is the weather?")
    assert isinstance(answer.output, Weather)
    return answer.output


async def break_off() -> str:
    """The first piece of a long answer; the server's work on the rest ends."""
    settings = {"max_tokens": 800, "extra_body": {"ignore_eos": True}}
    async with agent(settings) as one, one.run_stream("Count to a million.") as answer:
        async for piece in answer.stream_text(delta=True, debounce_by=None):
            if piece:
                await answer.cancel()
                return piece
    raise AssertionError("the answer was empty")


if __name__ == "__main__":
    show(stream, call, structured, break_off)
