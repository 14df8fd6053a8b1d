"""Evaluation in slices: a model that is evaluated layer by layer leaves room for another beside it."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

# A context variable: each thread has its own, and the same model may serve on two.
_in_slices = contextvars.ContextVar("in_slices", default=False)


@contextmanager
def evaluate_in_slices(wanted: bool) -> Iterator[None]:
    """Say, for this thread, whether layers evaluate what they return, of models for which `evaluating_layers` is on."""
    reset = _in_slices.set(wanted)
    try:
        yield
    finally:
        _in_slices.reset(reset)


@contextmanager
def evaluating_layers(model: Module) -> Iterator[None]:
    """Make the model's layers evaluate what they return, while `_in_slices` says so.

    MLX's scheduler counts the active tasks of the whole process and stalls every evaluating thread above
    ten. A target that is evaluated in one go keeps the count there, and a small drafter beside it runs
    three times slower. Evaluated layer by layer, it leaves room and is itself no slower.

    A layer gets a class of its own, made from its class; its attributes and parameters stay in place.
    """
    layers = [
        layer
        for layer in getattr(model, "layers", ())
        # A model that is target and drafter in one has them already.
        if isinstance(layer, Module) and not type(layer).__name__.startswith(_SLICED)
    ]
    before = [type(layer) for layer in layers]
    sliced: dict[type, type] = {}
    for layer in layers:
        layer.__class__ = sliced.setdefault(type(layer), _evaluating_class(type(layer)))
    try:
        yield
    finally:
        for layer, own_class in zip(layers, before, strict=True):
            layer.__class__ = own_class


_SLICED = "Sliced"


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        out = base.__call__(self, *args, **kwargs)
        if _in_slices.get():
            mx.eval(out)
        return out

    return type(_SLICED + base.__name__, (base,), {"__call__": call})
