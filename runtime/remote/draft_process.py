"""A drafter in a process of its own on this machine: started with the runtime, and ended with it.

A process has one default device in MLX, and one GIL. This module is also that process's program: `python -m
runtime.remote.draft_process SOCKET DEVICE`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from actors.remote.link import LOADING_SILENCE_S, SocketLink
from protocol.drafter_wire import LoadDrafter
from protocol.errors import SettingsError
from runtime.loading.device import use_device
from runtime.loading.model_sources import ModelSource, check_source
from runtime.loading.model_spec import ModelSpec
from runtime.remote.drafting import draft_for

# Seconds in which the process ends by itself once its runtime has closed the link, or has ended.
END_S = 2.0

# Seconds for which one of the process's threads may hold the GIL while another one waits for it.
SWITCH_INTERVAL_S = 1e-4

DEFAULT_DEVICE = "default"

# The folder that has the packages of this project.
_ROOT = Path(__file__).resolve().parents[2]


# --- the runtime's process ------------------------------------------------------------------------


def check_draft_process(target: ModelSource, draft: ModelSource | None) -> None:
    """Raises: SettingsError: a model is given that another process would need, and cannot be handed over to it."""
    if isinstance(draft, tuple):
        raise SettingsError(
            "draft_process loads the draft model in a process of its own, and it was given as a model; give its path "
            "or hub id, or leave draft_process and draft_device out"
        )
    if draft is not None and isinstance(target, tuple) and target[1] is not None:
        raise SettingsError(
            "draft_process compares tokenizers in a process of its own, and the target was given as a model; give "
            "its path or hub id, or leave draft_process and draft_device out"
        )


def described(source: ModelSource) -> dict[str, Any] | None:
    """A model source in a form that the process can read; None for one that was given as a model."""
    if isinstance(source, tuple):
        return None
    spec = source if isinstance(source, ModelSpec) else ModelSpec(source)
    adapter = None if spec.adapter_path is None else os.fspath(spec.adapter_path)
    return {**attrs.asdict(spec, recurse=False), "path": os.fspath(spec.path), "adapter_path": adapter}


def environment() -> dict[str, str]:
    """The environment of a process that finds the same modules as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)])}


@asynccontextmanager
async def draft_process(device: str | None) -> AsyncIterator[SocketLink]:
    """A process that can draft, and the link to it; `device` is MLX's default there, None for MLX's own choice. On
    leaving, and when this process ends in any way, it ends; it is killed if it does not within `END_S`.
    """
    near, far = socket.socketpair()
    link = SocketLink(near, "the drafter's process", LOADING_SILENCE_S)
    try:
        with far:
            process = await trio.lowlevel.open_process(
                # -P: otherwise Python would search the working directory for modules first.
                [sys.executable, "-P", "-m", __name__, str(far.fileno()), device or DEFAULT_DEVICE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(far.fileno(),),
                start_new_session=True,  # a Ctrl-C in a terminal is for the runtime
                env=environment(),
            )
    except BaseException:
        link.close()
        raise
    assert process.stdin is not None
    link.name = f"the drafter's process {process.pid}"
    try:
        yield link
    finally:
        link.close()
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(0.0 if link.is_silent else END_S):
                await process.wait()
            process.kill()  # harmless if it has ended
            await process.wait()


# --- the drafter's process ------------------------------------------------------------------------


def _source(role: str, said: dict[str, Any] | None) -> ModelSource | None:
    return None if said is None else check_source(role, ModelSpec(**said))


def _end_with_the_runtime() -> None:
    while os.read(0, 1):  # not by `sys.stdin`, which the interpreter locks as it exits
        continue
    time.sleep(END_S)
    os._exit(1)


def main(descriptor: str, device: str) -> None:
    """Draft for the runtime at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A message must not wait until the model's thread has built the graph of a pass, which holds the GIL.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.Thread(target=_end_with_the_runtime, daemon=True).start()
    link = SocketLink(socket.socket(fileno=int(descriptor)), "the runtime")
    trio.run(_main, link, None if device == DEFAULT_DEVICE else device)


async def _main(link: SocketLink, device: str | None) -> None:
    def sources(load: LoadDrafter) -> tuple[ModelSource | None, ModelSource | None]:
        use_device(device, "draft_device")
        return _source("target", load.target), _source("draft", load.draft)

    await draft_for(link, sources, forwards_warnings=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
