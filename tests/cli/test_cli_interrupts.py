"""Ctrl-C on the command line: from the first import on it ends quietly, and says what it waits for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import trio
from command_line import ROOT, at_a_terminal, environment
from sweeps import sweep

import runtime
from runtime.terminal.display import CommandOutcome, Display
from runtime.terminal.signals import ACKNOWLEDGE_S, SignalScope, exit_on_signal

# The source of modules whose import is interrupted by Ctrl-C.
INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit('the signal was not heard')\n"
COMMANDS = (("generate", "hi"), ("chat",), ("serve", "--port", "0"), ("doctor",), ("bench",))
AS_MODULE, AS_SCRIPT = ("-m", "runtime"), ("-c", "from runtime.__main__ import main; main()")


@sweep(
    ("module", "start", "command"),
    [
        *(("attrs", AS_MODULE, COMMANDS[0]), ("argparse", AS_SCRIPT, COMMANDS[0]), ("trio", AS_MODULE, COMMANDS[0])),
        *(("mlx", AS_MODULE, command) for command in COMMANDS),
    ],
)
def test_ctrl_c_during_an_import_ends_it_quietly(module, start, command, tmp_path):
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    assert ended(tmp_path, *start, *command) == (130, "", "")


def test_importing_the_package_takes_next_to_nothing_along():
    heavy = "{'attrs', 'trio', 'mlx', 'rich', 'argparse', 'pathlib', 'ctypes', 'typing', 're', 'enum'}"
    code = f"import sys; import runtime; print({heavy} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"


def test_whoever_ignores_ctrl_c_in_the_background_goes_on_doing_so():
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['outrider', '--version'];"
        "from runtime.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    found = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "True"


def ended(first: Path, *arguments: str) -> tuple[int, str, str]:
    """Run Python with a directory that comes first in its module search. Returns its exit status, stdout and stderr."""
    env = environment() | {"PYTHONPATH": f"{first}{os.pathsep}{ROOT}"}
    how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60, "check": False}
    process = subprocess.run([sys.executable, *arguments], env=env, **how)
    return process.returncode, process.stdout, process.stderr


# --- waiting --------------------------------------------------------------------------------------


class Still(Display):
    """A display without animation."""

    def _show(self, description: str, num_tokens: int | None, *, moves: bool = True) -> None:
        pass


async def interrupted(display: Display, waits_s: float) -> CommandOutcome:
    """Interrupt work that takes `waits_s` seconds to end."""
    outcome = CommandOutcome()

    async def work() -> None:
        with trio.CancelScope(shield=True):
            signal.raise_signal(signal.SIGINT)
            await trio.sleep(waits_s)
        await trio.sleep_forever()

    await SignalScope(outcome, display).run(work)
    return outcome


LOADING = "stopping once the models are loaded"
READING = "stopping after the forward pass that is running"


@sweep(
    ("show", "waits_s", "said"),
    [
        (lambda display: display.show_loading([runtime.DEMO_TARGET]), 2 * ACKNOWLEDGE_S, LOADING),
        (lambda display: display.show_prefill(5000, 2048), 2 * ACKNOWLEDGE_S, READING),
        (lambda display: display.show_activity("timing"), 2 * ACKNOWLEDGE_S, "stopping once this is over: timing"),
        (lambda display: display.show_prefill(5000, 2048), ACKNOWLEDGE_S / 2, None),
    ],
)
async def test_the_first_ctrl_c_says_what_is_waited_for_unless_that_is_soon_over(
    show, waits_s, said, autojump_clock, monkeypatch
):
    display = Still()
    with at_a_terminal(monkeypatch, "stderr") as screen:
        show(display)
        assert (await interrupted(display, waits_s)).signal == signal.SIGINT
    assert screen.text == ("" if said is None else f"outrider: {said}; Ctrl-C again quits at once\r\n")


def test_a_signal_that_nobody_else_handles_clears_the_screen_and_quits():
    cleared: list[str] = []
    statuses: list[int] = []
    display = Display()
    display.clear = lambda: cleared.append("cleared")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with exit_on_signal(display, exit_now=statuses.append):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert (statuses, cleared) == ([130, 143], ["cleared"] * 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
