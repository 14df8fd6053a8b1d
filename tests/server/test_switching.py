"""Three real models of which two fit in memory, over HTTP, and clients that come and go: right texts, and no growth."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from models import llama, qwen3, save
from polling import until_in_trio
from raw_http import ACCESS_LINE, ask, connect, request
from served_command import Server, serving

import runtime

NUM_REQUESTS = 80
NUM_CLIENTS = 6

# Requests after which the server's size counts, and how much it may grow from then on: buffers of MLX for one model.
WARM_UP = 30
GROWTH_BYTES = 24 * 2**20


NAMES = ("llama", "qwen3", "drafted")
# What a client does, and how often it does it.
PLANS = {"whole": 4, "stream": 4, "leave": 5, "leave in the request": 1, "garbage": 1, "unknown": 1}
PROMPTS = ("w3 w1 w4", "w1 w5 w9 w2", "w6 w5 w3 w5 w8")
NUM_TOKENS = 12
SIZES = {"hidden_size": 256, "intermediate_size": 512}

# What the caches of each model may keep of texts that are over.
PREFIX_CACHE_BYTES = 2**20

_LOAD_LINE = re.compile(r"outrider: (loading model \w+|model \w+ is unloaded|\S+ decodes without a drafter; .*)")


@attrs.frozen
class Models:
    """Three models on disk, for `--config`, the memory for two of them, and what each says to each prompt."""

    config: Path
    memory_limit: int
    texts: Mapping[tuple[str, str], str]


def save_models(folder: Path) -> Models:
    paths = {
        "llama": save(folder / "llama", llama(1, **SIZES)),
        "qwen3": save(folder / "qwen3", qwen3(2, **SIZES)),
        "drafted": save(folder / "drafted", llama(3, **SIZES)),
    }
    draft = save(folder / "small", llama(4))
    tables = [
        f'[models.{name}]\ntarget = "{Path(path).name}"\nprefix_cache_bytes = {PREFIX_CACHE_BYTES}\n'
        + ('draft = "small"\n' if name == "drafted" else "")
        for name, path in paths.items()
    ]
    config = folder / "models.toml"
    config.write_text("\n".join(tables))
    sizes = [(Path(path) / "model.safetensors").stat().st_size for path in (*paths.values(), draft)]
    texts = {
        (name, prompt): runtime.generate_sync(prompt, target=path, max_tokens=NUM_TOKENS, ignore_eos=True).text
        for name, path in paths.items()
        for prompt in PROMPTS
    }
    return Models(config, int(2.7 * max(sizes)), texts)


@attrs.define
class Observations:
    """What the clients have seen, and the memory of the server and of MLX in it after each request."""

    problems: list[str] = attrs.Factory(list)
    resident_bytes: list[int] = attrs.Factory(list)
    memory_bytes: list[float] = attrs.Factory(list)


@attrs.define
class Switching:
    """A server of the models in a process of its own, as far as its memory and files can be looked at."""

    child: Server

    @property
    def port(self) -> int:
        return int(self.child.url.rstrip("/").rpartition(":")[2])

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.child.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_loads(self) -> int:
        return sum("loading model" in line for line in self.child.said)

    @property
    def complaints(self) -> list[str]:
        """What it has said beside where it is and the log of requests and loads."""
        lines = [line.rstrip("\n") for line in self.child.said if "; Ctrl-C stops it" not in line]
        return [line for line in lines if not (ACCESS_LINE.fullmatch(line) or _LOAD_LINE.fullmatch(line))]


@contextmanager
def served(models: Models) -> Iterator[Switching]:
    """The server, which SIGTERM must end with status 0."""
    limits = ("--memory-limit", str(models.memory_limit), "--max-streams", "4", "--stalled-seconds", "5")
    with serving("--config", str(models.config), *limits) as child:
        yield Switching(child)
        child.process.terminate()
        assert child.ends() == 0


async def switch(
    server: Switching, models: Models, *, num_clients: int, goes_on: Callable[[int], bool], seed: int
) -> Observations:
    """Have clients ask for the models in turns; `goes_on` says by its number whether a request is sent."""
    observed, number = Observations(), 0

    async def come_and_go(client: int) -> None:
        nonlocal number
        dice = random.Random(f"{seed} {client}")
        while goes_on(number):
            number += 1
            await _visit(server, models, observed, dice)
            observed.resident_bytes.append(server.resident_bytes)
            observed.memory_bytes.append(await memory_bytes(server))

    async with trio.open_nursery() as nursery:
        for client in range(num_clients):
            nursery.start_soon(come_and_go, client)
    return observed


async def _visit(server: Switching, models: Models, observed: Observations, dice: random.Random) -> None:
    name, prompt = dice.choice(NAMES), dice.choice(PROMPTS)
    [plan] = dice.choices([*PLANS], [*PLANS.values()])
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    if plan == "unknown":
        answer = await ask(server.port, request("POST", "/v1/completions", {**body, "model": "none"}))
        if answer.status != 404:
            observed.problems.append(f"an unknown model got {answer}")
    elif plan == "garbage":
        with await connect(server.port) as client, suppress(trio.BrokenResourceError):
            await client.send(request("POST", "/v1/completions", dice.randbytes(200)))
            if (answer := await client.answer()) is None or answer.status != 400:
                observed.problems.append(f"garbage got {answer}")
    elif plan in ("leave", "leave in the request"):
        with await connect(server.port) as client:
            long = {**body, "prompt": " ".join([prompt] * 40), "max_tokens": 400, "stream": True}
            data = request("POST", "/v1/completions", long, chunks=dice.choice([None, 10]))
            await client.send(data if plan == "leave" else data[: dice.randrange(len(data))])
            # While the model waits for room, while it loads, or in the middle of the text.
            await trio.sleep(dice.choice([0, 0.05, 0.3, 1]) * dice.random())
            dice.choice([client.leave, client.reset])()
    else:
        answer = await ask(server.port, request("POST", "/v1/completions", {**body, "stream": plan == "stream"}))
        if answer.status != 200 or answer.text != models.texts[name, prompt]:
            observed.problems.append(f"{name} got {answer}, not {models.texts[name, prompt]!r}")


async def memory_bytes(server: Switching) -> float:
    """Bytes of MLX's arrays in the server."""
    metrics = (await ask(server.port, request("GET", "/metrics"))).body.decode()
    found = re.search(r"^outrider_memory_bytes (\S+)$", metrics, re.MULTILINE)
    return float(found[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("switching"))


@pytest.mark.slow
async def test_clients_that_switch_and_leave_get_the_right_texts_and_leave_nothing(models: Models) -> None:
    with trio.fail_after(600):
        with served(models) as server:
            num_files = server.num_files
            seen = await switch(
                server, models, num_clients=NUM_CLIENTS, goes_on=lambda number: number < NUM_REQUESTS, seed=1
            )
            server.child.until_idle()
            # The connection over which the server was asked just now may not have been heard to end.
            await until_in_trio(lambda: server.num_files <= num_files + 1)
            assert seen.problems == []
            assert server.num_loads > 6
            assert max(seen.resident_bytes[WARM_UP:]) <= max(seen.resident_bytes[:WARM_UP]) + GROWTH_BYTES
            # A model is loaded beside at most two others, and caches of running texts come on top.
            assert max(seen.memory_bytes) <= 2 * models.memory_limit
            assert server.complaints == []
