"""A model's fingerprint: what tells it from others, at the price of looking at a little of each of its tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from actors.tensor import Tensor

# Elements of a tensor that are looked at, about.
_SAMPLE_SIZE = 256


@attrs.frozen
class Fingerprint:
    """What a model is told by. Two are equal where caches of the one may be used by the other.

    It tells apart: architectures; configurations; names, shapes and number formats of weights; ways to quantise them;
    and weights that were trained further, merged with others or converted anew, since these differ nearly everywhere,
    and some 256 elements of each tensor are looked at, evenly spread. It does not tell: a change to single elements
    that are not among these; code of the architecture that was changed; and whoever means to deceive.

    Attributes:
        family: its architecture, as its configuration names it.
        num_parameters: elements of its weights; quantised ones count as they are packed.
        configuration: SHA-256 of its configuration, in hexadecimal.
        layout: likewise of the names, shapes and number formats of its weights, and how they are quantised.
        weights: likewise of the elements that are looked at.
    """

    family: str
    num_parameters: int
    configuration: str
    layout: str
    weights: str

    def difference(self, other: Fingerprint) -> str | None:
        """What another model has otherwise, in words, or None where it is the same."""
        if self.family != other.family:
            return f"its architecture is {other.family}, not {self.family}"
        if self.num_parameters != other.num_parameters:
            return f"it has {other.num_parameters:,} parameters, not {self.num_parameters:,}"
        if self.layout != other.layout:
            return "its weights have other names, shapes, number formats or quantisation"
        if self.configuration != other.configuration:
            return "its configuration is another"
        return "its weights are others" if self.weights != other.weights else None


def fingerprint(model: Module) -> Fingerprint:
    """The fingerprint of a model; to be called on its own thread.

    Reads a few hundred elements of each tensor, so it takes some milliseconds whatever the model's size.
    """
    # Not `parameters`, which leaves out what begins with an underscore: the frequencies of a rotary embedding do.
    leaves = cast(list[tuple[str, Any]], tree_flatten(dict(model)))
    arrays = [(name, leaf) for name, leaf in leaves if isinstance(leaf, mx.array)]
    layout = [[name, list(array.shape), str(array.dtype)] for name, array in arrays]
    quantised = [
        [name, *(getattr(part, what, None) for what in ("group_size", "bits", "mode"))]
        for name, part in model.named_modules()
        if hasattr(part, "group_size") and hasattr(part, "bits")
    ]
    return Fingerprint(
        family=str(getattr(getattr(model, "args", None), "model_type", type(model).__qualname__)),
        num_parameters=sum(array.size for _, array in arrays),
        configuration=_digest(_configuration(model)),
        layout=_digest([sorted(layout), sorted(quantised)]),
        weights=_weights(sorted(arrays, key=lambda pair: pair[0])),
    )


def vocabulary_digest(vocabulary: dict[str, int]) -> str:
    """SHA-256, in hexadecimal, of what a tokenizer means by its ids."""
    return _digest(sorted(vocabulary.items()))


def _configuration(model: Module) -> Any:
    args = getattr(model, "args", None)
    values = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else None
    return [type(model).__qualname__, values]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _weights(arrays: list[tuple[str, mx.array]]) -> str:
    samples = [_sample(array) for _, array in arrays]
    mx.eval(samples)  # at once, which is cheaper
    digest = hashlib.sha256()
    for (name, _), sample in zip(arrays, samples, strict=True):
        digest.update(name.encode() + b"\0")
        digest.update(Tensor.of(sample).data)
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """A few elements, evenly spread along each axis. A slice, so that no more than they is read."""
    if array.ndim == 0:
        return array
    per_axis = max(2, round(_SAMPLE_SIZE ** (1 / array.ndim)))
    return mx.contiguous(array[tuple(slice(None, None, max(1, -(-n // per_axis))) for n in array.shape)])
