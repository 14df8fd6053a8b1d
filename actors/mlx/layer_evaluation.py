"""Layer evaluation: a model that is evaluated layer by layer leaves time for another model beside it."""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, deque
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

    Each layer's class is replaced by a subclass, as long as anybody uses the model; the layer's attributes and
    parameters stay in place. Any thread may enter and leave.
    """
    layers = [layer for layer in getattr(model, "layers", ()) if isinstance(layer, Module)]
    subclasses: dict[type, type] = {}
    with _lock:
        for layer in layers:
            if _num_users[id(layer)] == 0:
                layer.__class__ = subclasses.setdefault(type(layer), _evaluating_class(type(layer)))
            _num_users[id(layer)] += 1
    try:
        yield
    finally:
        with _lock:
            for layer in layers:
                _num_users[id(layer)] -= 1
                if _num_users[id(layer)] == 0:
                    del _num_users[id(layer)]
                    layer.__class__ = type(layer).__bases__[0]


# A model may be target and drafter of one runtime, or belong to several runtimes, each with a thread of its own. By the
# id of each layer, which its users keep alive.
_num_users = Counter[int]()
_lock = threading.Lock()


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        if (on_layer := _on_layer.get()) is not None:
            on_layer(result)
        if (observer := _observer.get()) is not None:
            # The first argument, by whatever name.
            observer(self, args[0] if args else next(iter(kwargs.values()), None), result)
        return result

    return type("Evaluating" + base.__name__, (base,), {"__call__": call})
