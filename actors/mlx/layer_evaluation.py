"""Layer evaluation: a model that is evaluated layer by layer leaves time for another model beside it."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class LayerEvaluation(Enum):
    """When the layers of a pass are evaluated, while another model may work.

    MLX's scheduler counts the active tasks of the whole process: on a CPU bundles of operations, on a GPU the command
    buffers (Metal) or graphs (CUDA) that were committed because they were full. Above ten, each thread that evaluates
    waits after every operation until a task is done, and on a GPU it commits each operation alone. A target that is
    evaluated in one go keeps the count there, and a small drafter beside it becomes three times slower on a CPU.
    """

    WHOLE = "whole"
    """The pass in one go. The default on GPUs, where larger command buffers keep the count low; see
    `runtime.loading.mlx_environment`."""

    WAITING = "waiting"
    """Layer by layer, each waited for. The default on CPUs, where it makes the target itself no slower."""

    PIPELINED = "pipelined"
    """Layer by layer, with at most `MAX_LAYERS_IN_FLIGHT` submitted and not done, so that a GPU never runs dry."""


# Enough that the device does not wait for the next layer to be submitted. What `mx.async_eval` commits at its end is no
# task; only the buffers that a layer fills are: hardly one, with the sizes of `runtime.loading.mlx_environment`.
MAX_LAYERS_IN_FLIGHT = 3

OnLayer = Callable[[Any], None]
# Called with a layer, what entered it, and its result.
Observer = Callable[[Module, Any, Any], None]

# What a layer does with its result; None for nothing. A context variable has a value of its own in each thread, and two
# threads may use the same model.
_on_layer = contextvars.ContextVar[OnLayer | None]("on_layer", default=None)
_observer = contextvars.ContextVar[Observer | None]("observer", default=None)


class _Pipeline:
    """Submits the result of each layer, and waits for that of an earlier one."""

    def __init__(self) -> None:
        self._in_flight: deque[Any] = deque()

    def __call__(self, result: Any) -> None:
        mx.async_eval(result)
        self._in_flight.append(result)
        if len(self._in_flight) > MAX_LAYERS_IN_FLIGHT - 1:
            mx.eval(self._in_flight.popleft())


def _new_on_layer(evaluation: LayerEvaluation) -> OnLayer | None:
    match evaluation:
        case LayerEvaluation.WHOLE:
            return None
        case LayerEvaluation.WAITING:
            return mx.eval
        case LayerEvaluation.PIPELINED:
            return _Pipeline()


@contextmanager
def evaluating(evaluation: LayerEvaluation) -> Iterator[None]:
    """Say when the layers of one pass are evaluated in this thread, while in force.

    This concerns the layers of models for which `evaluating_layers` is in force.
    """
    reset = _on_layer.set(_new_on_layer(evaluation))
    try:
        yield
    finally:
        _on_layer.reset(reset)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell an observer of each layer that this thread runs, while in force.

    This concerns the layers of models for which `evaluating_layers` is in force.
    """
    reset = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(reset)


@contextmanager
def evaluating_layers(model: Module) -> Iterator[None]:
    """While in force, make the model's layers able to evaluate their results and to be observed; see `evaluating` and
    `observing`.

    Each layer's class is replaced by a subclass; the layer's attributes and parameters stay in place.
    """
    layers = [
        layer
        for layer in getattr(model, "layers", ())
        # The layers of a model that is both target and drafter are replaced already.
        if isinstance(layer, Module) and not type(layer).__name__.startswith(_EVALUATING)
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


_EVALUATING = "Evaluating"


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        if (on_layer := _on_layer.get()) is not None:
            on_layer(result)
        if (observer := _observer.get()) is not None:
            # The first argument, by whatever name.
            observer(self, args[0] if args else next(iter(kwargs.values()), None), result)
        return result

    return type(_EVALUATING + base.__name__, (base,), {"__call__": call})
