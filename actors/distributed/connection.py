"""A control connection between two ranks: messages over TCP."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import nullcontext

from protocol.rank_messages import RankMessage, decode, encode
from protocol.wire import Frames

MAX_FIRST_BYTES = 64 * 1024  # longest first message of a rank, before it is known to be one


class RankConnection:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take over a socket of the kind SOCK_STREAM; see `set_timeout`."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._socket = sock
        self._sends, self._sends_long = threading.Lock(), threading.Lock()
        self._frames = Frames()

    def fileno(self) -> int:
        """Of the socket, for `select`."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest time that a frame may take to be sent, or the rest of a message to be received."""
        self._socket.settimeout(timeout_s)

    def send(self, message: RankMessage) -> None:
        """Raises: OSError: the connection is lost, or the other end takes nothing."""
        frames = list(Frames.framed(encode(message)))
        with self._sends_long if len(frames) > 1 else nullcontext():
            for frame in frames:
                with self._sends:  # short messages of other threads may come between
                    self._socket.sendall(frame)

    def send_unless_busy(self, message: RankMessage) -> bool:
        """Send a short message without waiting. Returns: whether it was sent, which it is not while another one is on
        its way, or if the other end accepts nothing. Raises: OSError: the connection is lost.
        """
        if not self._sends.acquire(blocking=False):
            return False
        try:
            _, writable, _ = select.select((), [self._socket], (), 0)
            if writable:
                self._socket.sendall(b"".join(Frames.framed(encode(message))))
            return bool(writable)
        finally:
            self._sends.release()

    def receive(self) -> RankMessage:
        """Wait for a message. Raises: OSError: the connection is lost, or it is late. ProtocolError: it is none."""
        while (data := self._frames.take()) is None:
            self._read()
        return decode(data)

    def receive_first(self, deadline: float) -> RankMessage:
        """As `receive`, for the first message of somebody who may be a stranger. All of it must arrive by the deadline,
        a `time.monotonic`. Changes the timeout of the socket.
        """
        while (data := self._frames.take(MAX_FIRST_BYTES)) is None:
            if (left_s := deadline - time.monotonic()) <= 0.0:
                raise TimeoutError("the first message was not there in time")
            self._socket.settimeout(left_s)
            self._read()
        return decode(data)

    def receive_available(self) -> list[RankMessage]:
        """Read once, when the socket is readable. Returns: the messages that are complete now. Raises: as `receive`."""
        self._read()
        return [decode(data) for data in iter(self._frames.take, None)]

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed by the other end")
        self._frames.add(data)

    def close(self) -> None:
        """Close the connection; harmless if it is closed."""
        self._socket.close()
