"""One end of a group of ranks: joining among strangers, errors, and who may use the group. The rest is a socket."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ranks import free_ports
from sweeps import sweep

from actors.distributed import joining
from actors.distributed.connection import MAX_FIRST_BYTES, RankConnection
from actors.distributed.rank_address import RankAddress
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharding import Shard
from protocol.errors import ProtocolError, RankError, SettingsError
from protocol.rank_messages import Beat, Broken, CloseTarget, Hello, OpenTarget, RankLoaded
from runtime.cli import command, generate_command
from runtime.ranks import following, leading, sharded_target

HELLO = Hello(0, 2, {"mlx": "1"})


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return own, other


@pytest.fixture
def pair() -> Iterator[tuple[RankGroup, RankConnection]]:
    """Rank 0's group of two, and the end of its connection at rank 1."""
    own, other = connected()
    group, end = RankGroup(0, 2, {1: RankConnection(own, 5.0)}), RankConnection(other, 5.0)
    yield group, end
    group.fail("the test is over")
    group._thread.join(30)  # which closes its socket
    end.close()


# --- failure --------------------------------------------------------------------------------------


def test_others_know_why_before_this_rank_reacts(pair):
    group, end = pair
    received: list[Any] = []
    with group.on_error(lambda _: received.extend(end.receive() for _ in range(2))):
        group.fail("rank 0 has burnt")
    assert Broken("rank 0 has burnt") in received  # the other one is a heartbeat


async def test_messages_after_the_end_of_a_target_are_about_the_next_one(pair):
    group, end = pair
    with group.drafted_by(1):
        end.send(CloseTarget())
        end.send(HELLO)
        assert await trio.to_thread.run_sync(group.receive, 5.0) == (1, HELLO)
        await group.drafter.is_over.wait()
        end.close()
        # The other rank is no drafter any more, so the group is broken.
        assert await trio.to_thread.run_sync(group._is_broken.wait, 5.0)


# --- heartbeats -----------------------------------------------------------------------------------


def test_a_heartbeat_does_not_wait_for_an_end_that_takes_nothing():
    own, other = connected()
    sender, beat = RankConnection(own, 60.0), Beat("feed", 1.0)
    own.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            own.send(bytes(1 << 16))
    own.settimeout(60.0)
    sender.send_unless_busy(beat)  # would take a minute
    sender._sends.acquire()  # as by a message on its way
    sender.send_unless_busy(beat)
    own.close()
    other.close()


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_that_leaves_the_ranks_in_step_does_not_break_the_group(pair):
    group, _ = pair
    error = RuntimeError("[malloc] Unable to allocate 1000000000 bytes.")
    assert group.explain(error) is error
    assert group.error is None
    group.fail("rank 1 is out of step")
    assert "rank 1 is out of step" in str(group.explain(error))


@pytest.mark.parametrize(
    ("text", "is_out_of_step"),
    [("[ring] connection to a peer was lost", False), ("[malloc] Unable to allocate 1000000000 bytes.", True)],
)
def test_an_error_of_the_ranks_is_explained_by_the_one_that_has_ended(pair, text, is_out_of_step):
    group, end = pair
    end.close()
    explained = group.explain(RuntimeError(text), is_out_of_step=is_out_of_step)
    assert isinstance(explained, RankError)
    assert "rank 1 has ended" in str(explained)


# --- use ------------------------------------------------------------------------------------------


async def test_a_group_is_led_by_one_runtime_at_a_time(pair):
    group, _ = pair
    worker: Any = SimpleNamespace(give_up=lambda _: None, is_hanging=False)
    with leading.leading(group, worker):
        with pytest.raises(SettingsError, match="another runtime is open in this group of ranks"):
            leading.check_group(group, "owner/name", None)
        with (
            pytest.raises(SettingsError, match="another runtime is open in this group of ranks"),
            leading.leading(group, worker),
        ):
            pass
        assert group.is_led
    leading.check_group(group, "owner/name", None)


