"""The server, the type and the tool that the examples of client libraries share."""

import os
from typing import Annotated, Literal

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
