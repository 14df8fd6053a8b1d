"""Many clients with realistic behaviour on a real server with the demo pair.

Each client follows a random plan: it streams to the end, leaves at any moment, sends garbage, or reads slowly. The
models are copies in float32: in bfloat16 on CPU, a text can depend on the width of the passes that made it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import trio
from raw_http import ACCESS_LINE, Client, ask, connect, request

from runtime.loading.demo import DEMO_DRAFT, DEMO_PROMPTS, DEMO_TARGET

MAX_STREAMS = 4
STALLED_S = 5
PREFILL_STEP_SIZE = 64

# Pause between two visits. Without a pause, a client would take again the place that it has just left, and clients that
# were told to retry would always find the server full.
MAX_PAUSE_S = 2


# --- the server -----------------------------------------------------------------------------------


def exact_copy(model: Path, where: Path) -> Path:
    """In float32."""
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
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

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
async def served(*arguments: str, target: Path = DEMO_TARGET) -> AsyncIterator[Server]:
    """A server of a target and the demo drafter in float32; see `serving`."""
    with tempfile.TemporaryDirectory() as folder:
        copies = [exact_copy(model, Path(folder) / role) for role, model in (("target", target), ("draft", DEMO_DRAFT))]
        models = ["--target", str(copies[0]), "--draft", str(copies[1])]
        async with serving(*models, "--prefill-step-size", str(PREFILL_STEP_SIZE), *arguments) as server:
            yield server


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


# --- requests -------------------------------------------------------------------------------------


def request_body(number: int) -> dict[str, Any]:
    """The body of request `number`; the same each time."""
    dice = random.Random(number)
    prompt = dice.choice(DEMO_PROMPTS) + "".join(
        f"    {dice.choice(['x', 'y', 'total', 'items'])} = {dice.randrange(100)}\n" for _ in range(dice.randrange(4))
    )
    sampled = {"temperature": 0.8, "seed": number} if dice.random() < 0.5 else {}
    return {"prompt": prompt, "max_tokens": dice.randint(4, 24), **sampled}


def long_prompt(dice: random.Random) -> str:
    """A prompt that needs several prefill passes and is not cached."""
    return "".join(f"value_{dice.randrange(10**6)} = {dice.randrange(10**6)}\n" for _ in range(30))


# --- clients --------------------------------------------------------------------------------------


@attrs.define
class Observations:
    """Observations of all clients.

    Attributes:
        texts: finished texts, counted, by the number of the request.
        max_resident_bytes, max_threads: of the server, measured twice a second.
    """

    statuses: Counter[int] = attrs.Factory(Counter)
    texts: dict[int, Counter[str]] = attrs.Factory(dict)
    problems: list[str] = attrs.Factory(list)
    max_resident_bytes: int = 0
    max_threads: int = 0


class _RetryLater(Exception):
    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


@attrs.define
class Visitor:
    """A client."""

    server: Server
    observed: Observations
    dice: random.Random
    num_requests: int
    doing: str = "nothing"

    async def visit(self) -> None:
        """Follow a random plan, and repeat it while the server says that it is full."""
        plans = {
            self.read_whole: 2,
            self.read_stream: 5,
            self.read_slowly: 1,
            self.leave_early: 2,
            self.leave_waiting: 2,
            self.leave_long_prompt: 2,
            self.leave_in_answer: 4,
            self.send_garbage: 1,
        }
        [plan] = self.dice.choices(list(plans), list(plans.values()))
        number = self.dice.randrange(self.num_requests)
        for attempt in itertools.count(1):
            self.doing = f"{plan.__name__}({number}), attempt {attempt}"
            try:
                await plan(number)
            except _RetryLater as error:
                self.doing += f", told to wait for {error.after_s} s"
                await trio.sleep(error.after_s * self.dice.uniform(1, 1.5))
            else:
                return

    async def read_whole(self, number: int) -> None:
        with await connect(self.server.port) as client:
            await client.send(request("POST", "/v1/completions", request_body(number)))
            answer = await client.answer()
            if answer is None or not answer.is_whole:
                self.observed.problems.append(f"no whole answer to {number}: {answer}")
                return
            self._check(answer.status, answer.headers)
            self.observed.texts.setdefault(number, Counter())[answer.text] += 1

    async def read_stream(self, number: int) -> None:
        with await connect(self.server.port) as client:
            await self._read(client, number, pause_s=0)

    async def read_slowly(self, number: int) -> None:
        with await connect(self.server.port, buffer_bytes=2048) as client:
            await self._read(client, number, pause_s=self.dice.uniform(0, 0.5))

    async def leave_early(self, number: int) -> None:
        data = request("POST", "/v1/completions", request_body(number), chunks=self.dice.choice([None, 10]))
        with await connect(self.server.port) as client:
            await client.send(data[: self.dice.randrange(len(data))])
            await self._leave(client)

    async def leave_waiting(self, number: int) -> None:
        with await connect(self.server.port) as client:
            await client.send(
                request("POST", "/v1/completions", {**request_body(number), "stream": self.dice.random() < 0.5})
            )
            await trio.sleep(self.dice.uniform(0, 1))
            await self._leave(client)

    async def leave_long_prompt(self, number: int) -> None:
        with await connect(self.server.port) as client:
            prompt = long_prompt(self.dice)
            await client.send(request("POST", "/v1/completions", {"prompt": prompt, "stream": True}))
            await self._begin(client)
            await client.event()
            await trio.sleep(self.dice.uniform(0, 10))
            await self._leave(client)

    async def leave_in_answer(self, number: int) -> None:
        with await connect(self.server.port) as client:
            await client.send(
                request("POST", "/v1/completions", {**request_body(number), "max_tokens": 200, "stream": True})
            )
            await self._begin(client)
            for _ in range(self.dice.randrange(1, 8)):
                await client.event()
            await self._leave(client)

    async def send_garbage(self, number: int) -> None:
        with await connect(self.server.port) as client, suppress(trio.BrokenResourceError):
            kind = self.dice.randrange(3)
            if kind == 0:
                await client.send(self.dice.randbytes(self.dice.randrange(1, 3000)) + b"\r\n\r\n")
            elif kind == 1:
                await client.send(request("POST", "/v1/completions", self.dice.randbytes(200)))
            else:
                body = {**request_body(number), self.dice.choice(["temperature", "max_tokens", "seed"]): ["no"] * 3}
                await client.send(request("POST", "/v1/completions", body))
            answer = await client.answer()
            if answer is None or answer.status not in (400, 429, 431):
                self.observed.problems.append(f"garbage got {answer}")

    async def _begin(self, client: Client) -> None:
        head = await client.head()
        if head is None:
            self.observed.problems.append("no answer came")
        else:
            self._check(*head)

    async def _read(self, client: Client, number: int, *, pause_s: float) -> None:
        await client.send(request("POST", "/v1/completions", {**request_body(number), "stream": True}))
        await self._begin(client)
        text, reason = "", None
        while (event := await client.event()) is not None:
            if event.startswith("data: "):
                [choice] = json.loads(event[6:])["choices"]
                text, reason = text + choice["text"], choice["finish_reason"]
            if pause_s:
                await trio.sleep(pause_s)
        if reason is None:
            self.observed.problems.append(f"the stream of {number} has no end: {text!r}")
        self.observed.texts.setdefault(number, Counter())[text] += 1

    def _check(self, status: int, headers: Any) -> None:
        self.observed.statuses[status] += 1
        if status == 429:
            raise _RetryLater(float(headers["retry-after"]))
        if status != 200:
            self.observed.problems.append(f"status {status}")

    async def _leave(self, client: Client) -> None:
        self.dice.choice([client.leave, client.reset])()


async def storm(server: Server, *, seconds: float, num_clients: int, seed: int, num_requests: int) -> Observations:
    """Run many clients on a server, whose visits begin during some seconds."""
    observed, began = Observations(), time.monotonic()

    async def come_and_go(number: int) -> None:
        visitor = Visitor(server, observed, random.Random(seed * 100_003 + number), num_requests)
        await trio.sleep(visitor.dice.uniform(0, MAX_PAUSE_S))
        while time.monotonic() < began + seconds:
            # End the test even if the server never responds.
            with trio.move_on_after(300) as patience:
                await visitor.visit()
            # Newcomers may take each free place before a client that was told to retry.
            if patience.cancelled_caught and "told to wait" not in visitor.doing:
                observed.problems.append(f"after 300 s a visitor was at {visitor.doing}")
            await trio.sleep(visitor.dice.uniform(0, MAX_PAUSE_S))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_take_samples, server, observed)
        async with trio.open_nursery() as visitors:
            for number in range(num_clients):
                visitors.start_soon(come_and_go, number)
        nursery.cancel_scope.cancel()
    return observed


async def _take_samples(server: Server, observed: Observations) -> None:
    while True:
        state = await server.health()
        if not state["ok"] or state["streams"] > MAX_STREAMS:
            observed.problems.append(f"the server says {state}")
        observed.max_resident_bytes = max(observed.max_resident_bytes, server.resident_bytes)
        observed.max_threads = max(observed.max_threads, server.num_threads)
        await trio.sleep(0.5)


# --- after the storm ------------------------------------------------------------------------------


async def nobody_left(server: Server) -> None:
    """Wait until no stream runs or waits."""
    while (state := await server.health())["streams"] or state["waiting"]:
        pass


async def wrong_texts(server: Server, observed: Observations) -> list[str]:
    """The finished texts that differ from the result of the same request alone."""
    wrong = []
    for number, texts in observed.texts.items():
        alone = (await ask(server.port, request("POST", "/v1/completions", request_body(number)))).text
        wrong += [f"request {number}: {text!r}, alone {alone!r}" for text in texts if text != alone]
    return wrong