def test_a_rank_that_is_told_to_open_another_target_says_so():
    told = iter([(0, OpenTarget({})), (0, OpenTarget({}))])
    group: Any = SimpleNamespace(rank=1, mlx=..., receive=lambda: next(told), send=lambda _: None, fail=RankError)
    with pytest.raises(RankError, match="rank 1 follows a target, and rank 0 sent OpenTarget"):
        following._follow(lambda: Shard(None, None, {}), lambda: None, group)


def test_ranks_that_have_not_loaded_are_named_while_they_are_waited_for(caplog):
    received = iter([(2, RankLoaded({})), None, (1, RankLoaded({}))])

    def receive(_: float) -> tuple[int, RankLoaded]:
        if (found := next(received)) is None:
            raise TimeoutError
        return found

    group: Any = SimpleNamespace(draft_rank=None, target_ranks=lambda _: [0, 1, 2], receive=receive)
    with caplog.at_level(logging.INFO, "outrider"):
        sharded_target._compare(Shard(None, None, {}), group)
    assert caplog.messages == ["waiting for rank 1 to load its part of the target"]


def test_a_wait_for_a_message_ends_after_its_time(pair):
    with pytest.raises(TimeoutError, match=r"no message of another rank has come within 0.01 s"):
        pair[0].receive(0.01)


def test_a_rank_that_follows_ends_at_the_second_sigterm(monkeypatch):
    found = []

    def follow(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(following, "follow", follow)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        command.follow(
            argparse.Namespace(command=generate_command.COMMAND),
            SimpleNamespace(use_device=lambda: None, target="owner/name", draft=None, options={"group": None}),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == [signal.SIG_DFL]


# --- joining --------------------------------------------------------------------------------------


@sweep("data", [b'["Hello","x",2,{}]', b'["Hello",1,2,5]', b"[" * 50_000])
def test_strangers_at_the_control_port_are_ignored(data):
    own, other = connected()
    connections: dict[int, RankConnection] = {}
    with other:
        other.sendall(struct.pack("!I", len(data)) + data)
        joining._receive_hello(own, HELLO, connections, time.monotonic() + 5.0)
    assert connections == {}
    assert own.fileno() == -1


def test_a_first_message_is_bounded():
    own, other = connected()
    with own, other:
        other.sendall(struct.pack("!I", MAX_FIRST_BYTES + 1))
        with pytest.raises(ProtocolError, match="a message of 65537 bytes was announced"):
            RankConnection(own, 5.0).receive_first(time.monotonic() + 5.0)


def test_a_stranger_that_says_little_at_a_time_does_not_hold_the_others_up(monkeypatch):
    now = 0.0

    class Drip:
        """Sends a byte each second."""

        def setsockopt(self, *_: int) -> None:
            pass

        def settimeout(self, seconds: float) -> None:
            self.timeout_s = seconds

        def recv(self, _: int) -> bytes:
            nonlocal now
            now += min(1.0, self.timeout_s)
            return b"\0"

    monkeypatch.setattr(time, "monotonic", lambda: now)
    stranger: Any = Drip()
    with pytest.raises(TimeoutError, match="the first message was not there in time"):
        RankConnection(stranger, 3.5).receive_first(2.5)
    assert now == 2.5


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ranks_join_over_ipv6():
    address = RankAddress(0, 2, "::1", free_ports(1)[0])
    deadline = time.monotonic() + 30.0
    hello = Hello(1, 2, HELLO.versions)
    reached: list[RankConnection] = []

    def reach() -> None:
        reached.append(joining._reach(RankAddress(1, 2, address.host, address.port), hello, deadline, 30.0))

    thread = threading.Thread(target=reach)
    thread.start()
    connections = joining._gather(address, HELLO, deadline, 30.0)
    thread.join()
    assert list(connections) == [1]
    for connection in (*connections.values(), *reached):
        connection.close()
