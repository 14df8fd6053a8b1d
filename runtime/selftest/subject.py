"""The models under test, and how much time a check has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.cache_options import CacheOptions
from actors.workers.thread_worker import ThreadWorker
from protocol.trace import Actor
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.generation.token_stream import Completion
from runtime.loading.demo import DEMO_DRAFT, DEMO_PROMPTS, DEMO_TARGET
from runtime.loading.model_sources import Loaded, load_onto


@attrs.frozen
class Subject:
    """The models under test.

    Attributes:
        target, draft: paths or hub ids; by default the demo pair.
        seconds: how long a check that can go on for any time goes on, > 0.
        max_tokens: length of a text, >= 1.
    """

    target: str = str(DEMO_TARGET)
    draft: str = str(DEMO_DRAFT)
    seconds: float = 10.0
    max_tokens: int = 64

    @property
    def is_demo(self) -> bool:
        """Whether these are the bundled models."""
        return self.target == str(DEMO_TARGET)

    def load(self, role: Actor, dtype: mx.Dtype | None = None) -> tuple[Module, TokenizerWrapper]:
        """Load a model on this thread; in another number format than its own if `dtype` is given."""
        model, tokenizer = load(self.target if role == "target" else self.draft)[:2]
        if dtype is not None:
            model.set_dtype(dtype)
        mx.eval(model)
        return model, tokenizer

    def prompts(self, tokenizer: TokenizerWrapper) -> list[tuple[int, ...]]:
        """Token ids of a short prompt and of one of some hundred tokens."""
        texts = (DEMO_PROMPTS[0], "".join(DEMO_PROMPTS) * 2)
        return [tuple(tokenizer.encode(text)) for text in texts]


@asynccontextmanager
async def running_pair(
    target: tuple[Module, TokenizerWrapper],
    draft: tuple[Module, TokenizerWrapper],
    *,
    chains: bool | None = None,
) -> AsyncIterator[Runtime]:
    """A runtime over loaded models, as `runtime.open` makes it, but that chaining of draft steps can be chosen.

    Args:
        target, draft: each model and its tokenizer.
        chains: see `DraftActor`.
    """
    options = CacheOptions()
    async with AsyncExitStack() as stack:
        workers: dict[Actor, ThreadWorker] = {}
        loaded: dict[Actor, Loaded] = {}
        sources: dict[Actor, tuple[Module, TokenizerWrapper]] = {"target": target, "draft": draft}
        for role, source in sources.items():
            workers[role] = await stack.enter_async_context(ThreadWorker(role))
            loaded[role] = await load_onto(workers[role], role, source, options)
            stack.enter_context(loaded[role].model.evaluating_layers())
        pairs = {role: (loaded[role].model, workers[role]) for role in sources}
        open_runtime = partial(running, pairs["target"], pairs["draft"], tokenizer=loaded["target"].tokenizer)
        yield await stack.enter_async_context(open_runtime(chains=chains))


def ids(completion: Completion) -> list[int]:
    """The token ids of a text."""
    return [token.id for token in completion.tokens]
