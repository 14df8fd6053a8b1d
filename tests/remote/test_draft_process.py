"""A drafter in a process of its own: real processes, killed and orphaned. `test_link.py` has one that falls silent."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import trio
from completions import open_and_close
from models import greedy
from polling import until_in_trio
from sweeps import sweep

import runtime
from runtime.remote import draft_process

PROMPT = [1, 2, 3, 4, 5]
ASKED: dict[str, Any] = {"lookahead": 3, "ignore_eos": True}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[str, str]:
    """The folders of a target and of a draft model."""
    folder = tmp_path_factory.mktemp("pair")
    target = models.save(folder / "target", models.llama())
    return target, models.save(folder / "draft", models.near(models.llama(), noise=0.05))


def pid_of(rt: runtime.Runtime) -> int:
    (found,) = re.findall(r"process (\d+)", rt._draft._link.name)
    return int(found)


@pytest.mark.slow
async def test_texts_are_the_targets_until_the_process_is_killed_and_after(pair, caplog):
    target, draft = pair
    with trio.fail_after(LIMIT_S):
        async with runtime.open(target, draft, draft_device="cpu") as rt:
            built = models.llama()
            completion = await rt.generate(PROMPT, max_tokens=24, **ASKED)
            assert [token.id for token in completion.tokens] == greedy(built, PROMPT, 24)
            assert completion.statistics.accepted > 0
            drawn = await rt.generate(PROMPT, max_tokens=24, temperature=0.5, acceptance="rejection", seed=1, **ASKED)
            assert drawn.statistics.accepted > 0
            statistics = rt.statistics()
            assert statistics.draft_failures == 0
            assert statistics.draft_busy > 0
            assert statistics.estimates.draft_seconds > 0
            pid = pid_of(rt)
            with caplog.at_level(logging.WARNING, "outrider"):
                async with rt.stream(PROMPT, max_tokens=120, **ASKED) as stream:
                    found = []
                    async for token in stream:
                        found.append(token.id)
                        if token.index == 9:
                            os.kill(pid, signal.SIGKILL)
                            await until_in_trio(lambda: not rt._draft.is_serving)
            assert found == greedy(built, PROMPT, 120)
            assert stream.statistics().draft_failures == 1
            assert f"the drafter is lost: the drafter's process {pid} has ended" in caplog.text
            assert rt.health().draft is False
            await rt.detach_draft()
            await rt.attach_draft(draft)
            assert pid_of(rt) != pid
            assert (await rt.generate(PROMPT, max_tokens=24, **ASKED)).statistics.accepted > 0
            pid = pid_of(rt)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
async def test_a_drafter_that_cannot_be_loaded_is_an_error_of_open(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    Path(tmp_path, "config.json").write_text(Path(draft, "config.json").read_text())
    Path(tmp_path, "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no weights
    complaint = r"the drafter's process \d+ cannot load the drafter: cannot load draft"
    with pytest.raises(runtime.ModelError, match=complaint):
        await open_and_close(target, tmp_path, draft_process=True)


@pytest.mark.slow
def test_the_process_does_not_outlive_a_runtime_that_is_killed() -> None:
    program = (
        "import os, trio\n"
        "from runtime.remote.draft_process import draft_process\n"
        "async def main():\n"
        "    async with draft_process(None) as link:\n"
        "        print(link.name.split()[-1], flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "trio.run(main)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=draft_process.environment())
    out, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == -signal.SIGKILL
    pid = int(out)

    def has_ended() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().split()[2] == "Z"  # nobody has waited for it

    trio.run(until_in_trio, has_ended)


GIVEN = "draft_process loads the draft model in a process of its own, and it was given as a model; give its path"


@sweep(
    ("draft", "options", "expected"),
    [
        ((models.llama(), None), {"draft_process": True}, GIVEN),
        ((models.llama(), None), {"draft_device": "gpu"}, GIVEN),
    ],
)
async def test_what_cannot_be_given_to_a_process_is_refused(draft: Any, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(runtime.SettingsError, match=expected):
        await open_and_close("owner/target", draft, **options)
