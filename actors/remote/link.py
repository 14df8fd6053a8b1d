"""A link between two processes: messages as bytes, in order, each way."""

from __future__ import annotations

import math
import socket
from collections import deque
from typing import Protocol, TypeVar

import attrs
import trio

from protocol.errors import OutriderError
from protocol.prices import Measurement
from protocol.trace import Event, Instant, Span
from protocol.wire import Frames

# Heartbeat interval, and the silence after which the other end counts as hanging: at work, and before it has loaded its
# model, since importing packages may keep it silent for long. In seconds.
BEAT_S, SILENCE_S, LOADING_SILENCE_S = 0.5, 3.5, 60.0
MAX_LINK_MESSAGE_BYTES = 2**30  # a longer message is nonsense. Hidden states of a long prompt are large.

_MOMENTS: dict[type, tuple[str, ...]] = {Measurement: ("ended_s",), Span: ("began", "ended"), Instant: ("at",)}

T = TypeVar("T", bound=Measurement | Event)


def aged(told: T, now_s: float) -> T:
    """What is told over a link, whose ends have different clocks, with moments turned into ages in seconds, or back."""
    return attrs.evolve(told, **{name: now_s - getattr(told, name) for name in _MOMENTS[type(told)]})


class LinkLostError(OutriderError):
    """The other end of a link has ended, hangs, or has closed the link; the message says which end, and how."""


class Link(Protocol):
    """One end of a link."""

    name: str  # of the other end, for messages

    def send(self, data: bytes) -> None:
        """Send a message. Never waits. One that does not arrive is no error here: `receive` raises then."""

    @property
    def is_behind(self) -> bool:
        """Whether the other end has yet to take some of what was sent."""

    async def receive(self) -> bytes:
        """Wait for the next message. Cancellation: loses none. Raises: LinkLostError: there is none. ProtocolError."""

    async def run(self) -> None:
        """Send what `send` could not send at once; must run while the link is used, until it is cancelled."""

    def close(self) -> None:
        """Close the link, and so tell the other end. Harmless the second time."""


class SocketLink:
    """A link over a connected stream socket."""

    def __init__(self, sock: socket.socket, name: str, max_silence_s: float = math.inf) -> None:
        sock.setblocking(False)
        self.name = name
        self.max_silence_s = max_silence_s  # longest time that the other end may send nothing; it sends heartbeats
        self.is_silent = False  # whether it has sent nothing for longer
        self._socket = sock
        self._frames = Frames()
        self._silent_s = 0.0
        self._unsent: deque[memoryview] = deque()
        self._has_unsent = trio.Event()

    def send(self, data: bytes) -> None:
        for frame in Frames.framed(data):
            left = memoryview(frame)
            if not self._unsent:
                left = left[self._sent(left) :]
            if left:
                self._unsent.append(left)
                self._has_unsent.set()

    def _sent(self, data: memoryview) -> int:
        """Send what is taken at once. Returns: the number of bytes; all of them if the link is lost."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # `receive` reports that the link has ended

    @property
    def is_behind(self) -> bool:
        return bool(self._unsent)

    async def run(self) -> None:
        while True:
            await self._has_unsent.wait()
            while self._unsent:
                await trio.lowlevel.wait_writable(self._socket)
                left = self._unsent[0][self._sent(self._unsent[0]) :]
                if left:
                    self._unsent[0] = left
                else:
                    self._unsent.popleft()
            self._has_unsent = trio.Event()

    async def receive(self) -> bytes:
        while (message := self._frames.take(MAX_LINK_MESSAGE_BYTES)) is None:
            # Heartbeats come more often. Time in which this process itself stood still counts for no more than this.
            with trio.move_on_after(2 * BEAT_S) as scope:
                await trio.lowlevel.wait_readable(self._socket)
            if scope.cancelled_caught:
                self._silent_s += 2 * BEAT_S
                if self._silent_s > self.max_silence_s:
                    self.is_silent = True
                    raise LinkLostError(f"{self.name} hangs: it has sent no heartbeat for {self.max_silence_s:g} s")
                continue
            self._silent_s = 0.0
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLostError(f"{self.name} has ended, or cannot be reached any more ({error})") from error
            if not data:
                raise LinkLostError(f"{self.name} has ended")
            self._frames.add(data)
        return message

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
