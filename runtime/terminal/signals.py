"""What SIGINT and SIGTERM do to a command: the first cancels its work, another one ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from protocol.errors import OutriderError
from runtime.terminal.display import BY_SIGNAL, ECHO_S, Display, Outcome

# Seconds after which somebody who has stopped a command is told what it waits for. Most passes are over by then.
ACKNOWLEDGE_S = 0.1


@contextmanager
def quitting(display: Display, quit_now: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Have SIGINT or SIGTERM end the process at once while the block runs, where nobody else handles them.

    For what cannot be cancelled and leaves nothing half done, such as imports.

    Args:
        display: cleared first, since it may have hidden the cursor.
        quit_now: ends the process with a status.
    """

    def on_signal(number: int, _: object) -> None:
        display.clear()
        quit_now(BY_SIGNAL + number)

    before = {
        number: signal.signal(number, on_signal)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def until_signal(
    work: Callable[[], Awaitable[None]],
    outcome: Outcome,
    display: Display,
    quit_now: Callable[[int], object] = os._exit,
    *,
    ends_gently: Callable[[], bool] = lambda: False,
) -> None:
    """Do the work; SIGINT or SIGTERM cancels it, and another one ends the process.

    Args:
        work: what to do.
        outcome: where a failure of the work, or the signal that cancelled it, is noted.
        display: told of a cancellation.
        quit_now: ends the process with a status.
        ends_gently: asked at the first signal; where the work can and does come to an end of its own, it is neither
            cancelled nor interrupted.
    """
    scope = trio.CancelScope()

    async def acknowledge() -> None:
        await trio.sleep(ACKNOWLEDGE_S)
        display.stopping()

    async def cancel_on_signal() -> None:
        first_at: float | None = None
        async for number in signals:
            if first_at is None:
                first_at = trio.current_time()
                if not ends_gently():
                    outcome.signal = number
                    scope.cancel()
                    nursery.start_soon(acknowledge)
            elif trio.current_time() - first_at > ECHO_S:
                # A load cannot be interrupted, and is waited for; here comes somebody who will not wait.
                display.clear()
                quit_now(BY_SIGNAL + number)

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_signal)
            with scope:
                # Kept, not let through: the nursery would wrap it in a group.
                try:
                    await work()
                except OutriderError as error:
                    outcome.failure = error
            nursery.cancel_scope.cancel()
    if outcome.finish_reason is not None:
        outcome.signal = None  # it came too late to interrupt anything
    if outcome.signal is not None:
        outcome.failure = None  # nobody waits any more for what failed
