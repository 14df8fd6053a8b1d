"""Which linear algebra MLX computes with, and OpenBLAS put in front of it where that is asked for.

On Linux, MLX's CPU wheel brings the reference BLAS, with which verifying several tokens in float32 takes as
many times as long as decoding one. A library that is loaded with its symbols global before MLX is takes that
one's place. So nothing here imports mlx, nor may anything that is imported before this has done its work.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown

VARIABLE = "OUTRIDER_BLAS"
OPENBLAS = "openblas"
SYSTEM = "system"

# Any of these sets the threads of OpenBLAS; what a user has set stays as it is.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

# Target and drafter compute at the same time.
WORKERS = 2

# What MLX calls. A library with other names for it (those of 64-bit integers, say) would change nothing.
_SYMBOL = "cblas_sgemm"

_ALLOWED = f'"{OPENBLAS}", "{SYSTEM}" or the path of a library'


# --- decisions ------------------------------------------------------------------------------------


def candidates(machine: str) -> tuple[str, ...]:
    """Where distributions have an OpenBLAS with threads of its own, the likeliest first.

    Args:
        machine: as `platform.machine` has it, such as "x86_64" or "aarch64".
    """
    triplet = f"/usr/lib/{machine}-linux-gnu"
    return (
        f"{triplet}/openblas-pthread/libopenblas.so.0",  # Debian, Ubuntu: libopenblas0-pthread
        "/usr/lib64/libopenblasp.so.0",  # Fedora: openblas-threads
        "/usr/lib64/libopenblas.so.0",  # openSUSE; on Fedora the one without threads
        f"{triplet}/libopenblas.so.0",  # whichever Debian has been told to use
        "/usr/lib/libopenblas.so.0",  # Arch, Alpine
        "/usr/lib/libopenblas.so",
    )


def choose(
    wanted: str,
    machine: str,
    *,
    exists: Callable[[str], bool] = os.path.exists,
    search: Callable[[str], str | None] = ctypes.util.find_library,
) -> str | None:
    """The library that a user's word stands for.

    Args:
        wanted: "openblas", "system" (or nothing), or a path.
        machine: see `candidates`.
        exists: whether there is a file at a path.
        search: asks the system's linker for a library by its short name; asked last, since that starts processes.

    Returns: a path, or a name that the linker knows; None where MLX's own is to stay.

    Raises: SettingsError: it is none of these, or not there.
    """
    if wanted in ("", SYSTEM):
        return None
    if wanted != OPENBLAS:
        if "/" not in wanted and ".so" not in wanted:
            raise SettingsError(f"blas must be {_ALLOWED}, got {shown(wanted)}")
        if not exists(path := os.path.abspath(os.path.expanduser(wanted))):
            raise SettingsError(f'there is no BLAS library at {path}; give the path of one, or "{OPENBLAS}"')
        return path
    found = next((path for path in candidates(machine) if exists(path)), None) or search("openblas")
    if found is None:
        raise SettingsError(
            "no OpenBLAS was found; install libopenblas0-pthread (Debian, Ubuntu), openblas-threads (Fedora) or "
            "openblas (Arch), or give the path of one"
        )
    return found


def num_threads(environment: Mapping[str, str], num_cores: int, num_workers: int) -> int | None:
    """BLAS threads for each of several workers, so that together they are no more than the cores.

    Args:
        environment: variables of the process.
        num_cores: that the process may use, >= 1.
        num_workers: threads that compute at the same time, >= 1.

    Returns: at least 1; None where a user has decided that already.
    """
    if any(environment.get(name) for name in THREAD_VARIABLES):
        return None
    return max(1, num_cores // num_workers)


# --- doing it -------------------------------------------------------------------------------------


@attrs.define
class _InFront:
    """What has been done in this process.

    Attributes:
        library: what was put in front of MLX's own, or None.
        handle: of it.
        are_threads_ours: whether how many threads it has was decided here.
        refusal: why the environment's wish could not be met.
    """

    library: str | None = None
    handle: ctypes.CDLL | None = None
    are_threads_ours: bool = False
    refusal: SettingsError | None = None


_in_front = _InFront()


def put_in_front(wanted: str, *, num_workers: int = WORKERS) -> None:
    """Have MLX compute with another BLAS in this process.

    Args:
        wanted: see `choose`.
        num_workers: threads that will compute at the same time.

    Raises: SettingsError: this is not Linux, mlx is imported already, there is no such library or it is no BLAS,
        or another one was put in front before.
    """
    if wanted not in ("", SYSTEM) and sys.platform != "linux":
        raise SettingsError(
            f'blas {shown(wanted)} is for Linux: elsewhere MLX has a fast one of its own; leave it "{SYSTEM}"'
        )
    library = choose(wanted, os.uname().machine)
    if library == _in_front.library:
        return
    if _in_front.library is not None:
        raise SettingsError(
            f"blas {shown(wanted)} comes too late: {VARIABLE} has put {_in_front.library} in front; change or unset it"
        )
    assert library is not None
    if is_mlx_imported():
        raise SettingsError(
            f"blas {shown(wanted)} comes too late: mlx is imported already; set {VARIABLE} and import runtime "
            "before mlx"
        )
    # Read by the library as it is loaded, and before numpy or a child process does the same.
    threads = num_threads(os.environ, num_usable_cores(), num_workers)
    if threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    try:
        _in_front.handle = _load(library)
    except SettingsError:
        if threads is not None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        raise
    _in_front.library, _in_front.are_threads_ours = library, threads is not None


def _load(library: str) -> ctypes.CDLL:
    try:
        # Looked at first with its symbols to itself: what is no BLAS must not get in front of anything.
        looked_at = ctypes.CDLL(library)
        if not hasattr(looked_at, _SYMBOL):
            raise SettingsError(f"{library} is no BLAS that MLX could call: it has no {_SYMBOL}; give another")
        return ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SettingsError(f"cannot load {library} as a BLAS library: {error}") from error


def obey_environment() -> None:
    """Put in front what the environment variable names.

    A wish that cannot be met is kept for `check`, so that a command line can say so in one line. One that comes
    too late is a warning: whatever has imported mlx computes with what it has.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", SYSTEM) and sys.platform == "linux" and is_mlx_imported():
        warnings.warn(
            f"{VARIABLE}={wanted} has no effect, since mlx was imported first; import runtime before mlx and mlx_lm",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    try:
        put_in_front(wanted)
    except SettingsError as error:
        _in_front.refusal = SettingsError(f"{VARIABLE}: {error}")


def check() -> None:
    """Say whether the environment's wish could be met.

    Raises: SettingsError: it could not.
    """
    if _in_front.refusal is not None:
        raise SettingsError(*_in_front.refusal.args)


def is_mlx_imported() -> bool:
    """Whether it is too late to put anything in front."""
    return "mlx.core" in sys.modules


def num_usable_cores() -> int:
    """Cores that this process may use."""
    affinity: Callable[[int], Collection[int]] | None = getattr(os, "sched_getaffinity", None)
    return max(1, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


# --- what there is --------------------------------------------------------------------------------


def blas_in_use() -> str | None:
    """The BLAS library that this process has loaded, by its file's name; None where that cannot be seen."""
    if _in_front.library is not None:
        name = Path(_in_front.library).name
        return describe([name], threads_in_front()) or name
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/" in line}
    # numpy and scipy bring one of their own, under names that nobody else links to.
    return describe([name for path in paths if "scipy" not in (name := path.name)])


def describe(files: Sequence[str], threads: int | None = None) -> str | None:
    """What the BLAS among some library files is, in words; None where there is none.

    Args:
        files: names of files. Where several are loaded, the reference BLAS is the one that is not called.
        threads: how many it has, where that is known.
    """
    counted = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    for mark, name in _NAMES:
        if found := sorted(file for file in files if mark in file.lower()):
            return f"{name} ({found[0]}{counted})"
    return None


def threads_in_front() -> int | None:
    """How many threads the library that was put in front has; None where there is none, or it does not tell."""
    get = getattr(_in_front.handle, "openblas_get_num_threads", None)
    return None if get is None else int(get())


def can_set_threads_in_front() -> bool:
    """Whether how many threads there are is decided here: the library can be told, and the user has said nothing."""
    return _in_front.are_threads_ours and hasattr(_in_front.handle, "openblas_set_num_threads")


def set_threads_in_front(threads: int) -> None:
    """Give the library that was put in front another number of threads, if that is decided here."""
    if can_set_threads_in_front():
        assert _in_front.handle is not None
        _in_front.handle.openblas_set_num_threads(ctypes.c_int(threads))


_NAMES = (("openblas", "OpenBLAS"), ("mkl", "Intel MKL"), ("blis", "BLIS"), ("libblas", "reference BLAS"))
