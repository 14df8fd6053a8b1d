"""The limit of open files of this process, by which connections are bounded."""

from __future__ import annotations

import resource

from protocol.errors import SettingsError

DEFAULT_CONNECTIONS = 1000

# Open files beside the connections: libraries, models that are being loaded, event loops, the process of grammars.
OTHER_FILES = 128


def make_room_for_connections(requested: int | None) -> int:
    """Raise the limit of open files as far as connections need it.

    Args:
        requested: number of connections, >= 1; None for the default, or as many as are possible if these are fewer.

    Returns: the number of connections.

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
