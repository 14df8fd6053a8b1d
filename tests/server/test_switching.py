"""Three real models of which two fit in memory, over HTTP, and clients that come and go: right texts, and no growth."""

import os
import random
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from models import llama, qwen3, save
from polling import until_in_trio
from raw_http import ACCESS_LINE, ask, connect, request
from served_command import serving

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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The three models, of which one has a drafter, for `--config`."""
    tables = []
    for seed, (name, make) in enumerate(zip(NAMES, (llama, qwen3, llama), strict=True), 1):
        save(tmp_path / name, make(seed, **SIZES))
        tables.append(f'[models.{name}]\ntarget = "{name}"\nprefix_cache_bytes = {PREFIX_CACHE_BYTES}\n')
    save(tmp_path / "small", llama(4))
    (tmp_path / "models.toml").write_text("\n".join(tables) + 'draft = "small"\n')
    return tmp_path / "models.toml"


@pytest.fixture
def texts(config: Path) -> dict[tuple[str, str], str]:
    """What each model says to each prompt."""
    said = partial(runtime.generate_sync, max_tokens=NUM_TOKENS, ignore_eos=True)
    return {(name, prompt): said(prompt, target=config.parent / name).text for name in NAMES for prompt in PROMPTS}


async def visit(port: int, texts: dict[tuple[str, str], str], dice: random.Random) -> str:
    """Be a client in some way; returns what was wrong with the answer, if anything."""
    name, prompt = dice.choice([*texts])
    [plan] = dice.choices([*PLANS], [*PLANS.values()])
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    if plan == "unknown":
        answer = await ask(port, request("POST", "/v1/completions", {**body, "model": "none"}))
        return "" if answer.status == 404 else f"an unknown model got {answer}"
    if plan in ("whole", "stream"):
        answer = await ask(port, request("POST", "/v1/completions", {**body, "stream": plan == "stream"}))
        is_right = answer.status == 200 and answer.text == texts[name, prompt]
        return "" if is_right else f"{name} got {answer}, not {texts[name, prompt]!r}"
    with await connect(port) as client:
        if plan == "garbage":
            with suppress(trio.BrokenResourceError):
                await client.send(request("POST", "/v1/completions", dice.randbytes(200)))
                if (answer := await client.answer()) is None or answer.status != 400:
                    return f"garbage got {answer}"
        else:
            long = {**body, "prompt": " ".join([prompt] * 40), "max_tokens": 400, "stream": True}
            data = request("POST", "/v1/completions", long, chunks=dice.choice([None, 10]))
            await client.send(data if plan == "leave" else data[: dice.randrange(len(data))])
            # While the model waits for room, while it loads, or in the middle of the text.
            await trio.sleep(dice.choice([0, 0.05, 0.3, 1]) * dice.random())
            dice.choice([client.leave, client.reset])()
    return ""


async def memory_bytes(port: int) -> float:
    """Bytes of MLX's arrays in the server."""
    metrics = (await ask(port, request("GET", "/metrics"))).body.decode()
    return float(re.search(r"^outrider_memory_bytes (\S+)$", metrics, re.MULTILINE)[1])


@pytest.mark.slow
async def test_clients_that_switch_and_leave_get_the_right_texts_and_leave_nothing(config, texts):
    memory_limit = int(2.7 * max(each.stat().st_size for each in config.parent.glob("*/model.safetensors")))
    problems, resident, in_mlx = [], [], []
    numbers = iter(range(NUM_REQUESTS))

    async def come_and_go(client: int) -> None:
        dice = random.Random(f"1 {client}")
        for _ in numbers:
            problems.append(await visit(port, texts, dice))
            pages = (proc / "statm").read_text().split()[1]
            resident.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
            in_mlx.append(await memory_bytes(port))

    def num_files() -> int:
        return len(os.listdir(proc / "fd"))

    limits = ("--memory-limit", str(memory_limit), "--max-streams", "4", "--stalled-seconds", "5")
    with trio.fail_after(600), serving("--config", str(config), *limits) as server:
        port, proc = int(server.url.rstrip("/").rpartition(":")[2]), Path(f"/proc/{server.process.pid}")
        num_before = num_files()
        async with trio.open_nursery() as nursery:
            for client in range(NUM_CLIENTS):
                nursery.start_soon(come_and_go, client)
        server.until_idle()
        # The connection over which the server was asked just now may not have been heard to end.
        await until_in_trio(lambda: num_files() <= num_before + 1)
        assert [problem for problem in problems if problem] == []
        assert sum("loading model" in line for line in server.said) > 6
        assert max(resident[WARM_UP:]) <= max(resident[:WARM_UP]) + GROWTH_BYTES
        # A model is loaded beside at most two others, and caches of running texts come on top.
        assert max(in_mlx) <= 2 * memory_limit
        lines = [line.rstrip("\n") for line in server.said if "; Ctrl-C stops it" not in line]
        assert [line for line in lines if not (ACCESS_LINE.fullmatch(line) or _LOAD_LINE.fullmatch(line))] == []
        server.process.terminate()
        assert server.ends() == 0
