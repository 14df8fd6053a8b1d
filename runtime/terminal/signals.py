"""What SIGINT and SIGTERM do to a command: the first cancels its work, a second one ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import attrs
import trio

from protocol.errors import OutriderError
from runtime.terminal.display import SIGNAL_STATUS_BASE, CommandOutcome, Display

# Seconds after which a user who has stopped a command is told what it waits for. Most forward passes are over by then.
ACKNOWLEDGE_S = 0.1

# Seconds within which a second signal counts as an echo of the first: timeout(1) and similar programs signal the
# process, and then the process group that it is in.
ECHO_S = 0.5


@contextmanager
def exit_on_signal(display: Display, exit_now: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Have SIGINT and SIGTERM end the process at once inside the block, unless other handlers are installed there.

    For work that cannot be cancelled and leaves nothing half done, such as imports. A signal that is ignored stays so.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        display.clear()  # it may have hidden the cursor
        exit_now(SIGNAL_STATUS_BASE + number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    with _handlers(on_signal, [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]):
        yield


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None], numbers: list[signal.Signals]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@attrs.define(eq=False, slots=False)
class SignalScope:
    """A cancel scope for a command's work: SIGINT or SIGTERM cancels it, and a second signal ends the process.

    A failure, and the signal that cancelled the work, are noted in the outcome.
    """

    outcome: CommandOutcome
    display: Display
    _exit_now: Callable[[int], object] = os._exit
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)  # while the work runs
    _first_at: float | None = attrs.field(init=False, default=None)

    def intercept(self, number: int) -> bool:
        """Whether the command handles a signal itself, so that it neither cancels the work nor ends the process.

        Called in the main thread, between any two bytecodes. An exception that it raises appears there.
        """
        return False

    def end_gently(self) -> bool:
        """Ask the work to end, upon the first signal. Returns whether it will, so that it need not be cancelled."""
        return False

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, once, and listen to signals meanwhile. Its `OutriderError` is noted in the outcome."""
        token = trio.lowlevel.current_trio_token()

        def on_signal(number: int, _: FrameType | None) -> None:
            # Decided here: when trio runs again, the command may do something else.
            if not self.intercept(number):
                token.run_sync_soon(self._on_signal, number)

        with _handlers(on_signal, [signal.SIGINT, signal.SIGTERM]):
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    with self._scope:
                        await work()
                except OutriderError as error:
                    # Captured, since the nursery would wrap it in a group.
                    self.outcome.failure = error
                finally:
                    self._nursery = None
                nursery.cancel_scope.cancel()
        if self.outcome.finish_reason is not None:
            self.outcome.signal = None  # it came too late to interrupt anything
        if self.outcome.signal is not None:
            self.outcome.failure = None  # after an interruption, a failure is of no interest

    def cancel(self, number: int) -> None:
        """Cancel the work because of a signal. Another one, a moment later, ends the process."""
        if self._first_at is None:
            self._first_at = trio.current_time()
        self.outcome.signal = number
        self._scope.cancel()

    def _on_signal(self, number: int) -> None:
        if self._nursery is None:
            return  # the work was over before trio ran this
        if self._first_at is None:
            self._first_at = trio.current_time()
            if not self.end_gently():
                self.cancel(number)
                self._nursery.start_soon(self._acknowledge)
        elif trio.current_time() - self._first_at > ECHO_S:
            # A load cannot be interrupted. A user who does not want to wait for it sends a second signal.
            self.display.clear()
            self._exit_now(SIGNAL_STATUS_BASE + number)

    async def _acknowledge(self) -> None:
        await trio.sleep(ACKNOWLEDGE_S)
        self.display.show_stopping()
