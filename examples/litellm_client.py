"""LiteLLM with `outrider serve`: a stream, tools, structured output, and an answer that is broken off.

Only the base URL is Outrider's. Run with litellm 1.106.2 (which needs the package mcp for tools).
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import litellm
from weather import BASE_URL, KEY, MODEL, Weather, show

CITY = {"type": "string", "enum": ["Lisbon", "Oslo"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}


def complete(*messages: dict[str, Any], **options: Any) -> Any:
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=BASE_URL,
        api_key=KEY,
        messages=list(messages),
        **{"max_tokens": 200, **options},
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def stream() -> Iterator[str]:
    """The pieces of an answer."""
    for chunk in complete(user("Write a haiku about a dog that runs ahead."), stream=True, max_tokens=24):
        yield chunk.choices[0].delta.content or ""


def call() -> tuple[dict[str, Any], str]:
    """The arguments of the model's streamed tool call, and its reply to the result."""
    question = user("What is the weather in Oslo?")
    options: Any = {"tools": [FORECAST], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.stream_chunk_builder(list(complete(question, stream=True, **options)))
    message = whole.choices[0].message
    (wanted,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": wanted.id, "content": "clear, 20 degrees"}
    after = complete(question, message.model_dump(), result, tools=[FORECAST], tool_choice="none", max_tokens=8)
    return json.loads(wanted.function.arguments), after.choices[0].message.content


def structured() -> Weather:
    """An answer of a type."""
    answer = complete(user("How is the weather?"), response_format=Weather)
    return Weather.model_validate_json(answer.choices[0].message.content)


def break_off() -> str:
    """The first piece of a long answer; the server's work on the rest ends."""
    chunks = complete(user("Count to a million."), stream=True, max_tokens=800, extra_body={"ignore_eos": True})
    first = next(chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content)
    chunks.completion_stream.close()
    return first


if __name__ == "__main__":
    show(stream, call, structured, break_off)
