"""A model in memory, with what a server needs for its requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import attrs

from runtime.server.models.served_model import ServedModel
from runtime.server.openai.fill_in_middle import FillInMiddle, fill_in_middle

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.server.grammars.schemas import Schemas
    from runtime.server.timelines import Timelines


@attrs.frozen(eq=False)
class LoadedModel:
    """A model that is loaded, and what a server needs for its requests.

    Attributes:
        spec: what it is.
        runtime: generates; its target has a tokenizer.
        timelines: of the streams that are watched.
        schemas: compiles JSON schemas to grammars for its tokenizer.
    """

    spec: ServedModel
    runtime: Runtime
    timelines: Timelines
    schemas: Schemas

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.spec.name

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How its tokenizer marks prefix and suffix of a fill-in-the-middle prompt; None if it has no such tokens.

        The first access takes long, so it must be made in another thread than trio's.
        """
        assert self.runtime.tokenizer is not None, "a server's target has a tokenizer"
        return fill_in_middle(self.runtime.tokenizer)


OpenModel = Callable[[ServedModel], AbstractAsyncContextManager[LoadedModel]]
"""Loads a model for the duration of a block. What it raises before the block is the error of the load."""

ModelState = Literal["loaded", "loading", "unloaded"]
