"""Instructor with `outrider serve`: types as answers, by a tool and by a JSON schema, also while they are written.

Only the base URL is Outrider's. Run with instructor 1.17.0 (openai 3.3.0).
Start `outrider serve` first, with a model that can call tools, then this program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field
from weather import BASE_URL, KEY, MODEL, Weather, show

QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]


class Days(BaseModel):
    """A list that takes long to write."""

    model_config = ConfigDict(extra="forbid")
    days: Annotated[list[Weather], Field(min_length=100)]


def client(mode: instructor.Mode, of: Any = openai.OpenAI) -> Any:
    return instructor.from_openai(of(base_url=BASE_URL, api_key=KEY), mode=mode)


def stream() -> Iterator[Weather]:
    """An answer while it is written: fields that are not there yet are None."""
    yield from client(instructor.Mode.TOOLS).create_partial(Weather, model=MODEL, messages=QUESTION, max_tokens=200)


def call() -> Weather:
    """An answer of a type, by a tool."""
    return client(instructor.Mode.TOOLS).create(Weather, model=MODEL, messages=QUESTION, max_tokens=200)


def structured() -> Weather:
    """An answer of a type, by its JSON schema."""
    return client(instructor.Mode.JSON_SCHEMA).create(Weather, model=MODEL, messages=QUESTION, max_tokens=200)


def break_off() -> str:
    """A long answer, left after a second; the server's work on the rest ends."""

    async def wait() -> str:
        many = client(instructor.Mode.TOOLS, openai.AsyncOpenAI).create(
            Days, model=MODEL, messages=QUESTION, max_tokens=800
        )
        try:
            async with asyncio.timeout(1):
                return repr(await many)
        except TimeoutError:
            return "a second"

    return asyncio.run(wait())


if __name__ == "__main__":
    show(stream, call, structured, break_off)
