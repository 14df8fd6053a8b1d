"""Links over sockets: messages of any size, and ends that go or fall silent."""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from actors.remote.link import LinkLostError, SocketLink
from protocol.errors import ProtocolError
from protocol.wire import MAX_FRAME_BYTES


@pytest.fixture
def pair() -> Iterator[tuple[SocketLink, SocketLink]]:
    near, far = (SocketLink(sock, name, 3.5) for sock, name in zip(socket.socketpair(), ("far", "near"), strict=True))
    yield near, far
    near._socket.close()
    far._socket.close()


async def test_messages_of_any_size_arrive_in_order(pair: Any) -> None:
    near, far = pair
    messages = [b"", b"a" * 10**6, b"b", b"c" * 10**7]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run)
        for message in messages:
            near.send(message)
        assert near.is_behind
        assert [await far.receive() for _ in messages] == messages
        far.send(b"answer")
        assert await near.receive() == b"answer"
        assert not near.is_behind
        nursery.cancel_scope.cancel()


async def test_a_wait_that_is_cancelled_loses_nothing(pair: Any) -> None:
    near, far = pair
    near._socket.send(struct.pack("!I", 4) + b"ha")
    with trio.move_on_after(0.01):
        await far.receive()
    near._socket.send(b"lf")
    assert await far.receive() == b"half"


async def test_an_end_that_has_closed_the_link_is_told_from_silence(pair: Any, autojump_clock: Any) -> None:
    near, far = pair
    with pytest.raises(LinkLostError, match=r"^near hangs: it has sent no heartbeat for 3.5 s"):
        await far.receive()
    near.close()
    near.close()
    near.send(b"nobody hears this")
    with pytest.raises(LinkLostError, match=r"^near has ended"):
        await far.receive()
    far.send(b"nor this")


async def test_a_message_without_bound_is_refused(pair: Any) -> None:
    near, far = pair
    near._socket.send(struct.pack("!I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match=f"a message of {MAX_FRAME_BYTES + 1} bytes was announced"):
        await far.receive()
