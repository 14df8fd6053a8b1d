"""OpenAI's Agents SDK with `outrider serve`: a stream, tools, structured output, and a run that is broken off.

Only the base URL is Outrider's; the agents speak `/v1/responses`. Run with openai-agents 0.24.0.
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai.types.responses import ResponseTextDeltaEvent
from weather import BASE_URL, KEY, MODEL, Weather, forecast, show


def agent(*, model: type = OpenAIResponsesModel, settings: dict[str, Any], **options: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY)
    return Agent(
        name="weather",
        model=model(MODEL, client),
        model_settings=ModelSettings(**{"max_tokens": 200, **settings}),
        **options,
    )


async def stream() -> AsyncIterator[str]:
    """The pieces of an answer."""
    # To the agents, an answer that `max_tokens` cuts off is an error; this one ends with its first sentence.
    run = Runner.run_streamed(agent(settings={"extra_body": {"stop": ["."]}}), "Say in a sentence what dogs do.")
    async for event in run.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            yield event.data.delta


async def call() -> str:
    """What the tool returned to the model's call, which ends the run."""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    caller = agent(settings=settings, tools=[function_tool(forecast)], tool_use_behavior="stop_on_first_tool")
    return (await Runner.run(caller, "What is the weather in Oslo?")).final_output


async def structured() -> Weather:
    """An answer of a type."""
    return (await Runner.run(agent(settings={}, output_type=Weather), "How is the weather?")).final_output


async def break_off() -> str:
    """The first piece of a long answer; the server's work on the rest ends."""
    settings = {"max_tokens": 800, "extra_body": {"ignore_eos": True}}
    run = Runner.run_streamed(agent(settings=settings), "Count to a million.")
    async for event in run.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            run.cancel()
            return event.data.delta
    raise AssertionError("the answer was empty")


if __name__ == "__main__":
    set_tracing_disabled(True)
    show(stream, call, structured, break_off)
