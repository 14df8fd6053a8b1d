"""A loaded model with the state that the server keeps for it, and how it is loaded."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cached_property

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.memory import release_buffers
from protocol.errors import SettingsError
from runtime.engine.opening import open as open_runtime
from runtime.engine.runtime import Runtime
from runtime.generation.grammar_vocabulary import tokenizer_json
from runtime.server.fair_threads import in_thread
from runtime.server.grammars.checker import grammar_checker
from runtime.server.grammars.schemas import Schemas
from runtime.server.models.fill_in_middle import FillInMiddle, fill_in_middle
from runtime.server.models.served_model import ServedModel
from runtime.server.timelines import Timelines


def tokenizer_of(runtime: Runtime) -> TokenizerWrapper:
    """The target's tokenizer."""
    assert runtime.tokenizer is not None, "a server's target has a tokenizer"
    return runtime.tokenizer


@attrs.frozen(eq=False)
class LoadedModel:
    """A loaded model, with the state that the server keeps for it."""

    spec: ServedModel
    runtime: Runtime  # its target has a tokenizer
    timelines: Timelines  # of the streams that are watched
    schemas: Schemas

    @property
    def name(self) -> str:
        """Its name in requests."""
        return self.spec.name

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How its tokenizer marks prefix and suffix, or None. The first access takes too long for trio's thread."""
        return fill_in_middle(tokenizer_of(self.runtime))


OpenModel = Callable[[ServedModel], AbstractAsyncContextManager[LoadedModel]]
"""Loads a model for the duration of a block. What it raises before the block is the error of the load."""


@asynccontextmanager
async def open_model(spec: ServedModel, *, schema_s: float) -> AsyncIterator[LoadedModel]:
    """Load a model for the duration of the block. Raises, Cancellation: as `runtime.open`."""
    timelines = Timelines()
    async with (
        open_runtime(spec.target, spec.draft, trace=timelines, defaults=spec.settings, **spec.options) as runtime,
        grammar_checker(lambda: tokenizer_json(runtime.tokenizer)) as check,
    ):
        schemas = Schemas(runtime.tokenizer, check, in_thread, schema_s)
        # Now, so that no request for JSON waits for it. If it fails, the first such request gets the error.
        with suppress(SettingsError):
            await schemas.any_object()
        yield LoadedModel(spec, runtime, timelines, schemas)


# Pauses before each attempt to free the memory of an unloaded model. The next load waits for their sum at most.
_PAUSES_S = (0.0, 0.01, 0.04, 0.2, 0.75)


async def free_memory(model: Callable[[], object]) -> None:
    """Free the memory of an unloaded model, to which `model` is a weak reference.

    A runtime is full of reference cycles, which only the garbage collector finds. This works in a thread, since MLX may
    wait for a pass of another model before it gives buffers back, and again if the model is still there: `gc.collect`
    returns at once while another thread collects, and the last request's task may not have ended yet.
    """

    def collect() -> None:
        gc.collect()
        release_buffers()

    for pause_s in _PAUSES_S:
        await trio.sleep(pause_s)
        await trio.to_thread.run_sync(collect)
        if model() is None:
            break
