"""The address of a server, its key, the origins whose pages may use it, and its number of connections."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket

from protocol.errors import OutriderError, SettingsError
from protocol.reprs import shown
from protocol.validation import check_integer
from runtime.server.limits import DEFAULT_CONNECTIONS

# An environment variable for the API key: other users of a machine can read its command lines.
KEY_VARIABLE = "OUTRIDER_API_KEY"

# An origin exactly as browsers send it; anything else would never match.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")


class ServerError(OutriderError):
    """The address cannot be used, or the target model has failed."""


def api_key(given: str | None) -> str | None:
    """The API key: `given`, or that of the environment; or None. Raises: SettingsError: no header can have it."""
    key = given if given is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError("the API key must be of printable ASCII characters without blanks, and not empty")
    return key


def check_origin(origin: str) -> None:
    """Raises: SettingsError: browsers send no such origin, so it would silently allow nothing."""
    if not _ORIGIN.fullmatch(origin) or _DEFAULT_PORT.fullmatch(origin):
        raise SettingsError(
            f"--allow-origin {shown(origin)} is not an origin as browsers send it: give scheme and host in lower case, "
            "and the port if it is not the default one, with nothing behind, such as https://example.org"
        )


IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def network(text: str) -> IpNetwork:
    """The network that an address, or a network such as 10.0.0.0/8, stands for. Raises: SettingsError: neither."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise SettingsError(
            f"--trusted-proxy {shown(text)} is not an IP address or a network: {error}; give one such as 10.0.0.1 or "
            "10.0.0.0/8"
        ) from error


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket bound to an address, not listening yet: until the models are loaded, connections are refused.

    Raises: SettingsError: the address is invalid, or lets others in without a key. ServerError: it cannot be bound.
    """
    check_integer("--port", port, 0, 65535)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host {shown(host)} is not an address: {error}") from error
    family, kind, protocol, _, address = found[0]
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise SettingsError(
            f"--host {host} lets other machines in, which needs an API key; give one by --api-key or {KEY_VARIABLE}"
        )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Tokens are small, and must not wait for each other.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another --port") from error
    return bound


def url(bound: socket.socket) -> str:
    """The address of a bound socket, as clients give it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


# Open files besides the connections: libraries, models being loaded, event loops, the process that checks grammars.
OTHER_FILES = 128


def make_room_for_connections(requested: int | None) -> int:
    """Raise the limit of open files as far as connections need it. Returns the number of connections.

    If none is `requested`, it is the default, or as many as are possible if these are fewer.

    Raises: SettingsError: the system does not allow so many open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (DEFAULT_CONNECTIONS if requested is None else requested) + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed - OTHER_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # macOS has a further limit, which is not that of `getrlimit`
        allowed = soft
    possible = max(1, allowed - OTHER_FILES)
    if requested is not None and possible < requested:
        raise SettingsError(
            f"--max-connections must be at most {possible} here, got {requested}: this process may open {allowed} "
            f"files; raise that limit with ulimit -n, or take fewer"
        )
    return min(possible, needed - OTHER_FILES)
