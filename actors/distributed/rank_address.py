"""Which rank this process is, and where rank 0 listens for control connections, from the variables of `mlx.launch`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from protocol.errors import SettingsError

# host:port of rank 0's control connections, where it is not to be derived from mlx.launch's variables.
CONTROL_VARIABLE = "OUTRIDER_CONTROL"


@attrs.frozen
class RankAddress:
    """A process among the ranks."""

    rank: int  # of this process, in [0, size)
    size: int  # >= 2
    host: str  # where rank 0 listens
    port: int


def rank_address(environment: Mapping[str, str] = os.environ) -> RankAddress | None:
    """The rank of this process by its environment; None if it is the only one.

    `mlx.launch` sets `MLX_RANK`, and for each backend where the ranks are. The control port is the one after the last
    of theirs; `OUTRIDER_CONTROL` names another. Raises: SettingsError: a variable is missing, or unreadable.
    """
    rank = _integer(environment, "MLX_RANK", "OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    hosts = _hosts(environment)
    devices = _read_json(environment, "MLX_IBV_DEVICES")
    size = _integer(environment, "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
    if size is None and (known := hosts or devices) is not None:
        size = len(known)
    if size is None and rank == 0 and environment.get("MLX_HOSTFILE"):
        return None  # `mlx.launch -n 1` gives an empty hostfile
    if size is None:
        raise SettingsError("MLX_RANK is set, and nothing says how many ranks there are; set MLX_WORLD_SIZE")
    if not 0 <= rank < size:
        raise SettingsError(f"MLX_RANK must be between 0 and {size - 1}, got {rank}")
    if size == 1:
        return None
    return RankAddress(rank, size, *_control(environment, hosts))


def is_ring(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks are connected by MLX's ring, from which a rank can be left out."""
    return _hosts(environment) is not None


@contextmanager
def left_out(rank: int | None) -> Iterator[None]:
    """While in force, the environment describes a ring without a rank; with all of them if that is None. The group of a
    ring cannot be split, so MLX makes the target's by this.
    """
    if rank is None:
        yield
        return
    hosts = _hosts(os.environ)
    assert hosts is not None
    own = int(os.environ["MLX_RANK"])
    before = {name: os.environ[name] for name in ("MLX_RANK", "MLX_HOSTFILE")}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(hosts[:rank] + hosts[rank + 1 :], file)
        file.flush()
        os.environ.update(MLX_RANK=str(own - (own > rank)), MLX_HOSTFILE=file.name)
        try:
            yield
        finally:
            os.environ.update(before)


def _control(environment: Mapping[str, str], hosts: list[list[str]] | None) -> tuple[str, int]:
    if given := environment.get(CONTROL_VARIABLE):
        return _host_and_port(CONTROL_VARIABLE, given)
    if hosts:
        each = [_host_and_port("MLX_HOSTFILE", address) for addresses in hosts for address in addresses]
        return each[0][0], 1 + max(port for _, port in each)
    if coordinator := environment.get("MLX_JACCL_COORDINATOR"):
        at, port = _host_and_port("MLX_JACCL_COORDINATOR", coordinator)
        return at, port + 1
    if (host := environment.get("NCCL_HOST_IP")) and (nccl_port := _integer(environment, "NCCL_PORT")) is not None:
        return host, nccl_port + 1
    raise SettingsError(f"nothing says where rank 0 is; set {CONTROL_VARIABLE} to its host:port on every rank")


def _hosts(environment: Mapping[str, str]) -> list[list[str]] | None:
    """For each rank of a ring, its addresses as host:port; None without a hostfile, or with an empty one."""
    hosts = _read_json(environment, "MLX_HOSTFILE")
    if hosts is None:
        return None
    if not all(isinstance(rank, list) and rank and all(isinstance(each, str) for each in rank) for rank in hosts):
        raise SettingsError('MLX_HOSTFILE must name a file such as [["10.0.0.1:32323"], ["10.0.0.2:32323"]]')
    return hosts


def _read_json(environment: Mapping[str, str], variable: str) -> list[list[str]] | None:
    path = environment.get(variable)
    if not path:
        return None
    try:
        if not (text := Path(path).read_text(encoding="utf-8")).strip():
            return None
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{variable} names {path!r}, which cannot be read as JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise SettingsError(f"{variable} names {path!r}, which must have a list with an entry for each rank")
    return value


def _integer(environment: Mapping[str, str], *variables: str) -> int | None:
    for variable in variables:
        if value := environment.get(variable):
            try:
                return int(value)
            except ValueError:
                raise SettingsError(f"{variable} must be an integer, got {value!r}") from None
    return None


def _host_and_port(variable: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"{variable} must have host:port, got {address!r}")
    return host.strip("[]"), int(port)
