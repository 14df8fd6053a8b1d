"""Layer evaluation: a model that is evaluated layer by layer leaves processor time for another model beside it."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

# A context variable has a value of its own in each thread, and two threads may use the same model.
_evaluates_layers = contextvars.ContextVar("evaluates_layers", default=False)


@contextmanager
def evaluate_in_slices(wanted: bool) -> Iterator[None]:
    """Have layers evaluate their results in this thread, or not, while in force.

    This concerns the layers of models for which `evaluating_layers` is in force.
    """
    reset = _evaluates_layers.set(wanted)
    try:
        yield
    finally:
        _evaluates_layers.reset(reset)


@contextmanager
def evaluating_layers(model: Module) -> Iterator[None]:
    """While in force, make the model's layers able to evaluate their results; see `evaluate_in_slices`.

    MLX's scheduler counts the active tasks of the whole process, and above ten it stalls every thread that evaluates. A
    target that is evaluated in one go keeps the count there, and a small drafter beside it runs three times slower.
    Evaluated layer by layer, the target leaves time for the drafter, and is itself no slower.

    Each layer's class is replaced by a subclass; the layer's attributes and parameters stay in place.
    """
    layers = [
        layer
        for layer in getattr(model, "layers", ())
        # The layers of a model that is both target and drafter are replaced already.
        if isinstance(layer, Module) and not type(layer).__name__.startswith(_SLICED)
    ]
    own_classes = [type(layer) for layer in layers]
    subclasses: dict[type, type] = {}
    for layer in layers:
        layer.__class__ = subclasses.setdefault(type(layer), _evaluating_class(type(layer)))
    try:
        yield
    finally:
        for layer, own_class in zip(layers, own_classes, strict=True):
            layer.__class__ = own_class


_SLICED = "Sliced"


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        out = base.__call__(self, *args, **kwargs)
        if _evaluates_layers.get():
            mx.eval(out)
        return out

    return type(_SLICED + base.__name__, (base,), {"__call__": call})
