"""What large and many requests cost a server and its other clients: `python tests/support/attacks.py` prints it.

Each attack is on a server of its own with the demo pair. Meanwhile another client asks `/health` and for two tokens,
again and again, and its longest waits are printed beside the memory that the server has taken.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import httpx
import openai
from raw_http import request
from served_command import MODEL, Server, serving

TWO_TOKENS = {"prompt": "def f", "max_tokens": 2, "ignore_eos": True}
LARGE = 1_900_000  # bytes; the longest body has 2 MiB
PAUSE_S = 0.02


@attrs.define
class Waits:
    """The longest waits of another client, in seconds, and how often it was refused two tokens."""

    health: float = 0.0
    tokens: float = 0.0
    num_refused: int = 0


def memory(server: Server) -> float:
    """In MB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1000


async def ask_on(server: Server, waits: Waits) -> None:
    """Ask for two tokens and for the health, again and again, until cancelled."""

    async def tokens(client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            answer = await client.post("v1/completions", json=TWO_TOKENS)
            waits.tokens = max(waits.tokens, time.monotonic() - began)
            waits.num_refused += answer.status_code != 200
            await asyncio.sleep(PAUSE_S)

    async def health(client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            await client.get("health")
            waits.health = max(waits.health, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await asyncio.gather(tokens(client), health(client))


def address(server: Server) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


async def unfinished_bodies(server: Server) -> str:
    """300 connections, each with a body of 1.9 MB whose last byte does not come."""
    whole = request("POST", "/v1/completions", b" " * LARGE)
    open_connections = []
    num_taken = 0

    async def one() -> None:
        nonlocal num_taken
        _, writer = await asyncio.open_connection(*address(server))
        open_connections.append(writer)
        writer.write(whole[:-1])
        await writer.drain()
        num_taken += 1

    before = memory(server)
    sending = asyncio.gather(*(one() for _ in range(300)))
    most = 0.0
    for _ in range(100):
        await asyncio.sleep(0.1)
        most = max(most, memory(server))
    sending.cancel()
    for writer in open_connections:
        writer.close()
    return f"{most - before:.0f} MB more in 10 s; {num_taken} bodies taken from their senders' buffers"


async def prompts_of_blanks(server: Server) -> str:
    """Eight prompts of 1.9 MB of blanks at once."""
    return await posted(server, [json.dumps({"prompt": " " * LARGE, "max_tokens": 1}).encode()] * 8)


async def many_ids(server: Server) -> str:
    """Prompts of 620,000 token ids, one after the other."""
    body = json.dumps({"prompt": [17] * 620_000, "max_tokens": 1}, separators=(",", ":")).encode()
    return "; ".join([await posted(server, [body]) for _ in range(3)])


async def posted(server: Server, bodies: list[bytes]) -> str:
    before, began = memory(server), time.monotonic()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        headers = {"content-type": "application/json"}
        asked = [client.post("v1/completions", content=body, headers=headers) for body in bodies]
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
    lasted = time.monotonic() - began
    return f"{statuses} in {lasted:.2f} s, {memory(server) - before:.0f} MB more"


async def many_clients(server: Server) -> str:
    """60 requests at once, of OpenAI's client with its default retries."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}v1", api_key="none") as client:
        asked = [client.completions.create(model=MODEL, prompt=f"def f{i}", max_tokens=24) for i in range(60)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    return f"{sum(not isinstance(answer, BaseException) for answer in answers)} of 60 answered"


async def under(attack: Callable[[Server], Awaitable[str]], server: Server) -> None:
    waits = Waits()
    other = asyncio.create_task(ask_on(server, waits))
    await asyncio.sleep(1)
    quiet, waits.health, waits.tokens = (waits.health, waits.tokens), 0.0, 0.0
    said = await attack(server)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    print(f"{attack.__name__}: {said}")
    print(f"  longest wait for /health {waits.health:.2f} s (before {quiet[0]:.2f})")
    print(f"  for two tokens {waits.tokens:.2f} s (before {quiet[1]:.2f}), {waits.num_refused} refused", flush=True)


if __name__ == "__main__":
    for attack in (unfinished_bodies, prompts_of_blanks, many_ids, many_clients):
        with serving() as server:
            asyncio.run(under(attack, server))
