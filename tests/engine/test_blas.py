"""The BLAS that MLX computes with: the decision, and its effect in a process.

A library can be loaded in front of mlx only once, and before mlx is imported; so these tests start processes. Where no
OpenBLAS is installed, a copy of the reference BLAS in MLX's wheel stands in for it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from models import llama, save
from sweeps import sweep

import runtime
from runtime.cli import main as cli
from runtime.loading import blas, model_sources
from runtime.loading.blas import THREAD_VARIABLES, VARIABLE, candidates, choose, describe

ROOT = Path(__file__).parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has a fast BLAS, and nothing goes in front")


def openblas() -> str | None:
    """The path of this machine's OpenBLAS, if there is one."""
    return next(filter(os.path.exists, candidates(os.uname().machine)), None)


with_openblas = pytest.mark.skipif(not openblas(), reason="no OpenBLAS here: install libopenblas0-pthread to test this")


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process with a clean environment, except for these variables."""
    inherited = {k: v for k, v in os.environ.items() if k not in (VARIABLE, *THREAD_VARIABLES, "PYTHONWARNINGS")}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def outrider(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(f"import sys; from runtime.cli.main import main; sys.exit(main({list(arguments)!r}))", **variables)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where advice on the BLAS is due for any float32 model, and was not given yet."""
    monkeypatch.setattr(model_sources, "MIN_ADVISED_PARAMETERS", 1)
    monkeypatch.setattr(model_sources, "_ADVISED", [])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "blas_in_use", lambda: "reference BLAS (libblas.so.3)")
    monkeypatch.setattr(blas, "candidates", lambda _: ("/no/such/library",))
    monkeypatch.delenv(VARIABLE, raising=False)


async def said_of(dtype: mx.Dtype, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said when a model with a drafter is loaded, twice."""
    caplog.clear()
    for _ in range(2):
        models = [llama(), llama()]
        for model in models:
            model.set_dtype(dtype)
        async with runtime.open(*((model, None) for model in models)):
            pass
    return [message for message in caplog.messages if "BLAS" in message]


async def test_one_line_of_a_process_advises_float32_on_a_cpu_to_have_a_faster_blas(advised, caplog, monkeypatch):
    assert await said_of(mx.bfloat16, caplog) == []
    (advice,) = await said_of(mx.float32, caplog)
    for part in ("ten times sooner", "install libopenblas0-pthread", f"set {VARIABLE}=openblas", "--blas openblas"):
        assert part in advice
    monkeypatch.setattr(blas, "candidates", lambda _: (__file__,))
    monkeypatch.setattr(model_sources, "_ADVISED", [])
    (advice,) = await said_of(mx.float32, caplog)
    assert "install" not in advice
    assert f"set {VARIABLE}=openblas" in advice


@sweep(
    "change",
    [
        lambda patch: patch.setattr(sys, "platform", "darwin"),
        lambda patch: patch.setattr(blas, "blas_in_use", lambda: "OpenBLAS (libopenblas.so.0)"),
        lambda patch: patch.setattr(blas, "blas_in_use", lambda: None),
        lambda patch: patch.setenv(VARIABLE, "system"),
        lambda patch: patch.setattr(blas._loaded, "keeps_own", True),
        lambda patch: patch.setattr(model_sources, "MIN_ADVISED_PARAMETERS", 10**9),
    ],
)
def test_nothing_is_advised_where_nothing_would_be_gained_or_the_user_has_chosen(change, advised, caplog, monkeypatch):
    change(monkeypatch)
    model_sources._advise_on_blas(llama())
    assert caplog.messages == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of the reference BLAS in MLX's wheel, at a path of its own; its dependencies lie beside it."""
    wheels = Path(mx.__file__).parent.parent / "mlx_cpu.libs"
    where = tmp_path_factory.mktemp("lib")
    for file in wheels.iterdir():
        shutil.copy(file, where / file.name)
    (original,) = where.glob("libblas-*")
    return str(original.rename(where / "libmine.so"))


# --- which library --------------------------------------------------------------------------------


@sweep("machine", ["x86_64", "aarch64"])
def test_a_distributions_places_are_searched_in_order_the_linker_last(machine):
    places, libraries = candidates(machine), {"openblas": "libopenblas.so.0"}
    assert len(set(places)) == len(places)
    assert f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0" == places[0]
    # Fedora's library with threads is taken before the one without.
    assert places.index("/usr/lib64/libopenblasp.so.0") < places.index("/usr/lib64/libopenblas.so.0")
    for i, place in enumerate(places):
        assert choose("openblas", machine, exists=set(places[i:]).__contains__, search=libraries.get) == place
    assert choose("openblas", machine, exists=lambda _: False, search=libraries.get) == "libopenblas.so.0"


@sweep(
    ("wanted", "complaint"),
    [
        ("mkl", r'blas must be "openblas", "system" or the path of a library, got \'mkl\''),
        ("OpenBLAS", "blas must be"),
        ("/no/such/libblas.so", 'there is no BLAS library at /no/such/libblas.so; give the path of one, or "openblas"'),
        ("openblas", "no OpenBLAS was found; install libopenblas0-pthread"),
    ],
)
def test_what_names_no_library_is_refused(wanted, complaint):
    with pytest.raises(runtime.SettingsError, match=complaint):
        choose(wanted, "x86_64", exists=lambda _: False, search=lambda _: None)


# --- names of libraries ---------------------------------------------------------------------------

# Kernels that MLX has compiled are no BLAS.
KERNELS = [
    "libGf4IMinimumKLNf4IMultiply_CCVCCS_u4f4_15363725222986908567_contiguous.so",
    "libGf4ISubtractABHf4IMini_IRf4INegativeQSf4IOpenBlas_CCVCCV_u4f4_15363725_143b34da6607bf3b.so",
]


@sweep(
    ("files", "threads", "name"),
    [
        (["libc.so.6"], None, None),
        (["libblas-bd8a282c.so.3"], None, "reference BLAS (libblas-bd8a282c.so.3)"),
        (["libblas-bd8a282c.so.3", "libopenblasp-r0.3.21.so"], None, "OpenBLAS (libopenblasp-r0.3.21.so)"),
        (["libmkl_rt.so.2", "libblas.so.3"], None, "Intel MKL (libmkl_rt.so.2)"),
        (["libblis.so.4"], None, "BLIS (libblis.so.4)"),
        (["libopenblas.so.0"], 1, "OpenBLAS (libopenblas.so.0, 1 thread)"),
        (["libopenblas.so.0"], 4, "OpenBLAS (libopenblas.so.0, 4 threads)"),
        (KERNELS, None, None),
        ([*KERNELS, "libblas.so.3"], None, "reference BLAS (libblas.so.3)"),
    ],
)
def test_a_blas_is_known_by_its_file(files, threads, name):
    assert describe(files, threads) == name


# --- in a process ---------------------------------------------------------------------------------


@linux
@with_openblas
def test_mlx_calls_openblas_where_that_is_asked_for(tmp_path):
    code = (
        "import json, runtime; from runtime.loading import blas; import mlx.core as mx; a = mx.ones((8, 8))\n"
        "assert (a @ a).tolist() == [[8.0] * 8] * 8\n"
        "print(json.dumps([blas.blas_in_use(), blas.num_loaded_threads()]))"
    )
    # The dynamic linker logs which symbols are bound to which library.
    done = run(code, **{VARIABLE: "openblas", "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")})
    assert (done.returncode, done.stderr) == (0, "")
    bindings = "".join(file.read_text() for file in tmp_path.glob("bindings.*"))
    calls = [line for line in bindings.splitlines() if "libmlx.so" in line and "cblas_sgemm" in line]
    assert calls
    assert all(f"to {openblas()} " in line for line in calls)
    threads = blas.num_usable_cores()
    assert json.loads(done.stdout) == [describe([Path(str(openblas())).name], threads), threads]


