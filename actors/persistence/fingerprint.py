"""The fingerprint of a model: identifies it by its configuration and a small sample of each of its tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from protocol.tensor import Tensor

_SAMPLE_SIZE = 256  # elements of each tensor, approximately


@attrs.frozen
class Fingerprint:
    """Identifies a model. If the fingerprints of two models are equal, one may use the other's caches.

    They differ with the architecture, the configuration, the layout of weights, an adapter, and further training. A
    change to single elements outside the sample, changed code, and a forgery do not show.
    """

    family: str
    num_parameters: int  # elements of the weights; quantised weights count as they are packed
    # SHA-256, in hexadecimal.
    configuration: str
    layout: str  # of names, shapes, number formats and quantisation
    weights: str  # of the sampled elements

    def difference(self, other: Fingerprint) -> str | None:
        """How another model differs, as a clause for a message; None if it is the same model."""
        if self.family != other.family:
            return f"its architecture is {other.family}, not {self.family}"
        if self.num_parameters != other.num_parameters:
            return f"it has {other.num_parameters:,} parameters, not {self.num_parameters:,}"
        if self.layout != other.layout:
            return "its weights have other names, shapes, number formats or quantisation"
        if self.configuration != other.configuration:
            return "its configuration differs"
        return "its weights differ" if self.weights != other.weights else None


def fingerprint(model: Module, others: Sequence[mx.array] = (), beside: Any = None) -> Fingerprint:
    """The fingerprint of a model and `others`, made on its thread in milliseconds; caches depend on `beside`, too."""
    # `parameters` would leave out names that begin with an underscore, such as the frequencies of a rotary embedding.
    leaves = cast(list[tuple[str, Any]], tree_flatten(dict(model)))
    leaves += [(f"others.{i}", array) for i, array in enumerate(others)]
    arrays = [(name, leaf) for name, leaf in leaves if isinstance(leaf, mx.array)]
    layout = [[name, list(array.shape), str(array.dtype)] for name, array in arrays]
    quantised = [
        [name, *(getattr(module, attribute, None) for attribute in ("group_size", "bits", "mode"))]
        for name, module in model.named_modules()
        if hasattr(module, "group_size") and hasattr(module, "bits")
    ]
    return Fingerprint(
        family=str(getattr(getattr(model, "args", None), "model_type", type(model).__qualname__)),
        num_parameters=sum(array.size for _, array in arrays),
        configuration=_digest(_configuration(model) if beside is None else [_configuration(model), beside]),
        layout=_digest([sorted(layout), sorted(quantised)]),
        weights=_weights_digest(sorted(arrays, key=lambda pair: pair[0])),
    )


def vocabulary_digest(vocabulary: dict[str, int]) -> str:
    """SHA-256, in hexadecimal, of a tokenizer's vocabulary: from tokens to their ids."""
    return _digest(sorted(vocabulary.items()))


def _configuration(model: Module) -> Any:
    args = getattr(model, "args", None)
    values = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else None
    config: Any = getattr(model, "config", None)
    if attrs.has(type(config)):  # of a trained drafter
        values = attrs.asdict(config)
    # How strong an adapter is, and whether activations are quantised. Plain models keep the fingerprints they had.
    applied = [
        [name, type(module).__name__, getattr(module, "scale", None)]
        for name, module in model.named_modules()
        if "lora_a" in module or type(module).__name__ == "QQLinear"
    ]
    return [type(model).__qualname__, values, *([sorted(applied)] if applied else [])]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _weights_digest(arrays: list[tuple[str, mx.array]]) -> str:
    samples = [_sample(array) for _, array in arrays]
    mx.eval(samples)  # all together, which is cheaper than one by one
    digest = hashlib.sha256()
    for (name, _), sample in zip(arrays, samples, strict=True):
        digest.update(name.encode() + b"\0")
        digest.update(Tensor.of(sample).data)
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """About `_SAMPLE_SIZE` elements, evenly spread along each axis. A slice, so that only these are read."""
    if array.ndim == 0:
        return array
    per_axis = max(2, round(_SAMPLE_SIZE ** (1 / array.ndim)))
    return mx.contiguous(array[tuple(slice(None, None, max(1, -(-n // per_axis))) for n in array.shape)])
