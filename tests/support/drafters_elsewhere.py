"""A drafter at the other end of a link in this process: every message goes through its bytes."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from simulated_worker import SimulatedWorker

from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.remote.drafting_end import DraftingEnd
from actors.remote.link import LinkLostError, SocketLink
from actors.remote.remote_drafter import LoadedElsewhere
from actors.workers.worker import Worker
from protocol.drafter_wire import DrafterLoaded
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES


class RecordedLink(SocketLink):
    """One end of a link, and all messages that were sent at it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, "the other end")
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        super().send(data)

    def cut(self) -> None:
        """End the link, as if this process had."""
        self._socket.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def elsewhere(
    model: Any,
    worker: Callable[[DraftingEnd], Worker],
    vocab_size: int,
    *,
    make_policy: MakePolicy = policy_by_settings,
    max_batch: int = MAX_BATCH,
    traces: bool = True,
) -> AsyncIterator[tuple[LoadedElsewhere, RecordedLink, RecordedLink]]:
    """A drafter for `running`, the runtime's end of the link, and the drafter's."""
    near, far = map(RecordedLink, socket.socketpair())
    end = DraftingEnd(far, trio.current_time)
    end.wants_instants = traces

    async def draft() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.beat)
            nursery.start_soon(far.run)
            with suppress(LinkLostError):
                await end.serve(
                    model,
                    worker(end),
                    vocab_size=vocab_size,
                    make_policy=make_policy,
                    max_batch=max_batch,
                    cache_bytes=PREFIX_CACHE_BYTES,
                )
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft)
            loaded = DrafterLoaded(model.vocab_size, model.context_length, getattr(model, "feature_layers", None))
            yield LoadedElsewhere(near, loaded), near, far
            nursery.cancel_scope.cancel()
    finally:
        near.close()
        far.close()


def simulated_worker(price: Callable[[Any], float]) -> Callable[[DraftingEnd], Worker]:
    """A drafter's worker in simulated time."""
    return lambda end: SimulatedWorker("draft", price, end)
