"""The pool of a server's models: loads them for the first request, and unloads those that are not in use.

Models are loaded one after the other: MLX compiles kernels when a model first runs, which two threads must not do at
once on CUDA, and the memory that one model takes must be known before the next is admitted.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Literal

import attrs
import trio

from protocol.errors import RuntimeBrokenError
from protocol.open_options import AUTO_TURNS
from runtime.engine.nursery import BackgroundNursery
from runtime.loading.model_files import defaults_message
from runtime.server.errors import ModelLoadError
from runtime.server.models.loaded_model import LoadedModel, OpenModel, tokenizer_of
from runtime.server.models.served_model import ServedModel

ModelState = Literal["loaded", "loading", "unloaded"]


@attrs.define(eq=False)
class ModelSlot:
    """The place of a model in the pool."""

    spec: ServedModel
    instance: _Instance | None = None  # takes its requests; None if none has asked for it since it was unloaded
    num_loads: int = 0
    num_failed_loads: int = 0
    has_chat_template: bool | None = None  # None before its first load
    context_length: int | None = None  # likewise

    @property
    def state(self) -> ModelState:
        """Whether the model is in memory; "loading" also while it waits for its load to begin."""
        return "unloaded" if self.instance is None else "loading" if self.instance.model is None else "loaded"

    @property
    def num_waiting(self) -> int:
        """Requests that wait until the model is loaded."""
        return 0 if self.instance is None or self.instance.model is not None else self.instance.num_users


@attrs.define(eq=False)
class _Instance:
    """A model that is in memory, or will be for the requests that wait for it."""

    slot: ModelSlot
    num_users: int = 0  # requests that use it or wait for it; it is not unloaded before they have ended
    used_at: int = 0  # the number of its last use, counted over the uses of all models
    has_begun: bool = False  # whether its load is under way, so that it will be finished
    is_ready: trio.Event = attrs.field(factory=trio.Event)  # set once `model` or `error` is
    model: LoadedModel | None = None
    error: Exception | None = None
    is_leaving: bool = False  # whether it takes no further requests, and is unloaded after the last one
    is_over: bool = False  # whether it is being unloaded
    changed: trio.Event = attrs.field(factory=trio.Event)  # set when one of the above changes


@attrs.define(eq=False)
class ModelPool:
    """The models of a server; made by `model_pool`.

    A model is in memory from the first request that asks for it until it has been idle for its `idle_s`, its target
    fails, or another model needs the memory: if all are at work then, the least recently used one takes no new requests
    and is unloaded after its current ones, which are never ended for another model. New requests wait for its next
    load. So two models of which only one fits take turns.
    """

    _slots: dict[str, ModelSlot]
    _open_model: OpenModel
    _nursery: trio.Nursery
    _memory_limit: int | None
    _used_bytes: Callable[[], int]
    _free_memory: Callable[[Callable[[], object]], Awaitable[None]] | None
    _announce: Callable[[str], None]
    _queue: deque[_Instance] = attrs.field(factory=deque)
    _instances: list[_Instance] = attrs.field(factory=list)  # loaded, also those that are leaving
    _num_freeing: int = 0  # unloaded models whose memory is not free yet
    _uses: Iterator[int] = attrs.field(factory=count)
    _changed: trio.Event = attrs.field(factory=trio.Event)
    _is_broken: trio.Event = attrs.field(factory=trio.Event)
    _failure: RuntimeBrokenError | None = None
    # Called with each model that nobody uses any more, before it is unloaded.
    on_unloading: Callable[[LoadedModel], None] = lambda _: None

    # --- what there is ----------------------------------------------------------------------------

    @property
    def specs(self) -> list[ServedModel]:
        """The models, loaded or not. The first one is for requests that name none."""
        return [slot.spec for slot in self._slots.values()]

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> ModelSlot:
        return self._slots[name]

    def in_memory(self, name: str | None = None) -> list[LoadedModel]:
        """The models that are in memory, or one of them, including those that take no further requests."""
        loaded = [each.model for each in self._instances if each.model is not None and not each.is_over]
        return [model for model in loaded if name in (None, model.name)]

    @property
    def max_streams(self) -> float:
        """Streams that a model works on at once: the largest bound of those in memory; infinite if one has none."""
        each = [model.runtime.max_streams for model in self.in_memory()]
        return max((math.inf if most is None else most for most in each), default=AUTO_TURNS)

    async def wait_broken(self) -> RuntimeBrokenError:
        """Wait until the target of a pinned model has failed. Returns the error of its streams."""
        await self._is_broken.wait()
        assert self._failure is not None
        return self._failure

    # --- use --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LoadedModel]:
        """A model for a request, loaded if it is not. It stays in memory until the block is left.

        Raises: ModelLoadError: it cannot be loaded; its next request tries again.

        Cancellation: stops waiting. A load that has begun is finished; one that nobody else waits for is forgotten.
        """
        slot = self._slots[name]
        if (instance := slot.instance) is None:
            instance = slot.instance = _Instance(slot)
            self._queue.append(instance)
            self._changed.set()
        instance.num_users += 1
        try:
            if instance.model is None:
                await instance.is_ready.wait()
            if instance.error is not None:
                raise ModelLoadError(f"model {name!r} cannot be loaded: {instance.error}") from instance.error
            assert instance.model is not None
            yield instance.model
        finally:
            instance.num_users -= 1
            instance.used_at = next(self._uses)
            if instance.num_users == 0 and not instance.has_begun:
                self._queue.remove(instance)
                slot.instance = None
            instance.changed.set()
            self._changed.set()

    # --- loading and unloading --------------------------------------------------------------------

    async def _manage(self) -> None:
        """Begin the waiting loads, one after the other, and enforce the memory limit; never returns."""
        while True:
            self._changed = trio.Event()
            num_bytes = self._queue[0].slot.spec.num_bytes if self._queue else 0
            if self._has_room(num_bytes, for_load=bool(self._queue)) and self._queue:
                self._queue[0].has_begun = True
                await self._nursery.start(self._keep, self._queue.popleft())
            else:
                await self._changed.wait()

    def _has_room(self, num_bytes: int, *, for_load: bool) -> bool:
        """Whether `num_bytes` more are within the memory limit. If not, the next model that can be spared is dismissed.

        For a load, any model that is not pinned can be spared, idle ones first; without a load, only an idle one that
        is not the last one used. If none can, there is room: the limit is not for other memory of the process. A load
        that exceeds the limit by itself needs no room: it will be refused.
        """
        limit = self._memory_limit
        if limit is None or num_bytes > limit or self._used_bytes() + num_bytes <= limit:
            return True
        if self._num_freeing > 0 or any(each.is_leaving for each in self._instances):
            return False
        by_use = sorted(self._instances, key=lambda each: each.used_at)
        spare = [each for each in (by_use if for_load else by_use[:-1]) if not each.slot.spec.is_pinned]
        idle = [each for each in spare if each.num_users == 0]
        if chosen := idle or (spare if for_load else []):
            self._dismiss(chosen[0])
            return False
        return True

    def _dismiss(self, instance: _Instance) -> None:
        instance.is_leaving = True
        if instance.slot.instance is instance:
            instance.slot.instance = None
        instance.changed.set()

    async def _keep(self, instance: _Instance, *, task_status: trio.TaskStatus[None]) -> None:
        """Load a model, keep it, and free its memory in the end; has "started" once the load has ended or failed."""
        name = instance.slot.spec.name
        self._announce(f"loading model {name}")
        unloaded = await self._keep_loaded(instance, task_status)
        self._num_freeing += 1
        if self._free_memory is not None:
            await self._free_memory(unloaded or (lambda: None))
        self._num_freeing -= 1
        if unloaded is not None:
            self._announce(f"model {name} is unloaded")
        self._changed.set()

    async def _keep_loaded(
        self, instance: _Instance, task_status: trio.TaskStatus[None]
    ) -> weakref.ref[LoadedModel] | None:
        """Returns a reference to the model that was unloaded; None if it could not be loaded."""
        slot = instance.slot
        try:
            if self._memory_limit is not None and slot.spec.num_bytes > self._memory_limit:
                raise ModelLoadError(
                    f"its files have {slot.spec.num_bytes:,} bytes, and --memory-limit is {self._memory_limit:,}; "
                    "raise it, or use a smaller or quantised model"
                )
            async with self._open_model(slot.spec) as model:
                instance.model, instance.used_at = model, next(self._uses)
                self._instances.append(instance)
                slot.has_chat_template = bool(tokenizer_of(model.runtime).has_chat_template)
                slot.context_length = model.runtime.context_length
                slot.num_loads += 1
                instance.is_ready.set()
                task_status.started()
                if message := defaults_message(slot.spec.name, model.runtime.model_defaults, slot.spec.settings):
                    self._announce(message)
                await self._until_dismissed(instance, model)
                instance.is_over = True
                self.on_unloading(model)
        except Exception as error:  # of any kind: the failure of one model must not affect the others
            if instance.model is not None:
                raise
            slot.num_failed_loads += 1
            slot.instance, instance.error = None, error
            instance.is_ready.set()
            task_status.started()
            self._announce(f"model {slot.spec.name} cannot be loaded: {error}")
        finally:
            if instance.model is not None:
                self._instances.remove(instance)
        unloaded, instance.model = instance.model, None
        return None if unloaded is None else weakref.ref(unloaded)

    async def _until_dismissed(self, instance: _Instance, model: LoadedModel) -> None:
        async def dismiss_if_broken() -> None:
            failure = await model.runtime.wait_broken()
            if model.spec.is_pinned:
                self._failure = failure
                self._is_broken.set()
            else:
                self._announce(f"model {model.name} has failed; its next request loads it again")
                self._dismiss(instance)

        idle_s = math.inf if model.spec.idle_s is None else model.spec.idle_s
        async with BackgroundNursery() as nursery:
            nursery.start_soon(dismiss_if_broken)
            while instance.num_users > 0 or not instance.is_leaving:
                instance.changed = trio.Event()
                with trio.move_on_after(idle_s if instance.num_users == 0 else math.inf) as waiting:
                    await instance.changed.wait()
                if waiting.cancelled_caught and instance.num_users == 0:
                    self._dismiss(instance)


@asynccontextmanager
async def model_pool(
    specs: Iterable[ServedModel],
    open_model: OpenModel,
    *,
    memory_limit: int | None = None,
    used_bytes: Callable[[], int] = lambda: 0,
    free_memory: Callable[[Callable[[], object]], Awaitable[None]] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[ModelPool]:
    """A pool of models, at least one and none of them loaded; all are unloaded when the block is left.

    Args:
        memory_limit: bytes that models may take, caches included; None for no limit. Before a load, models are unloaded
            to make room for the new one's files; after a request, idle ones are unloaded if caches have outgrown it.
        free_memory: called with a weak reference to a model that was unloaded, so that `used_bytes` does not count it.
        announce: called with a line for each load and its outcome.

    Cancellation: like leaving the block: waits for the load that is running, and for the models' forward passes.
    """
    async with BackgroundNursery() as nursery:
        slots = {spec.name: ModelSlot(spec) for spec in specs}
        pool = ModelPool(slots, open_model, nursery, memory_limit, used_bytes, free_memory, announce)
        nursery.start_soon(pool._manage)
        yield pool
