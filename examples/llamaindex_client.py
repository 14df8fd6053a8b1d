"""LlamaIndex with `outrider serve`: a stream, tools, structured output, and an answer that is broken off.

Only the base URL is Outrider's. Run with llama-index-llms-openai-like 0.8.1 (llama-index-core 0.14.25).
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from collections.abc import Iterator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from weather import BASE_URL, KEY, MODEL, Weather, forecast, show


def llm(**options: Any) -> OpenAILike:
    has = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, **has, **{"max_tokens": 200, **options})


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def stream() -> Iterator[str]:
    """The pieces of an answer."""
    for part in llm(max_tokens=24).stream_chat(user("Write a haiku about a dog that runs ahead.")):
        yield part.delta or ""


def call() -> str:
    """What the tool returns to the model's call."""
    tool = FunctionTool.from_defaults(forecast)
    return str(llm().predict_and_call([tool], "What is the weather in Oslo?", tool_required=True))


def structured() -> Weather:
    """An answer of a type, by a tool."""
    answer = llm().as_structured_llm(Weather).chat(user("How is the weather?")).raw
    assert isinstance(answer, Weather)
    return answer


def break_off() -> str:
    """The first piece of a long answer; the server's work on the rest ends."""
    options = {"max_tokens": 800, "additional_kwargs": {"extra_body": {"ignore_eos": True}}}
    parts = llm(**options).stream_chat(user("Count to a million."))
    first = next(part.delta for part in parts if part.delta)
    parts.close()
    return first


if __name__ == "__main__":
    show(stream, call, structured, break_off)
