"""The state of a sequence for files: as tensors, and a description of them for JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol, cast

import attrs
import mlx.core as mx

from actors.mlx.cache_kinds import LayerState, MisfitError, State
from actors.model import ReusableSequence
from protocol.messages import Features
from protocol.tensor import Tensor

_MAX_DEPTH = 8  # the deepest nesting of a layer's caches, and of a cache's state, that is accepted from a file
# A file has the features of at most this many positions, the last ones, so that only its caches grow with the text.
MAX_FEATURES = 256


@attrs.frozen
class PrefixCheckpointState:
    """The state of a sequence's caches when they held `length` tokens."""

    length: int
    layers: tuple[LayerState, ...]


@attrs.frozen
class SequenceState:
    """The state of a sequence."""

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]
    prefix_checkpoints: tuple[PrefixCheckpointState, ...] = ()  # at shorter lengths, ascending
    # The other ranks' parts, from rank 1 on, if the model is sharded; as records if the state comes from a file.
    others: OtherParts | tuple[SequenceRecord, ...] | None = None
    features: Features | None = None  # the target's, with which a trained drafter goes on
    quantized_at: int | None = None  # the length at which the caches were quantised

    def check(self, *, num_layers: int, has_features: bool = False) -> None:
        """Raises: MisfitError: a model in one process, with so many caches, and features or none, cannot have it."""
        if (self.features is not None) != has_features:
            raise MisfitError("it lacks features of the target, or has some where the model keeps none")
        if self.others is not None:
            raise MisfitError("it has the parts of several ranks, and this model is that of one process")
        parts = (self.layers, *(checkpoint.layers for checkpoint in self.prefix_checkpoints))
        if any(len(layers) != num_layers for layers in parts):
            raise MisfitError(f"it has {len(self.layers)} layers where the model has {num_layers}")
        bounds = [0, *(checkpoint.length for checkpoint in self.prefix_checkpoints), len(self.tokens) + 1]
        if any(length >= next_length for length, next_length in pairwise(bounds)):
            raise MisfitError(f"its prefix checkpoints are at {bounds[1:-1]}, and it has {len(self.tokens)} tokens")

    @property
    def is_quantized(self) -> bool:
        """Whether some cache is quantised."""
        return any(layer.is_quantized for layer in self.layers)

    @property
    def all_layers(self) -> list[LayerState]:
        """The states of all caches: now, and then at each prefix checkpoint."""
        return [*self.layers, *(layer for checkpoint in self.prefix_checkpoints for layer in checkpoint.layers)]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths at which another text can continue from a file, ascending."""
        if (features := self.last_features) is not None:
            return tuple(range(min(features.start + 1, len(self.tokens)), len(self.tokens) + 1))
        return (*(checkpoint.length for checkpoint in self.prefix_checkpoints), len(self.tokens))

    @property
    def last_features(self) -> Features | None:
        """Those of the features that go into a file."""
        if (features := self.features) is None:
            return None
        first = max(0, features.values.shape[0] - MAX_FEATURES)
        return Features(features.start + first, features.values[first:])


class StatefulSequence(ReusableSequence):
    """A sequence whose state can be taken, and put into another one of its model."""

    @abstractmethod
    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """The state of the sequence for a file; `tokens` are its cached tokens.

        Returns: the state, without tokens that are to be read again; None if no tokens are left or it cannot be kept.
        Raises: RewindError: some cache holds another number of tokens.
        """

    @abstractmethod
    def put_state(self, state: SequenceState) -> None:
        """Give an empty sequence the state of another one.

        Raises: MisfitError, RewindError: it is of no sequence of this model; this one stays empty.
        """


@attrs.frozen
class SequenceRecord:
    """The state of a sequence, or one rank's part of it without the tokens: a value for JSON, and tensors it names."""

    description: Any
    tensors: Mapping[str, Tensor]


class OtherParts(Protocol):
    """The other ranks' parts of a sequence's state, which they keep for as long as this exists."""

    def copied(self) -> Iterator[tuple[SequenceRecord, ...] | None]:
        """Copy them on the model's thread, one layer a step. Yields None, and in the end the parts, from rank 1 on."""


