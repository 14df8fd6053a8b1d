"""Joining: each rank connects to rank 0, and all compare versions; and the backends by which MLX connects them."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from actors.distributed.connection import RankConnection
from actors.distributed.rank_address import RankAddress, rank_address
from actors.distributed.rank_group import RankGroup
from actors.remote.link import SILENCE_S
from protocol.errors import ProtocolError, RankError, SettingsError
from protocol.rank_messages import Broken, Hello, RankMessage, Welcome

JOIN_TIMEOUT_S = 60.0  # longest wait for the other ranks to start, in seconds
RETRY_S = 0.1  # pause between two attempts to reach rank 0, in seconds

_PACKAGES = ("outrider", "mlx", "mlx-lm")

# In the order in which MLX tries them, each with the environment variable that says where its ranks are.
BACKENDS = {
    "nccl": "NCCL_HOST_IP",
    "ring": "MLX_HOSTFILE",
    "mpi": "OMPI_COMM_WORLD_RANK",
    "jaccl": "MLX_JACCL_COORDINATOR",
}


def join_ranks(timeout_s: float = JOIN_TIMEOUT_S) -> RankGroup:
    """Join the other ranks of a target that is sharded over several processes. Each rank calls this, once.

    `mlx.launch` starts the processes, and says in environment variables which rank this is and where the others are.
    This blocks: call it before trio runs. Rank 0 goes on with `open(..., group=group)`, others with `follow`.

    Args:
        timeout_s: longest time to wait for all ranks to start, > 0.

    Raises:
        SettingsError: this process was not started as one of several ranks, or the variables are unreadable.
        RankError: some rank has not come in time, or has other versions of Outrider, mlx or mlx-lm. It is named.
    """
    if not timeout_s > 0:
        raise SettingsError(f"timeout_s must be above 0, got {timeout_s}")
    address = rank_address()
    if address is None:
        raise SettingsError("this process is not one of several ranks; start it by mlx.launch, with at least two hosts")
    deadline = time.monotonic() + timeout_s
    hello = Hello(address.rank, address.size, versions())
    if address.rank == 0:
        connections = _gather(address, hello, deadline, timeout_s)
    else:
        connections = {0: _reach(address, hello, deadline, timeout_s)}
    return RankGroup(address.rank, address.size, connections)


def versions() -> dict[str, str]:
    """The versions of the packages that must be the same on all ranks."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"  # run from a source tree
    return found


def _gather(address: RankAddress, hello: Hello, deadline: float, timeout_s: float) -> dict[int, RankConnection]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        # A name may have addresses of both families, and not every other rank may reach IPv6.
        family, *_, where = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.create_server(where, family=family)
    except OSError as error:
        raise RankError(
            f"rank 0 cannot listen at {address.host}:{address.port} for the other ranks: {error.strerror}; set "
            "OUTRIDER_CONTROL to a free host:port on every rank"
        ) from error
    connections: dict[int, RankConnection] = {}
    try:
        with listener:
            while len(connections) < address.size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    missing = [str(rank) for rank in range(1, address.size) if rank not in connections]
                    raise RankError(
                        f"rank {', '.join(missing)} of {address.size} has not come within {timeout_s:g} s; start it, "
                        "or give a longer timeout_s"
                    ) from None
                _receive_hello(connected, hello, connections, min(deadline, time.monotonic() + SILENCE_S))
        for rank, connection in sorted(connections.items()):
            try:
                connection.send(Welcome())
            except OSError as error:
                raise RankError(f"rank {rank} has ended before all ranks were there ({error})") from error
    except RankError as error:
        for connection in connections.values():
            with suppress(OSError):  # it has gone, too
                connection.send(Broken(str(error)))
            connection.close()
        raise
    return connections


def _receive_hello(
    connected: socket.socket, own: Hello, connections: dict[int, RankConnection], deadline: float
) -> None:
    """Take a rank's first message. Something else that connects, such as a port scanner, is ignored."""
    connection = RankConnection(connected, SILENCE_S)
    message: RankMessage | None
    try:
        message = connection.receive_first(deadline)
        connection.set_timeout(SILENCE_S)
    except (OSError, ProtocolError):
        message = None
    if not isinstance(message, Hello) or not 0 < message.rank < own.size:
        connection.close()
        return
    if (before := connections.pop(message.rank, None)) is not None:
        before.close()  # it was started again
    connections[message.rank] = connection
    if message.size != own.size:
        raise RankError(f"rank {message.rank} was started as one of {message.size}, rank 0 as one of {own.size}")
    for package, own_version in own.versions.items():
        if (other := message.versions.get(package)) != own_version:
            raise RankError(
                f"rank {message.rank} has {package} {other}, rank 0 has {own_version}; install the same version on all"
            )


def _reach(address: RankAddress, hello: Hello, deadline: float, timeout_s: float) -> RankConnection:
    """Connect to rank 0, which may start later, and wait until it has all ranks."""
    where = f"rank 0 at {address.host}:{address.port}"
    while True:
        try:
            connected = socket.create_connection((address.host, address.port), timeout=SILENCE_S)
            break
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise RankError(f"{where} cannot be reached within {timeout_s:g} s ({error}); start it") from error
            time.sleep(RETRY_S)
    connection = RankConnection(connected, max(0.001, deadline - time.monotonic()) + SILENCE_S)
    try:
        connection.send(hello)
        answer = connection.receive()
    except (OSError, ProtocolError) as error:
        connection.close()
        raise RankError(f"{where} has not welcomed rank {address.rank} within {timeout_s:g} s ({error})") from error
    if isinstance(answer, Broken):
        connection.close()
        raise RankError(f"the ranks cannot begin: {answer.reason}")
    connection.set_timeout(SILENCE_S)
    return connection


def available_backends() -> tuple[str, ...]:
    """The backends that this machine's MLX has."""
    return tuple(name for name in BACKENDS if mx.distributed.is_available(backend=name))


def chosen_backend(group: RankGroup) -> str | None:
    """The backend of MLX's group; None if MLX does not tell. This blocks."""
    for name in available_backends():
        # Only backends that MLX itself has tried: for any other it would look for ranks again.
        if os.environ.get(BACKENDS[name]) and mx.distributed.init(backend=name).size() == group.size:
            return name
    return None
