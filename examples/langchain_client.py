"""LangChain with `outrider serve`: a stream, tools, structured output, and an answer that is broken off.

Only the base URL is Outrider's. Run with langchain-openai 1.7.3 (langchain-core 1.7.2).
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import BASE_URL, KEY, MODEL, Weather, forecast, show

FORECAST = tool(forecast)


def chat_model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, **{"max_tokens": 200, **options})


def stream() -> Iterator[str]:
    """The pieces of an answer."""
    for chunk in chat_model(max_tokens=24).stream("Write a haiku about a dog that runs ahead."):
        yield chunk.text


def call() -> tuple[dict[str, Any], str]:
    """The arguments of the model's streamed tool call, and its reply to the result."""
    question = "human", "What is the weather in Oslo?"
    with_tools = chat_model().bind_tools([FORECAST], tool_choice="forecast", parallel_tool_calls=False)
    called = AIMessageChunk("")
    for chunk in with_tools.stream([question]):
        called += chunk
    (wanted,) = called.tool_calls
    after = chat_model(max_tokens=8).bind_tools([FORECAST], tool_choice="none")
    return wanted["args"], after.invoke([question, called, FORECAST.invoke(wanted)]).text


def structured() -> Weather:
    """An answer of a type."""
    answer = chat_model().with_structured_output(Weather).invoke("How is the weather?")
    assert isinstance(answer, Weather)
    return answer


def break_off() -> str:
    """The first piece of a long answer; the server's work on the rest ends."""
    pieces = chat_model(max_tokens=800, extra_body={"ignore_eos": True}).stream("Count to a million.")
    first = next(piece.text for piece in pieces if piece.text)
    pieces.close()
    return first


if __name__ == "__main__":
    show(stream, call, structured, break_off)
