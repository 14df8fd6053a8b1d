"""Saved streams: a text that is saved in its middle goes on as if it had never been in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.nn as nn
import pytest
from architectures import build
from models import VOCAB_SIZE, gemma3_text, llama, near

import runtime
from protocol.replay import ReplayDebt

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_TOKENS = 24
CUTS = (0, 7, 23)


@attrs.frozen
class Pair:
    """Two models, made anew for each runtime, as they would be in another process."""

    make: Callable[[], nn.Module]

    def open(self, *, tokenizer: Any = None, drafted: bool = True, **options: Any) -> Any:
        target = self.make()
        draft = (near(target, noise=0.05), tokenizer) if drafted else None
        return runtime.open((target, tokenizer), draft, **options)


PAIRS = {
    "attention": Pair(llama),
    "sliding window": Pair(lambda: gemma3_text(window=16)),
    "recurrent": Pair(lambda: build("mamba", vocab_size=VOCAB_SIZE)),
    "hybrid": Pair(lambda: build("lfm2", vocab_size=VOCAB_SIZE)),
}
LLAMA = PAIRS["attention"]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "rejection": {"temperature": 1.0, "seed": 11, "acceptance": "rejection"},
    "rejection of a seed that nobody named": {"temperature": 1.0},
}


async def read(stream: runtime.TokenStream, most: int = 10**9) -> list[runtime.Token]:
    got: list[runtime.Token] = []
    while len(got) < most:
        try:
            got.append(await anext(stream))
        except StopAsyncIteration:
            break
    return got


def content(tokens: list[runtime.Token]) -> list[runtime.Token]:
    """Tokens without who came upon them: that depends on where rounds begin, and on time."""
    return [attrs.evolve(token, from_draft=False) for token in tokens]


async def check(
    path: Path, pair: Pair, cuts: tuple[int, ...] = CUTS, *, again: dict[str, Any] | None = None, **options: Any
) -> list[runtime.TokenStream]:
    """Save a stream at each cut; read on; and go on from each file elsewhere: the tokens are the same."""
    opened = {name: options.pop(name) for name in ("tokenizer", "drafted") if name in options}
    settings = {"max_tokens": NUM_TOKENS, "lookahead": 3, **options}
    got: list[runtime.Token] = []
    async with pair.open(**opened) as rt, rt.stream(PROMPT, **settings) as stream:
        for cut in cuts:
            got += await read(stream, cut - len(got))
            size = await stream.save(path.with_suffix(f".{cut}"))
            assert path.with_suffix(f".{cut}").stat().st_size == size
        got += await read(stream)
        assert stream.finish_reason is not None
    loaded = []
    async with pair.open(**opened) as rt:
        for cut in cuts:
            resumed = await rt.load_stream(path.with_suffix(f".{cut}"), **again or {})
            assert not resumed.is_closed
            assert content(await read(resumed)) == content(got[cut:])
            assert (resumed.finish_reason, resumed.stop_reason) == (stream.finish_reason, stream.stop_reason)
            assert resumed.answer.text == stream.answer.text
            loaded.append(resumed)
    return loaded


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("attention", kind) for kind in KINDS),
        *((name, kind) for name in ("recurrent", "hybrid") for kind in ("greedy", "rejection")),
        ("sliding window", "seeded"),
    ],
)
async def test_a_stream_goes_on_as_it_would_have(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.startswith("rejection"):
        # When a replayed token is settled, and a round cut, goes by prices, and a sample by its round.
        monkeypatch.setattr(ReplayDebt, "should_settle", lambda *_: False)
    await check(tmp_path / "stream", PAIRS[name], **KINDS[kind])


@pytest.mark.parametrize(("name", "kind"), [("attention", "rejection"), ("recurrent", "greedy")])
async def test_so_does_one_that_is_not_drafted(tmp_path: Path, name: str, kind: str) -> None:
    await check(tmp_path / "stream", PAIRS[name], drafted=False, **KINDS[kind])


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("name", ["attention", "recurrent"])
async def test_what_both_models_have_cached_is_in_the_file(tmp_path: Path, name: str, drafted: bool) -> None:
    read_by: dict[str, int] = {"target": 0, "draft": 0}

    def note(event: runtime.Event) -> None:
        if isinstance(event, runtime.Span) and event.kind == "prefill":
            read_by[event.actor] += event.num_tokens

    prompt = PROMPT * 20
    async with PAIRS[name].open(drafted=drafted) as rt, rt.stream(prompt, max_tokens=60, lookahead=3) as stream:
        await read(stream, 9)
        await stream.save(tmp_path / "stream")
    async with PAIRS[name].open(drafted=drafted, trace=note) as rt:
        resumed = await rt.load_stream(tmp_path / "stream")
        await read(resumed)
        assert resumed.statistics().cached_tokens >= len(prompt) - 1
    assert read_by["target"] < 20
    assert read_by["draft"] < 20
