"""The state of a sequence for files: as tensors, and a description of them for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import mlx.core as mx

from actors.mlx.cache_state import LayerState, MisfitError, State
from actors.tensor import Tensor

# Most levels of nesting of a layer's caches, and of a cache's state, that are accepted from a file.
_MAX_DEPTH = 8


@attrs.frozen
class PrefixCheckpointState:
    """The state of a sequence's caches when they held `length` tokens."""

    length: int
    layers: tuple[LayerState, ...]


@attrs.frozen
class SequenceState:
    """The state of a sequence.

    Attributes:
        tokens: the cached tokens, in order.
        layers: the states of its caches, in order.
        prefix_checkpoints: states at shorter lengths, ascending, to which the sequence can be rewound.
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]
    prefix_checkpoints: tuple[PrefixCheckpointState, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths at which another text can continue, whatever the classes of the caches; ascending."""
        return (*(checkpoint.length for checkpoint in self.prefix_checkpoints), len(self.tokens))


@attrs.frozen
class SequenceRecord:
    """The state of a sequence as a file has it.

    Attributes:
        description: a value for JSON, which refers to tensors by name.
        tensors: by name.
    """

    description: Any
    tensors: Mapping[str, Tensor]


def record(sequence: SequenceState, name: str) -> SequenceRecord:
    """The state of a sequence, for a file. To be called on the model's thread.

    Args:
        sequence: the state.
        name: prefix of the tensors' names.
    """
    tensors: dict[str, Tensor] = {}

    def add(array: mx.array) -> dict[str, str]:
        key = f"{name}.{len(tensors)}"
        tensors[key] = Tensor.of(array)
        return {"tensor": key}

    def describe(state: State) -> Any:
        if isinstance(state, (tuple, list)):
            return [describe(element) for element in state]
        return add(state) if isinstance(state, mx.array) else state

    def describe_layer(taken: LayerState) -> Any:
        if taken.inner:
            return {"kind": taken.kind, "parts": [describe_layer(inner) for inner in taken.inner]}
        return {"kind": taken.kind, "state": describe(taken.state)}

    description = {
        "tokens": add(mx.array(sequence.tokens, mx.uint32)),
        "layers": [describe_layer(taken) for taken in sequence.layers],
        "pins": [
            {"length": checkpoint.length, "layers": [describe_layer(taken) for taken in checkpoint.layers]}
            for checkpoint in sequence.prefix_checkpoints
        ],
    }
    return SequenceRecord(description, tensors)


def recall(recorded: SequenceRecord) -> SequenceState:
    """The state of a sequence from a file. To be called on the thread of the model that it is for.

    Raises: MisfitError: the description is not one of such a state.
    """

    def array(described: Any) -> mx.array:
        match described:
            case {"tensor": str(key)} if len(described) == 1 and key in recorded.tensors:
                return recorded.tensors[key].array()
        raise MisfitError("it names a tensor that the file does not have")

    def tree(described: Any, depth: int) -> State:
        if isinstance(described, list) and depth < _MAX_DEPTH:
            return tuple(tree(element, depth + 1) for element in described)
        return array(described) if isinstance(described, dict) else _checked(described, int | None)

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

    match recorded.description:
        case {"tokens": dict(tokens), "layers": list(layers), "pins": list(prefix_checkpoints)}:
            ids = array(tokens)
            if ids.ndim != 1 or ids.dtype != mx.uint32:
                raise MisfitError(
                    f"its tokens are a {ids.ndim}-dimensional array of {ids.dtype}, not a list of uint32 ids"
                )
            return SequenceState(
                tuple(cast(list[int], ids.tolist())),
                tuple(layer(one) for one in layers),
                tuple(prefix_checkpoint(one) for one in prefix_checkpoints),
            )
    raise MisfitError("its description lacks tokens, layers or pins")


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MisfitError(f"it has a {type(value).__name__} where a number should be")
    return value
