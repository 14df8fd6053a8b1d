"""A trained drafter behind the interface of `actors.model`, so that the draft actor need not know what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from actors.model import FeedsEach
from actors.trained.eagle3 import Eagle3Reader, LoadedEagle3, load
from actors.trained.feature_sequence import FeatureSequence
from protocol.errors import ModelError


class TrainedDrafter(FeedsEach):
    """A drafter that was trained for its target, on its own thread, on which it must also be made.

    Attributes:
        feature_layers: whose inputs the target has to record.
    """

    context_length = None

    def __init__(self, folder: Path, target: Module, target_vocab_size: int, named: str = "the drafter") -> None:
        """Load a drafter.

        Args:
            folder: with its files.
            target: mlx-lm's model, whose weights are evaluated.
            target_vocab_size: width of the target's logits.
            named: the drafter, for messages.

        Raises: ModelError: it cannot be loaded, or was made for another target; the message says what differs.
        """
        self._loaded = load(folder)
        config = self._loaded.model.config
        self.feature_layers = config.feature_layers_of(len(target.layers))
        if config.vocab_size > target_vocab_size:
            raise ModelError(
                f"{named} was made for a target with {config.vocab_size} tokens, and this one has {target_vocab_size}"
            )
        self.vocab_size = config.vocab_size
        embed = None if self._loaded.embedding is not None else embedding_of(target, named)
        self._check_width(target, embed, named)
        self._reader = Eagle3Reader(self._loaded, embed)

    def _check_width(self, target: Module, embed: Callable[[mx.array], mx.array] | None, named: str) -> None:
        width = (embedding_of(target, named) if embed is None else embed)(mx.array([0])).shape[-1]
        if width != self._loaded.model.config.target_hidden_size:
            raise ModelError(
                f"{named} reads hidden states of a width of {self._loaded.model.config.target_hidden_size}, and those "
                f"of this target have {width}"
            )

    def open_sequence(self, *, beside_another: bool) -> FeatureSequence:
        """See `Model.open_sequence`."""
        return FeatureSequence(self._reader)

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str:
        """See `Model.sharing_obstacle`."""
        return "a trained drafter reads one text at a time"

    @contextmanager
    def evaluating_layers(self) -> Iterator[None]:
        """See `MLXModel.evaluating_layers`. One layer is evaluated in one go."""
        yield

    @property
    def module(self) -> Module:
        """Its weights."""
        return self._loaded.model

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        weights = [cast(mx.array, pair[1]) for pair in tree_flatten(self._loaded.model.parameters())]  # type: ignore[no-untyped-call]
        return sum(array.nbytes for array in [*weights, *_present(self._loaded)])


def _present(loaded: LoadedEagle3) -> list[mx.array]:
    return [array for array in (loaded.target_ids, loaded.embedding) if array is not None]


def embedding_of(target: Module, named: str) -> Callable[[mx.array], mx.array]:
    """The embedding of a target of mlx-lm's, wherever its class keeps it."""
    for path in (("model",), ("language_model", "model"), ("transformer",), ("backbone",), ()):
        inner: Any = target
        for name in path:
            inner = getattr(inner, name, None)
        for name in ("embed_tokens", "wte", "tok_embeddings", "embeddings", "embedding"):
            found = getattr(inner, name, None)
            if isinstance(found, Module):
                return found
    raise ModelError(f"{named} reads its target's embedding, and none was found in {type(target).__name__}")
