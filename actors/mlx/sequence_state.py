"""What a line holds, for files: as tensors, and as JSON that says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import mlx.core as mx

from actors.mlx.cache_state import LayerState, MisfitError, State
from actors.tensor import Tensor

# Layers are lists of caches, and states are tuples of tuples: this deep and no deeper.
_MAX_DEPTH = 8


@attrs.frozen
class PrefixCheckpointState:
    """What a line's layers held when it had processed `length` tokens."""

    length: int
    layers: tuple[LayerState, ...]


@attrs.frozen
class SequenceState:
    """What a line holds.

    Attributes:
        tokens: that it has processed, in order.
        layers: one for each of its caches, in order.
        pins: lengths below, ascending, to which it can go back.
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]
    prefix_checkpoints: tuple[PrefixCheckpointState, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of tokens with which another text could begin, whatever its caches."""
        return (*(pin.length for pin in self.prefix_checkpoints), len(self.tokens))


@attrs.frozen
class SequenceRecord:
    """A line's state as a file has it.

    Attributes:
        description: for JSON; names tensors.
        tensors: by name, which the description uses.
    """

    description: Any
    tensors: Mapping[str, Tensor]


def record(sequence: SequenceState, name: str) -> SequenceRecord:
    """A line's state for a file; on the line's own thread.

    Args:
        line: whose state.
        name: with which the tensors' names begin.
    """
    tensors: dict[str, Tensor] = {}

    def add(array: mx.array) -> dict[str, str]:
        key = f"{name}.{len(tensors)}"
        tensors[key] = Tensor.of(array)
        return {"tensor": key}

    def tree(state: State) -> Any:
        if isinstance(state, (tuple, list)):
            return [tree(part) for part in state]
        return add(state) if isinstance(state, mx.array) else state

    def layer(taken: LayerState) -> Any:
        if taken.parts:
            return {"kind": taken.kind, "parts": [layer(part) for part in taken.parts]}
        return {"kind": taken.kind, "state": tree(taken.state)}

    description = {
        "tokens": add(mx.array(sequence.tokens, mx.uint32)),
        "layers": [layer(taken) for taken in sequence.layers],
        "pins": [
            {"length": pin.length, "layers": [layer(taken) for taken in pin.layers]}
            for pin in sequence.prefix_checkpoints
        ],
    }
    return SequenceRecord(description, tensors)


def recall(recorded: SequenceRecord) -> SequenceState:
    """A line's state from a file; on the thread of the model that it is for.

    Raises: MisfitError: this is no description of one.
    """

    def array(described: Any) -> mx.array:
        match described:
            case {"tensor": str(key)} if len(described) == 1 and key in recorded.tensors:
                return recorded.tensors[key].array()
        raise MisfitError("it names a tensor that is not there")

    def tree(described: Any, depth: int) -> State:
        if isinstance(described, list) and depth < _MAX_DEPTH:
            return tuple(tree(part, depth + 1) for part in described)
        return array(described) if isinstance(described, dict) else _checked(described, int | None)

    def layer(described: Any, depth: int = 0) -> LayerState:
        match described:
            case {"kind": str(kind), "parts": list(parts)} if depth < _MAX_DEPTH:
                return LayerState(kind, parts=tuple(layer(part, depth + 1) for part in parts))
            case {"kind": str(kind), "state": list(state)}:
                return LayerState(kind, tree(state, 0))
        raise MisfitError("it describes a layer otherwise than it should")

    def prefix_checkpoint(described: Any) -> PrefixCheckpointState:
        match described:
            case {"length": int(length), "layers": list(layers)}:
                return PrefixCheckpointState(length, tuple(layer(one) for one in layers))
        raise MisfitError("it describes a pin otherwise than it should")

    match recorded.description:
        case {"tokens": dict(tokens), "layers": list(layers), "pins": list(prefix_checkpoints)}:
            ids = array(tokens)
            if ids.ndim != 1 or ids.dtype != mx.uint32:
                raise MisfitError("its tokens are no list of ids")
            return SequenceState(
                tuple(cast(list[int], ids.tolist())),
                tuple(layer(one) for one in layers),
                tuple(prefix_checkpoint(one) for one in prefix_checkpoints),
            )
    raise MisfitError("it describes a cache otherwise than it should")


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MisfitError(f"it has a {type(value).__name__} where a number should be")
    return value