class StateRecorder:
    """Copies the state of a sequence for a file, on the model's thread; layer by layer, with other work in between."""

    def __init__(self, sequence: SequenceState, name: str, *, rank: int = 0) -> None:
        """Prepare to copy; the tensors' names begin with `name`. Ranks other than 0 copy their part, without tokens."""
        self._sequence = sequence
        self._name = f"{name}{_infix(rank)}" if rank else name
        self._has_tokens = rank == 0
        self._tensors: dict[str, Tensor] = {}
        self._num_tensors = 0
        assert not isinstance(sequence.others, tuple), "a state from a file is recorded once it is put into a sequence"
        self._others = None if sequence.others is None else sequence.others.copied()
        self._waiting = sequence.all_layers
        self._described: list[Any] = []

    def step(self) -> SequenceRecord | None:
        """Copy the next layer. Returns: the record, once all are copied."""
        if len(self._described) < len(self._waiting):
            self._described.append(self._describe_layer(self._waiting[len(self._described)]))
            return None
        others: tuple[SequenceRecord, ...] | None = ()
        if self._others is not None and (others := next(self._others)) is None:
            return None
        described = iter(self._described)
        description: dict[str, Any] = {
            "layers": [next(described) for _ in self._sequence.layers],
            "pins": [
                {"length": checkpoint.length, "layers": [next(described) for _ in checkpoint.layers]}
                for checkpoint in self._sequence.prefix_checkpoints
            ],
        }
        if (features := self._sequence.last_features) is not None:
            description["features"] = {"start": features.start, "values": self._add(features.values)}
        if self._sequence.quantized_at is not None:
            description["quantized_at"] = self._sequence.quantized_at
        if self._has_tokens:
            description["tokens"] = self._add(mx.array(self._sequence.tokens, mx.uint32))
        if others:
            description["ranks"] = [other.description for other in others]
            for other in others:
                self._tensors.update(other.tensors)
        return SequenceRecord(description, self._tensors)

    def pop_tensors(self) -> dict[str, Tensor]:
        """The tensors that were copied since the last call. The record will not have them."""
        popped, self._tensors = self._tensors, {}
        return popped

    def _add(self, array: mx.array) -> dict[str, str]:
        key = f"{self._name}.{self._num_tensors}"
        self._num_tensors += 1
        self._tensors[key] = Tensor.of(array)
        return {"tensor": key}

    def _describe(self, state: State) -> Any:
        if isinstance(state, (tuple, list)):
            return [self._describe(element) for element in state]
        return self._add(state) if isinstance(state, mx.array) else state

    def _describe_layer(self, taken: LayerState) -> Any:
        if taken.inner:
            return {"kind": taken.kind, "parts": [self._describe_layer(inner) for inner in taken.inner]}
        return {"kind": taken.kind, "state": self._describe(taken.state)}


def _infix(rank: int) -> str:
    return f".rank-{rank}"


def recall(recorded: SequenceRecord, tokens: tuple[int, ...] | None = None) -> SequenceState:
    """The state of a sequence, from a record in a file, on the thread of its model. A rank's part takes `tokens`, which
    its record lacks. Raises: MisfitError: the record does not describe such a state.
    """

    def array(described: Any) -> mx.array:
        match described:
            case {"tensor": str(key)} if len(described) == 1 and key in recorded.tensors:
                return recorded.tensors[key].array()
        raise MisfitError("it names a tensor that the file does not have")

    def tree(described: Any, depth: int) -> State:
        if isinstance(described, list) and depth < _MAX_DEPTH:
            return tuple(tree(element, depth + 1) for element in described)
        if isinstance(described, dict):
            return array(described)
        if described is None or type(described) is int:
            return described
        raise MisfitError(f"it has a {type(described).__name__} where a number should be")

    def layer(described: Any, depth: int = 0) -> LayerState:
        match described:
            case {"kind": str(kind), "parts": list(caches)} if depth < _MAX_DEPTH:
                return LayerState(kind, inner=tuple(layer(inner, depth + 1) for inner in caches))
            case {"kind": str(kind), "state": list(state)}:
                return LayerState(kind, tree(state, 0))
        raise MisfitError("its description of a layer has another form than that of a cache's state")

    def prefix_checkpoint(described: Any) -> PrefixCheckpointState:
        match described:
            case {"length": int(length), "layers": list(layers)}:
                return PrefixCheckpointState(length, tuple(layer(one) for one in layers))
        raise MisfitError("its description of a prefix checkpoint lacks a length or layers")

    def cached_tokens(described: Any) -> tuple[int, ...]:
        ids = array(described)
        if ids.ndim != 1 or ids.dtype != mx.uint32:
            raise MisfitError(f"its tokens are a {ids.ndim}-dimensional array of {ids.dtype}, not a list of uint32 ids")
        return tuple(cast(list[int], ids.tolist()))

    def features(described: Any) -> Features | None:
        match described:
            case None:
                return None
            case {"start": int(start), "values": values}:
                return Features(start, array(values))
        raise MisfitError("its description of features lacks a start or values")

    def quantized_at(described: Any) -> int | None:
        if described is not None and not (isinstance(described, int) and described >= 1):
            raise MisfitError("the length at which it was quantised is no number of tokens")
        return described

    match recorded.description:
        case {"layers": list(layers), "pins": list(prefix_checkpoints), **rest} if (
            tokens is not None or "tokens" in rest
        ):
            return SequenceState(
                cached_tokens(rest["tokens"]) if tokens is None else tokens,
                tuple(layer(one) for one in layers),
                tuple(prefix_checkpoint(one) for one in prefix_checkpoints),
                _parts(rest.get("ranks"), recorded.tensors),
                features(rest.get("features")),
                quantized_at(rest.get("quantized_at")),
            )
    raise MisfitError("its description lacks tokens, layers or pins")


def _parts(described: Any, tensors: Mapping[str, Tensor]) -> tuple[SequenceRecord, ...] | None:
    if described is None:
        return None
    if not isinstance(described, list) or not described:
        raise MisfitError("its description has no parts of ranks where they should be")
    return tuple(
        SequenceRecord(part, {name: tensor for name, tensor in tensors.items() if f"{_infix(rank)}." in name})
        for rank, part in enumerate(described, 1)
    )
