"""Checks that end as checks of a broken device may: by a signal, not at all, with a status, without a finding."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from runtime.selftest.checks import Finding


def finds(subject: Any) -> Finding:
    return Finding("passed", f"all is well for {subject.seconds:g} s", {"variable": os.environ.get("OUTRIDER_TEST")})


def skips(subject: Any) -> Finding:
    return Finding("skipped", "out of time")


def dies_of_a_signal(subject: Any) -> Finding:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("still alive")


def raises(subject: Any) -> Finding:
    raise RuntimeError("[metal::malloc] at /home/somebody/secret/model.safetensors")


def exits(subject: Any) -> Finding:
    sys.stderr.write("a last word\n")
    sys.exit(3)


def loads(subject: Any) -> Finding:
    return Finding("passed", "the models are loaded", {"device": "cpu"})


def environment(subject: Any) -> Finding:
    names = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
    return Finding("passed", "", {name: os.environ.get(name) for name in names})


def hangs(subject: Any) -> Finding:
    if note := os.environ.get("OUTRIDER_TEST_NOTE"):
        Path(note).write_text(str(os.getpid()))
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def crashes_after_its_finding(subject: Any) -> Finding:
    class Last:
        def __del__(self) -> None:
            os.abort()

    sys.modules["last"] = Last()  # type: ignore[assignment]
    return Finding("passed", "all is well")
