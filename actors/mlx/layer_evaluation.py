"""Layer evaluation: a model that is evaluated layer by layer leaves time for another model beside it."""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.workers.core_sharing import CORES


class LayerEvaluation(Enum):
    """When the layers of a pass are evaluated, while another model may work.

    MLX's scheduler counts the active tasks of the process: bundles of operations on a CPU, full command buffers (Metal)
    or graphs (CUDA) on a GPU. Above ten, each thread that evaluates waits after every operation, and a GPU's commits
    each alone. A target that is evaluated in one go keeps the count there: on a CPU, a small drafter beside it becomes
    three times slower.
    """

    WHOLE = "whole"
    """The pass in one go. The default on GPUs, where larger command buffers keep the count low; see
    `runtime.loading.mlx_environment`."""

    WAITING = "waiting"
    """As `PIPELINED`, but each layer is waited for while another model computes. The default on CPUs: alone, a pass
    takes 0.93 to 1.05 of the time that it takes in one go, since layers are computed while Python builds the next ones;
    if each layer of such a pass was waited for, 1.05 to 1.17."""

    PIPELINED = "pipelined"
    """Layer by layer, with at most `MAX_LAYERS_IN_FLIGHT` submitted and not done, so that a GPU never runs dry."""


# Enough that the device does not wait for the next layer. What `mx.async_eval` commits at its end does not count as a
# task. Only buffers that a layer fills do: hardly one a layer, with the sizes of `runtime.loading.mlx_environment`.
MAX_LAYERS_IN_FLIGHT = 3

T = TypeVar("T")
OnLayer = Callable[[Any], None]
Observer = Callable[[Module, Any, Any], None]  # called with a layer, what entered it, and its result

# What a layer does with its result; None for nothing. A context variable has a value of its own in each thread, and two
# threads may use the same model.
_on_layer = contextvars.ContextVar[OnLayer | None]("on_layer", default=None)
_observer = contextvars.ContextVar[Observer | None]("observer", default=None)
_hands_on_last = contextvars.ContextVar[bool]("hands_on_last", default=False)
# Of this pass: whether its last layer has run. Some models run their layers several times.
_last_has_run = contextvars.ContextVar[bool | None]("last_has_run", default=None)


def _pipeline(*, waits_alongside_model: bool) -> OnLayer:
    in_flight: deque[Any] = deque()

    def submit(result: Any) -> None:
        CORES.update()
        mx.async_eval(result)
        in_flight.append(result)
        max_unfinished = 0 if waits_alongside_model and CORES.num_computing > 1 else MAX_LAYERS_IN_FLIGHT - 1
        while len(in_flight) > max_unfinished:
            mx.eval(in_flight.popleft())

    return submit


@contextmanager
def evaluating(evaluation: LayerEvaluation) -> Iterator[None]:
    """While in force, for one pass, set when this thread evaluates its layers; see `evaluating_layers`."""
    on_layer: OnLayer | None = None
    if evaluation is not LayerEvaluation.WHOLE:
        on_layer = _pipeline(waits_alongside_model=evaluation is LayerEvaluation.WAITING)
    with _set(_on_layer, on_layer), _set(_last_has_run, False):
        yield


def observing(observer: Observer) -> AbstractContextManager[None]:
    """While in force, tell an observer of each layer that this thread runs; see `evaluating_layers`."""
    return _set(_observer, observer)


def handing_on_last() -> AbstractContextManager[None]:
    """While in force, compute only the last position's logits. Only for a model of which `hands_on_rows` is true."""
    return _set(_hands_on_last, True)


def hands_on_rows(model: Module) -> bool:
    """Whether the last layer ran once in the last pass, and gave a (B, tokens, width) array; asked between passes."""
    layers = list(getattr(model, "layers", ()))
    return bool(layers) and getattr(type(layers[-1]), "hands_on_rows", False)


@contextmanager
def _set(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def evaluating_layers(model: Module) -> Iterator[None]:
    """While in force, let the model's layers evaluate their results and be observed; see `evaluating` and `observing`.

    Each layer's class is replaced by a subclass meanwhile. Any thread may enter and leave. The last layer does not
    evaluate its result, which is evaluated with the logits, or not at all where a prompt is read.
    """
    layers = [layer for layer in getattr(model, "layers", ()) if isinstance(layer, Module)]
    subclasses: dict[tuple[type, bool], type] = {}
    with _lock:
        for layer in layers:
            if _num_users[id(layer)] == 0:
                kind = type(layer), layer is not layers[-1]
                layer.__class__ = subclasses.setdefault(kind, _evaluating_class(*kind))
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


# By the id of each layer. A model may be target and drafter of one runtime, or belong to several, on several threads.
_num_users = Counter[int]()
_lock = threading.Lock()


def _evaluating_class(base: type, evaluates: bool) -> type:
    # Only the last layer does not evaluate.
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        if evaluates and (on_layer := _on_layer.get()) is not None:
            on_layer(result)
        if (observer := _observer.get()) is not None:
            # The first argument, by whatever name.
            observer(self, args[0] if args else next(iter(kwargs.values()), None), result)
        if not evaluates:
            if _hands_on_last.get():
                return result[:, -1:]
            if (has_run := _last_has_run.get()) is not None:
                _last_has_run.set(True)
                is_handed_on = not has_run and isinstance(result, mx.array) and result.ndim == 3
                if of_layer.hands_on_rows != is_handed_on:  # to set it anew costs Python its cached lookups
                    of_layer.hands_on_rows = is_handed_on
        return result

    of_layer: Any = type("Evaluating" + base.__name__, (base,), {"__call__": call, "hands_on_rows": False})
    return of_layer  # type: ignore[no-any-return]
