"""The BLAS of MLX's CPU backend: another library, such as OpenBLAS, loaded in place of MLX's own.

On Linux, MLX's CPU wheel brings the reference BLAS, with which verifying k tokens in float32 takes about k times as
long as decoding one. A BLAS that is loaded with global symbols before MLX replaces it, so neither this module nor
anything imported before it may import mlx. (A restart with LD_PRELOAD would run a program twice up to here.)
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import attrs

from actors.workers.core_sharing import CORES
from protocol.errors import SettingsError
from protocol.reprs import shown

VARIABLE = "OUTRIDER_BLAS"
OPENBLAS = "openblas"
SYSTEM = "system"

# Each of these sets the number of OpenBLAS threads, which then stays as it is.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

# A function that MLX calls. A library with other names, such as those for 64-bit integers, would have no effect.
_SYMBOL = "cblas_sgemm"

_INSTALL = "install libopenblas0-pthread (Debian, Ubuntu), openblas-threads (Fedora) or openblas (Arch)"
_REFERENCE = "reference BLAS"

_ALLOWED = f'"{OPENBLAS}", "{SYSTEM}" or the path of a library'


def candidates(machine: str) -> tuple[str, ...]:
    """Paths at which distributions install an OpenBLAS with its own threads, the likeliest first, by machine."""
    triplet = f"/usr/lib/{machine}-linux-gnu"
    return (
        f"{triplet}/openblas-pthread/libopenblas.so.0",  # Debian, Ubuntu: libopenblas0-pthread
        "/usr/lib64/libopenblasp.so.0",  # Fedora: openblas-threads
        "/usr/lib64/libopenblas.so.0",  # openSUSE; on Fedora this one has no threads
        f"{triplet}/libopenblas.so.0",  # the alternative that Debian is configured to use
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
    """The library that "openblas", "system" (or ""), or a path stands for: a path, or a name that the linker knows;
    None to keep MLX's own. `search` is called last, since it starts processes.

    Raises: SettingsError: `wanted` is none of these, or there is no such library.
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
        raise SettingsError(f"no OpenBLAS was found; {_INSTALL}, or give the path of one")
    return found


def advice_for_float32() -> str | None:
    """What would make float32 models faster on this CPU; None where nothing would, or the user chose MLX's own BLAS."""
    if sys.platform != "linux" or os.environ.get(VARIABLE) == SYSTEM or _loaded.keeps_own:
        return None
    if not (blas_in_use() or "").startswith(_REFERENCE):
        return None
    is_installed = any(map(os.path.exists, candidates(os.uname().machine)))
    return (
        "float32 is slow with MLX's own BLAS on this CPU: with OpenBLAS, the first token comes some ten times sooner; "
        f"{'' if is_installed else f'{_INSTALL}, and '}set {VARIABLE}={OPENBLAS}, or give commands --blas {OPENBLAS}"
    )


@attrs.define
class _LoadedBlas:
    """The BLAS that this process loaded in place of MLX's own."""

    library: str | None = None  # its path or name
    handle: ctypes.CDLL | None = None
    keeps_own: bool = False  # whether MLX's own was asked for
    environment_error: SettingsError | None = None  # why the BLAS that the environment names could not be loaded


_loaded = _LoadedBlas()


def load_before_mlx(wanted: str) -> None:
    """Load a BLAS, as `choose` finds it, so that MLX, which is imported later, uses it in this process. Raises:
    SettingsError: this is not Linux, mlx or another BLAS was loaded before, or it is no such library.
    """
    if wanted not in ("", SYSTEM) and sys.platform != "linux":
        raise SettingsError(
            f'blas {shown(wanted)} is for Linux: elsewhere MLX has a fast one of its own; leave it "{SYSTEM}"'
        )
    _loaded.keeps_own = wanted == SYSTEM
    library = choose(wanted, os.uname().machine)
    if library == _loaded.library:
        return
    if _loaded.library is not None:
        raise SettingsError(
            f"blas {shown(wanted)} comes too late: {VARIABLE} has loaded {_loaded.library}; change or unset it"
        )
    assert library is not None
    if is_mlx_imported():
        raise SettingsError(
            f"blas {shown(wanted)} comes too late: mlx is imported already; set {VARIABLE} and import runtime "
            "before mlx"
        )
    try:
        # Loaded with local symbols first: a library that is not a BLAS must not replace anything.
        if not hasattr(ctypes.CDLL(library), _SYMBOL):
            raise SettingsError(f"{library} is no BLAS that MLX could call: it has no {_SYMBOL}; give another")
        _loaded.handle = handle = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SettingsError(f"cannot load {library} as a BLAS library: {error}") from error
    _loaded.library = library
    if shares_cores():
        CORES.control(lambda threads: handle.openblas_set_num_threads(ctypes.c_int(threads)), num_usable_cores())


def load_from_environment() -> None:
    """Load the BLAS that the environment variable names. An error is kept for `check_environment`; if mlx is imported
    already, there is only a warning.
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
        load_before_mlx(wanted)
    except SettingsError as error:
        _loaded.environment_error = SettingsError(f"{VARIABLE}: {error}")


def check_environment() -> None:
    """Raises: SettingsError: the BLAS that the environment names could not be loaded."""
    if _loaded.environment_error is not None:
        raise SettingsError(*_loaded.environment_error.args)


def is_mlx_imported() -> bool:
    """Whether mlx is imported, so that it is too late to load another BLAS."""
    return "mlx.core" in sys.modules


def num_usable_cores() -> int:
    """Number of cores that this process may use."""
    affinity: Callable[[int], Collection[int]] | None = getattr(os, "sched_getaffinity", None)
    return max(1, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


def blas_in_use() -> str | None:
    """Name of the BLAS that this process has loaded; None if that cannot be determined."""
    if _loaded.library is not None:
        name = Path(_loaded.library).name
        return describe([name], num_loaded_threads()) or name
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/" in line}
    # numpy and scipy bring their own, as "libscipy_openblas", which nothing else links to.
    return describe([path.name for path in paths])


def describe(files: Sequence[str], threads: int | None = None) -> str | None:
    """The BLAS among the names of library files, as text; None if there is none. The reference one is used if alone."""
    counted = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    for mark, name in _NAMES:
        if found := sorted(file for file in files if file.startswith(mark)):
            return f"{name} ({found[0]}{counted})"
    return None


def num_loaded_threads() -> int | None:
    """Number of threads of the loaded BLAS; None if none was loaded, or it does not tell."""
    get = getattr(_loaded.handle, "openblas_get_num_threads", None)
    return None if get is None else int(get())


def shares_cores() -> bool:
    """Whether the models that compute at the same time share the cores: the library can, and the user set no number."""
    has_set = any(os.environ.get(name) for name in THREAD_VARIABLES)
    return not has_set and hasattr(_loaded.handle, "openblas_set_num_threads")


# How the names of their files begin. The kernels that MLX has compiled are loaded libraries, too: their names begin
# with "lib" and are made of the names of operations, in which any letters may come together.
_NAMES = (("libopenblas", "OpenBLAS"), ("libmkl", "Intel MKL"), ("libblis", "BLIS"), ("libblas", _REFERENCE))
