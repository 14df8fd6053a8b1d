"""What `outrider distill` prints at the end: the acceptance of the best drafter, and what became of the training."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from command_line import ran

from protocol.errors import SettingsError
from runtime.distill import distillation
from runtime.distill.evaluation import AcceptanceRates, Evaluation


def evaluation(share: float, *, is_best: bool) -> Evaluation:
    every = AcceptanceRates((share, 0.5, 0.25), (0.75, 0.625, 0.5))
    return Evaluation(
        batches=4,
        tokens=16384,
        minutes=1.5,
        loss=2.0,
        acceptance={"all": every, "rewrite": every},
        accepted=every.num_accepted,
        learning_rate=1e-3,
        is_best=is_best,
    )


def distilled(
    capture: Any, monkeypatch: pytest.MonkeyPatch, out: Path, training: Callable[[Any], Any], status: int = 0
) -> list[str]:
    """The lines that the command prints about a training."""

    async def distill(options: Any, *, on_progress: Any, on_evaluation: Any) -> None:
        await training(on_evaluation)

    monkeypatch.setattr(distillation, "distill", distill)
    printed = ran(capture, "distill", "--target", "demo", "--data", "a.txt", "--out", str(out), status=status)
    return [line.removeprefix("outrider: ") for line in printed.err.splitlines()]


def test_the_best_drafter_is_shown_by_category(tmp_path, capfd, monkeypatch):
    async def training(on_evaluation: Any) -> None:
        on_evaluation(evaluation(0.875, is_best=True))
        on_evaluation(evaluation(0.5, is_best=False))

    first, second, *table, last = distilled(capfd, monkeypatch, tmp_path, training)
    assert first == (
        "1.5 min, 16,384 tokens: loss 2.000, acceptance of each draft on held-out text 0.875 0.500 0.250, "
        "1.42 of 3 in all, the best so far"
    )
    assert "best" not in second
    rates = "held-out text: 0.875 0.500 0.250 accepted of each draft, 0.750 0.625 0.500 at temperature 0.7"
    assert table == [f"all     {rates}", f"rewrite {rates}"]
    assert last == f"the drafter is in {tmp_path}"


def test_a_training_that_cannot_be_saved_after_a_signal_says_so(tmp_path, capfd, monkeypatch):
    async def training(on_evaluation: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()
        finally:
            raise SettingsError("the checkpoint cannot be written: No space left on device")

    assert distilled(capfd, monkeypatch, tmp_path, training, status=130) == [
        "stopped: the checkpoint cannot be written: No space left on device"
    ]