# --- too late, or not possible --------------------------------------------------------------------


@pytest.mark.slow
@linux
def test_a_variable_that_comes_after_mlx_is_a_warning_that_names_the_remedy(copy):
    check = "from runtime.loading import blas; blas.check_environment(); print(blas.blas_in_use())"
    code = f"import mlx.core{chr(10)}import runtime; {check}"
    done = run(code, **{VARIABLE: copy})
    assert done.returncode == 0
    assert done.stdout.startswith("reference BLAS")
    (line,) = done.stderr.splitlines()
    # The warning points to the line that imports the package.
    assert line.startswith("<string>:2: RuntimeWarning: OUTRIDER_BLAS=")
    assert "has no effect, since mlx was imported first; import runtime before mlx and mlx_lm" in line


@sweep("command", [["doctor"], ["generate", "x"]])
def test_a_variable_or_a_flag_without_sense_is_one_line_on_a_command_line(command, capfd):
    done = outrider(*command, **{VARIABLE: "/no/such/libblas.so"})
    assert (done.returncode, done.stdout) == (2, "")
    assert cli.main([*command, "--blas", "/no/such/libblas.so"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    for said, begin in ((done.stderr, "outrider: error: OUTRIDER_BLAS: "), (err, "outrider: error: ")):
        assert said.startswith(begin)
        assert said.count("\n") == 1


@linux
def test_a_flag_too_late_or_against_the_environment_is_refused(copy, capfd):
    assert cli.main(["doctor", "--blas", copy]) == 2
    assert "comes too late: mlx is imported already; set OUTRIDER_BLAS" in capfd.readouterr().err
    done = outrider("doctor", "--blas", "system", **{VARIABLE: copy})
    assert done.returncode == 2
    assert f"OUTRIDER_BLAS has loaded {copy}; change or unset it" in done.stderr


@pytest.mark.slow
@linux
def test_the_flag_is_heard_and_the_doctor_names_the_library(copy, tmp_path):
    done = outrider("doctor", save(tmp_path / "model", llama()), "--blas", copy, COLUMNS="200")
    assert done.returncode == 0
    # The machine that runs the tests may be busy, which is said.
    assert all("the machine is busy" in line for line in done.stderr.splitlines())
    assert "linear algebra  libmine.so" in done.stdout
