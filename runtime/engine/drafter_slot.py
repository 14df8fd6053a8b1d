"""The drafter slot of a runtime: a drafter is attached and detached while the runtime is open."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Literal

import attrs
import trio

from actors.drafters.draft_actor import DraftActor
from actors.drafters.lookup_actor import LookupActor
from actors.model import Model
from actors.remote.remote_drafter import LoadedElsewhere, RemoteDrafter
from actors.target.target_actor import TargetActor
from actors.workers.worker import Worker
from protocol.errors import DrafterAttachedError
from protocol.messages import Close
from protocol.settings import Settings
from runtime.loading.model_sources import ModelSource

# Seconds by which the running draft step may be overdue before nobody waits for its end any more.
RELEASE_TIMEOUT_S = 1.0

LoadedDrafter = tuple[Model, Worker] | LoadedElsewhere | Literal["ngram"]
DrafterActor = DraftActor | LookupActor | RemoteDrafter
# Loads a drafter, or finds none; resources to release with it go onto the stack.
Load = Callable[[AsyncExitStack, ModelSource], Awaitable[LoadedDrafter | None]]


@attrs.define(eq=False)
class DrafterSlot:
    """The drafter of a runtime, if it has one.

    Each drafter has its own task in the runtime's nursery. The task owns what the drafter needs (actor, worker, model)
    and releases it when it ends: by `detach`, with the runtime, or in the middle of loading.
    """

    _nursery: trio.Nursery
    _target: TargetActor
    _of_grammars: LookupActor  # drafts for streams with a grammar while there is no other drafter
    _make_actor: Callable[[LoadedDrafter], DrafterActor]
    _load: Load | None  # None if the runtime cannot load drafters
    actor: DrafterActor | None = attrs.field(init=False, default=None)  # closing the runtime leaves it in place
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)  # of the actor
    _has_ended: trio.Event = attrs.field(init=False, factory=trio.Event)  # the actor's task
    _is_attaching: bool = attrs.field(init=False, default=False)
    _past_seconds: float = attrs.field(init=False, default=0.0)  # of drafters that were detached
    # Held while a drafter's time moves to `_past_seconds`: another thread may be adding both up.
    _seconds_lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)

    @property
    def busy_seconds(self) -> float:
        """Seconds that drafters have been at work so far; never decreases. May be read in any thread."""
        with self._seconds_lock:
            return self._past_seconds + (0.0 if self.actor is None else self.actor.busy_seconds)

    def drafter_of(self, settings: Settings) -> DrafterActor | None:
        """The drafter of a stream with these settings that begins now; None if nobody drafts for it."""
        if self.actor is not None or not settings.forces_text:
            return self.actor
        if self._target.drafter.mailbox is None:
            of_grammars = self._of_grammars
            self._target.drafter.attach(of_grammars.mailbox, has_model=False, take_messages=of_grammars.take_messages)
        return self._of_grammars

    def close_session(self, message: Close) -> None:
        """End a session at its drafter; nothing happens if it has none."""
        for actor in (self._of_grammars, self.actor):
            if actor is not None:
                actor.close_session(message)

    async def put(self, drafter: LoadedDrafter, resources: AsyncExitStack) -> None:
        """Attach a drafter that is loaded already, with the resources to release with it."""

        async def get(stack: AsyncExitStack) -> LoadedDrafter:
            await stack.enter_async_context(resources.pop_all())
            return drafter

        await self._nursery.start(self._serve, get)

    async def attach(self, source: ModelSource) -> None:
        """See `Runtime.attach_draft`."""
        assert self._load is not None, "this runtime was made of loaded models"
        if self.actor is not None or self._is_attaching:
            raise DrafterAttachedError(
                "this runtime has a drafter already, or is loading one; call detach_draft() first"
            )
        self._is_attaching, load = True, self._load
        try:
            await self._nursery.start(self._serve, lambda stack: load(stack, source))
        finally:
            self._is_attaching = False

    async def detach(self) -> None:
        """See `Runtime.detach_draft`."""
        if (actor := self.actor) is None:
            await trio.lowlevel.checkpoint()
            return
        with self._seconds_lock:
            self._past_seconds += actor.busy_seconds
            self.actor = None
        self._target.drafter.detach()
        actor.withdraw_from_all()
        worker, has_ended = (actor.worker if isinstance(actor, DraftActor) else None), self._has_ended
        del actor
        # Not on this stack: the tracebacks of cancelled tasks would keep the caller's streams alive for a while.
        trio.lowlevel.current_trio_token().run_sync_soon(self._scope.cancel)
        while not has_ended.is_set():
            patience_s = RELEASE_TIMEOUT_S - max(0.0, 0.0 if worker is None else worker.overdue_s)
            if patience_s <= 0.0:
                break  # the step hangs, and is given up in the background
            with trio.move_on_after(patience_s):
                await has_ended.wait()

    @trio.lowlevel.enable_ki_protection
    async def _serve(
        self,
        get: Callable[[AsyncExitStack], Awaitable[LoadedDrafter | None]],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        has_ended = trio.Event()
        try:
            async with AsyncExitStack() as stack:
                if (drafter := await get(stack)) is None:
                    task_status.started()
                    return
                actor = self._make_actor(drafter)
                del get, drafter  # and with them the model, once the actor releases it
                async with trio.open_nursery() as nursery:
                    await nursery.start(actor.serve)
                    if isinstance(actor, DraftActor) and (store := actor.prefix_cache.store) is not None:
                        nursery.start_soon(store.run)
                    # If the attaching task is cancelled by now, this task ends here without ever filling the slot.
                    task_status.started()
                    await trio.lowlevel.checkpoint_if_cancelled()
                    self.actor, self._scope, self._has_ended = actor, nursery.cancel_scope, has_ended
                    self._of_grammars.withdraw_from_all()
                    # A drafter in another process leaves this one to the target.
                    self._target.drafter.attach(
                        actor.mailbox,
                        has_model=isinstance(actor, DraftActor),
                        take_messages=None if isinstance(actor, RemoteDrafter) else actor.take_messages,
                    )
        finally:
            has_ended.set()
