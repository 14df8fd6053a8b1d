"""What the examples of client libraries share: the server, the type, the tool, and showing what a library can do."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OUTRIDER_API_KEY", "none")
MODEL = os.environ.get("OUTRIDER_MODEL", "outrider-demo-target")


class Weather(BaseModel):
    """What the model is held to: with no other fields, or a small model invents them."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy", "rainy"]
    degrees: Annotated[int, Field(ge=-40, le=50)]


# LlamaIndex evaluates the annotations in a module of its own: they must not be strings.
def forecast(city: Literal["Lisbon", "Oslo"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """The weather in a city, some days from now."""
    return f"{city} in {days} days: clear, 20 degrees"


def show(*features: Callable[[], Any]) -> None:
    """Call functions, and print what they give; what they yield, as it comes."""
    for feature in features:
        print(f"\n--- {feature.__name__}")
        match feature():
            case AsyncIterator() as pieces:
                asyncio.run(_show_pieces(pieces))
            case Iterator() as pieces:
                for piece in pieces:
                    _show_piece(piece)
            case Coroutine() as work:
                print(asyncio.run(work))
            case found:
                print(found)


async def _show_pieces(pieces: AsyncIterator[Any]) -> None:
    async for piece in pieces:
        _show_piece(piece)


def _show_piece(piece: Any) -> None:
    print(piece, end="" if isinstance(piece, str) else "\n", flush=True)
