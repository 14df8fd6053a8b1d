"""`outrider serve` as a process, as far as its memory, files and threads can be looked at, and models in float32."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import trio
from raw_http import ACCESS_LINE, ask, request

MAX_STREAMS = 4
STALLED_S = 5


def exact_copy(model: Path, where: Path) -> Path:
    """A copy in float32: in bfloat16 on a CPU, a text can depend on the width of the passes that made it."""
    shutil.copytree(model, where)
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    exact = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(where / "model.safetensors"), exact, {"format": "mlx"})
    return where


@attrs.define
class Server:
    """A server in a process of its own, and the lines that it has written to stderr; the first contains its address."""

    port: int
    process: trio.Process
    said: list[str]

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def complaints(self) -> list[str]:
        """Lines on stderr other than the access log's entries for requests that did not fail on the server."""
        return [line for line in self.said if not (ACCESS_LINE.fullmatch(line) or line.endswith("; Ctrl-C stops it"))]

    async def health(self) -> dict[str, Any]:
        answer = await ask(self.port, request("GET", "/health"))
        state: dict[str, Any] = answer.json()
        return state


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[Server]:
    """`outrider serve` with some arguments. SIGTERM on exit must end it with status 0."""
    command = [sys.executable, "-m", "runtime", "serve", "--port", "0", "--max-streams", str(MAX_STREAMS)]
    command += ["--stalled-seconds", str(STALLED_S), *arguments]
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(trio.run_process, command, stderr=subprocess.PIPE, check=False)
        )
        assert process.stderr is not None
        said: list[str] = []
        port, lines = None, _lines(process.stderr)
        async for line in lines:
            said.append(line)
            if (found := re.search(r"http://127.0.0.1:(\d+)/", line)) is not None:
                port = int(found[1])
                break
        assert port is not None, f"the server did not start: {said}"

        async def listen() -> None:
            async for line in lines:
                said.append(line)

        nursery.start_soon(listen)
        try:
            yield Server(port, process, said)
        finally:
            process.terminate()
    assert process.returncode == 0, f"the server ended with {process.returncode}: {said}"


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    rest = b""
    async for data in stream:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()


async def nobody_left(server: Server) -> None:
    """Wait until no stream runs or waits."""
    while (state := await server.health())["streams"] or state["waiting"]:
        pass
