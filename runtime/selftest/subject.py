"""The models under test, and how much time a check has. Nothing here imports mlx before it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from runtime.loading.demo import DEMO_DRAFT, DEMO_PROMPTS, DEMO_TARGET

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.trace import Actor
    from runtime.engine.runtime import Runtime
    from runtime.generation.token_stream import Completion


@attrs.frozen
class Subject:
    """The models under test, and how much time a check has.

    Attributes:
        target, draft: paths or hub ids; by default the demo pair.
        shape: shape of a pair with random weights to measure, too (see `runtime.bench.shapes`); None for no such pair.
    """

    target: str = str(DEMO_TARGET)
    draft: str = str(DEMO_DRAFT)
    seconds: float = 10.0  # how long an open-ended check goes on, > 0
    max_tokens: int = 64  # length of a text, >= 1
    shape: str | None = None
    is_quick: bool = False  # whether less is measured
    cooldown: float = 0.0  # seconds of rest before each timed run

    @property
    def pair_name(self) -> str:
        """The name of the target in reports."""
        return "the bundled pair" if self.target == str(DEMO_TARGET) else self.target

    def load(self, role: Actor) -> tuple[Module, TokenizerWrapper]:
        """Load a model on this thread."""
        import mlx.core as mx

        from runtime.loading.model_reading import read_model

        model, tokenizer = read_model(self.target if role == "target" else self.draft)
        mx.eval(model)
        return model, tokenizer

    def load_in_float32(self) -> tuple[tuple[Module, TokenizerWrapper], tuple[Module, TokenizerWrapper]] | None:
        """Load target and draft model, cast to float32; None if that is more than the device recommends to use."""
        import mlx.core as mx

        from actors.mlx.memory import recommended_working_set
        from runtime.bench.small_models import weights_of

        pair = self.load("target"), self.load("draft")
        limit = recommended_working_set()
        sizes = [weight.size for model, _ in pair for _, weight in weights_of(model)]
        if limit is not None and 4 * sum(sizes) > limit:
            return None
        for model, _ in pair:
            model.set_dtype(mx.float32)
            mx.eval(model)
        return pair

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
    """A runtime over loaded models, like that of `runtime.open`; `chains` says whether draft steps are chained.

    It keeps no prefixes: the memory that they take would hide a leak.
    """
    from runtime.measuring.loaded_models import ONLY_DRAFT, load_models

    async with AsyncExitStack() as stack:
        loaded = await load_models(stack, target, {ONLY_DRAFT: draft})
        stack.enter_context(loaded.evaluating_layers())
        yield await loaded.open_runtime(stack, tokenizer=loaded.tokenizer, prefix_cache_bytes=0, chains=chains)


def ids(completion: Completion) -> list[int]:
    """The token ids of a text."""
    return [token.id for token in completion.tokens]
