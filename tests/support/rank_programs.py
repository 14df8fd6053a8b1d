"""What the ranks of `ranks` run: each function is called on every rank, and gives results to the test."""

import io
import math
import os
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import architectures
import chat_models
import mlx.core as mx
import mlx.nn as nn
import models
import trained_drafters
import trio
from polling import until_in_trio
from saved_texts import load_text, save_text

import actors.distributed.joining
import actors.distributed.sharded_model
import actors.target.drafter_link
import runtime
import runtime.doctor.report
import runtime.ranks.leading
import runtime.terminal.display
from actors.mlx.sequence import MLXSequence
from protocol.text_ledger import TextLedger
from runtime.cli.main import main as outrider
from runtime.persistence import session_file
from runtime.persistence.session_file import Contents

Give = Callable[[Any], None]

PROMPTS = [(1, 2, 3, 4, 5), (7, 8, 9), (11, 12, 13, 14), (3, 1, 4, 1, 5, 9, 2, 6)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "seed": 5, "acceptance": "rejection", "lookahead": 3},
    {"repetition_penalty": 1.3},
]
NUM_TOKENS = 10


def family(name: str, size: int = 2, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model whose heads and widths can be divided among `size` ranks. It is the same on every rank."""
    heads = {"num_attention_heads": 2 * size, "num_key_value_heads": size, "intermediate_size": 32 * size}
    if name == "qwen3_next":  # has no way of being sharded, and is run as a pipeline
        return architectures.build(name, num_hidden_layers=8)
    if name == "qwen3_5":  # whose head is sharded, too
        return architectures.build(name)
    if name in ("deepseek_v3", "gpt_oss"):
        return architectures.build(name, **heads, moe_intermediate_size=16 * size)
    return getattr(models, name)(seed, **heads, **changes)


async def texts(target: nn.Module, draft: nn.Module | None, group: Any) -> dict[str, list[int]]:
    """Texts of several streams at once, of one alone, and of one that reuses a prefix, by name."""
    return (await texts_and_accepted(target, None if draft is None else (draft, None), group))[0]


async def texts_and_accepted(
    target: nn.Module, source: Any, group: Any, draft_rank: int | None = None, each_settings: Any = SETTINGS
) -> tuple[dict[str, list[int]], int]:
    """Texts as `texts`, and how many drafted tokens were accepted."""
    found: dict[str, list[int]] = {}
    async with runtime.open((target, None), source, group=group, draft_rank=draft_rank) as rt:

        async def generate(name: str, prompt: tuple[int, ...], **settings: Any) -> list[int]:
            completion = await rt.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **settings)
            found[name] = [token.id for token in completion.tokens]
            return found[name]

        requests = list(zip(PROMPTS, each_settings, strict=True))
        for i, each in enumerate(await rt.generate_many(requests, max_tokens=NUM_TOKENS, ignore_eos=True)):
            found[f"together {i}"] = [token.id for token in each.tokens]
        await generate("alone", PROMPTS[0])
        answer = await generate("first turn", PROMPTS[1], reuse_prefix=True)
        turn = (*PROMPTS[1], *answer, 5, 6)
        async with rt.stream(turn, max_tokens=NUM_TOKENS, ignore_eos=True, reuse_prefix=True) as stream:
            found["second turn"] = [token.id async for token in stream]
            found["cached"] = [stream.statistics().cached_tokens]
        # A copy of the beginning, beside the one that it is copied from.
        async with rt.stream((*PROMPTS[1], 9, 8), max_tokens=NUM_TOKENS, ignore_eos=True, reuse_prefix=True) as stream:
            found["other question"] = [token.id async for token in stream]
            found["cached"].append(stream.statistics().cached_tokens)
        # Each rank keeps the beginning of these once.
        for i, end in enumerate((6, 7, 6)):
            await generate(f"long {i}", (*PROMPTS[3] * 40, end), reuse_prefix=True)
        statistics = rt.statistics()
    assert statistics.draft_failures == 0
    return found, statistics.accepted


async def cancelled_texts(target: nn.Module, draft: nn.Module | None, group: Any) -> dict[str, list[int]]:
    """Texts of streams that go on while others are cancelled at random moments."""
    found: dict[str, list[int]] = {}
    source = None if draft is None else (draft, None)
    randomness = random.Random(5)
    async with runtime.open((target, None), source, group=group, max_streams=6) as rt:

        async def generate(i: int) -> None:
            completion = await rt.generate(PROMPTS[i], max_tokens=24, ignore_eos=True, **SETTINGS[i])
            found[f"beside cancelled {i}"] = [token.id for token in completion.tokens]

        async def cancelled(num_checkpoints: int, num_tokens: int, reuse_prefix: bool) -> None:
            prompt = tuple(range(num_checkpoints % 40 + 2))
            async with rt.stream(prompt, max_tokens=50, ignore_eos=True, reuse_prefix=reuse_prefix) as stream:
                for _ in range(num_checkpoints):
                    await trio.lowlevel.checkpoint()
                for _ in range(num_tokens):
                    await anext(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, 0)
            nursery.start_soon(generate, 1)
            for i in range(10):
                nursery.start_soon(cancelled, randomness.randrange(60), randomness.randrange(6), i % 2 == 0)
    return found


async def plain_texts(target: nn.Module, _: nn.Module, group: Any) -> dict[str, list[int]]:
    return await texts(target, None, group)


RUNS = {"drafted": texts, "plain": plain_texts, "beside cancelled": cancelled_texts}


def wait_for_the_drafter() -> None:
    """A drafter that comes late is left behind: nothing may be drafted, and the rejection rule draws something else."""
    actors.target.drafter_link.proposal_wait_s = lambda *_: 1e9
    actors.target.drafter_link.prompt_wait_s = lambda *_: 1e9


def equal_texts(give: Give, cases: dict[str, tuple[str, ...]]) -> None:
    """Rank 0 gives, for each family and each of its runs, the texts of one process and those of the ranks."""
    wait_for_the_drafter()
    group = runtime.join_ranks()
    for name, runs in cases.items():
        target = family(name, group.size)
        mx.eval(target)
        if group.rank > 0:
            for _ in runs:
                runtime.follow((target, None), group)
            continue
        draft = models.near(family(name, group.size), noise=0.05)
        for run in runs:
            alone = trio.run(RUNS[run], family(name, group.size), draft, None)
            give((name, run, alone, trio.run(RUNS[run], target, draft, group)))


def equal_texts_drafted_elsewhere(give: Give, kind: str) -> None:
    """Rank 0 gives the texts of one process, those drafted by the last rank, and how many were accepted there."""
    wait_for_the_drafter()
    group = runtime.join_ranks()
    settings = SETTINGS
    if kind != "model":
        # At such a temperature both models choose by the noise alone, so even random weights agree.
        settings = [each | ({"temperature": 30.0} if "temperature" in each else {}) for each in SETTINGS]
    with tempfile.TemporaryDirectory() as folder:

        def pair() -> tuple[nn.Module, Any]:
            if kind == "model":
                return family("llama"), (models.near(family("llama"), noise=0.05), None)
            return trained_drafters.make(kind, Path(folder)), folder

        target, draft = pair()
        mx.eval(target)
        if group.rank > 0:
            runtime.follow((target, None), group, draft)
            return
        alone, _ = trio.run(texts_and_accepted, *pair(), None, None, settings)
        give((alone, *trio.run(texts_and_accepted, target, draft, group, group.size - 1, settings)))


def lose_the_drafter(give: Give) -> None:
    """Rank 0 gives the text of one process, and what becomes of a stream whose drafter is lost, and of one after it."""
    wait_for_the_drafter()
    group = runtime.join_ranks()
    target, draft = family("llama"), (models.near(family("llama"), noise=0.05), None)
    asked: dict[str, Any] = {"max_tokens": 120, "lookahead": 3, "ignore_eos": True}
    if group.rank > 0:
        give("joined")
        runtime.follow((target, None), group, draft)
        return

    async def main() -> None:
        async with runtime.open((target, None)) as rt:
            give([token.id for token in (await rt.generate(PROMPTS[0], **asked)).tokens])
        async with runtime.open((target, None), draft, group=group, draft_rank=1) as rt:
            found = []
            async with rt.stream(PROMPTS[0], **asked) as stream:
                async for token in stream:
                    found.append(token.id)
                    if token.index == 9:
                        give(stream.statistics().accepted)
                        await until_in_trio(lambda: group.drafter.error is not None)
            give(found)
            give(stream.statistics().draft_failures)
            give([token.id for token in (await rt.generate(PROMPTS[0], **asked)).tokens])
            give(rt.health().draft)
            await rt.detach_draft()
            await rt.attach_draft(draft)
            give((await rt.generate(PROMPTS[0], **asked)).statistics.accepted)
        give(str(group.error))

    trio.run(main)


def open_without_its_draft(give: Give) -> None:
    """Rank 1 is to draft, and is given no draft model; then it is, and rank 0 gives how many tokens it was right in."""
    wait_for_the_drafter()
    group = runtime.join_ranks()
    target, draft = family("llama"), (models.near(family("llama"), noise=0.05), None)
    if group.rank > 0:
        runtime.follow((target, None), group)
        runtime.follow((target, None), group, draft)
        return

    async def main() -> None:
        async with runtime.open((target, None), draft, group=group, draft_rank=1) as rt:
            give((await rt.generate(PROMPTS[0], lookahead=3, ignore_eos=True)).statistics.accepted)

    try:
        trio.run(main)
    except runtime.SettingsError as error:
        give(str(error))
    trio.run(main)


# --- saved texts ----------------------------------------------------------------------------------

# More tokens than the prefix cache on disk asks for.
LONG_PROMPT = tuple(i * 7 % 60 for i in range(40))
NUM_TOKENS_SAVED = 10

# What may be wrong with a file's part of the target.
ALTERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other number of ranks": lambda target: target.update(ranks=9),
    "no parts": lambda target: target["line"].pop("ranks"),
    "part of another model": lambda target: target["line"]["ranks"][0]["fingerprint"].update(weights="0" * 64),
    "damaged part": lambda target: target["line"]["ranks"][-1]["layers"].pop(),
}


def save_and_go_on(give: Give, name: str, folder: str) -> None:
    """Rank 0 gives what follows after texts were saved, the same from files in another runtime, and errors."""
    group = runtime.join_ranks()
    tokenizer = chat_models.tokenizer() if name == "llama" else None
    changes = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    target = family(name, group.size, **changes)
    mx.eval(target)
    if group.rank > 0:
        for _ in range(2):
            runtime.follow((target, None), group)
        return
    source, where = (target, tokenizer), Path(folder)
    options: dict[str, Any] = {"group": group, "prefix_cache_dir": where / "prefixes"}
    settings: dict[str, Any] = {"max_tokens": NUM_TOKENS_SAVED, "ignore_eos": True, "temperature": 0.8, "seed": 3}

    async def save() -> dict[str, Any]:
        async with runtime.open(source, "ngram", **options) as rt:
            text = (*PROMPTS[3], *said(await rt.generate(PROMPTS[3], **settings, reuse_prefix=True))[0])
            await save_text(rt, where / "text", text)
            found: dict[str, Any] = {"text": said(await rt.generate((*text, 5), **settings, reuse_prefix=True))[0]}
            found["prompts"] = [(*text, 5)]
            if tokenizer is not None:
                conversation = rt.conversation(**settings)
                await conversation.generate("The cat sat on the mat.")
                await conversation.save(where / "conversation")
                found["conversation"] = said(await conversation.generate("And then?"))[0]
            before = await rt.generate(LONG_PROMPT, **settings, reuse_prefix=True)
            found["prompts"].append((*LONG_PROMPT, *said(before)[0], 5, 6))
            found["prefix"] = said(await rt.generate(found["prompts"][1], **settings))[0]
        return found

    async def go_on(prompts: list[tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, str]]:
        errors = {}
        async with runtime.open(source, "ngram", **options) as rt:
            for how, alter in ALTERED.items():
                contents = session_file.read(where / "text")
                alter(contents.content["target"])
                session_file.write(where / how, Contents(contents.content, contents.tensors))
                try:
                    await load_text(rt, where / how)
                except runtime.SessionFileError as error:
                    errors[how] = str(error)
            await load_text(rt, where / "text")
            found: dict[str, Any] = {"cached": {}}
            completion = await rt.generate(prompts[0], **settings, reuse_prefix=True)
            found["text"], found["cached"]["text"] = said(completion)
            if tokenizer is not None:
                loaded = await rt.load(where / "conversation")
                found["conversation"], found["cached"]["conversation"] = said(await loaded.generate("And then?"))
            completion = await rt.generate(prompts[1], **settings, reuse_prefix=True)
            found["prefix"], found["cached"]["prefix"] = said(completion)
        return found, errors

    async def load_on_one() -> str:
        async with runtime.open((family(name, group.size, **changes), tokenizer)) as rt:
            try:
                await load_text(rt, where / "text")
            except runtime.SessionFileError as error:
                return str(error)
        return "no error"

    expected = trio.run(save)
    found, errors = trio.run(go_on, expected.pop("prompts"))
    give((expected, found, errors | {"one machine": trio.run(load_on_one)}))


def said(completion: Any) -> tuple[list[int], int]:
    """The tokens of a completion, and how many of its prompt's were not read again."""
    return [token.id for token in completion.tokens], completion.statistics.cached_tokens


# --- failures -------------------------------------------------------------------------------------


def generate_for_ever(give: Give, moment: str) -> None:
    """Rank 0 generates until a rank fails, and gives its streams' errors. The others give their own."""
    group = runtime.join_ranks()
    target = family("llama", group.size, max_position_embeddings=1_000_000)
    if group.rank > 0:
        give("joined")
        try:
            runtime.follow((target, None), group)
        except runtime.RankError as error:
            give(str(error))
        else:
            give("closed")
        return

    async def main() -> None:
        async with runtime.open((target, None), "ngram", group=group) as rt:

            async def generate(prompt: tuple[int, ...]) -> None:
                try:
                    async with rt.stream(prompt, max_tokens=None, ignore_eos=True, prefill_step_size=8) as stream:
                        async for token in stream:
                            if moment == "pass" and (prompt[0], token.index) == (1, 0):
                                give("is there")
                except runtime.RuntimeBrokenError as error:
                    give(str(error))

            if moment == "idle":
                give("is there")
                broken, token = trio.Event(), trio.lowlevel.current_trio_token()
                with group.on_error(lambda _: token.run_sync_soon(broken.set)):
                    await broken.wait()
            async with trio.open_nursery() as nursery:
                for start in (1, 2):
                    nursery.start_soon(generate, (start,) * (900_000 if moment == "prefill" else 3))
                if moment == "prefill":
                    give("is there")

    try:
        trio.run(main)
    except* runtime.RankError as errors:
        give(str(errors.exceptions[0]))
    except* KeyboardInterrupt:
        give("interrupted")


def open_and_end(give: Give, how: str) -> None:
    """Each rank gives the error that it ends with. Something is wrong with rank 1, the model, or the collectives."""
    group = runtime.join_ranks()
    seed = group.rank if how == "other model" else 0
    target = family("llama", seed=seed)
    if how == "no shards":
        target = models.gemma2()
    elif how == "different stages":
        target = architectures.build("qwen3_next", num_hidden_layers=2)
    if group.rank > 0:
        if how == "ends":
            return
        if how == "out of step":
            TextLedger.feed_later = lambda *_: None
        if how in ("fails", "waits"):
            MLXSequence.feed = _fail if how == "fails" else _wait
    if how == "unwritten tokens":
        all_sum = mx.distributed.all_sum
        mx.distributed.all_sum = lambda x, **keywords: all_sum(x, **keywords) + (2**30 if x.dtype == mx.int32 else 0)
    runtime.ranks.leading.PASS_TIMEOUT_S = 1.5 if how == "waits" else 60.0

    async def main() -> None:
        async with runtime.open((target, None), group=group) as rt:
            await rt.generate(PROMPTS[0])

    try:
        if group.rank == 0:
            trio.run(main)
        else:
            runtime.follow((target, None), group)
        give("no error")
    except (runtime.RankError, runtime.ModelError, runtime.RuntimeBrokenError) as error:
        give(str(error))


def _wait(*_: Any) -> None:
    threading.Event().wait()


def _fail(*_: Any) -> None:
    raise ValueError("no such kernel")


def join_with_another_version(give: Give) -> None:
    """Rank 1 says that it has another version of mlx."""
    versions = actors.distributed.joining.versions()
    if os.environ["MLX_RANK"] == "1":
        actors.distributed.joining.versions = lambda: versions | {"mlx": "0.1"}
    join_for(give, 60.0)


def join_for(give: Give, timeout_s: float) -> None:
    """Each rank gives the error of joining, or says that it has joined."""
    try:
        runtime.join_ranks(timeout_s)
    except runtime.RankError as error:
        give(str(error))
    else:
        give("joined")


# --- commands -------------------------------------------------------------------------------------


def serve(give: Give, *arguments: str) -> None:
    """Each rank gives the exit status of the server, which writes to the rank's standard error."""
    give(outrider(["serve", *arguments]))


def command(give: Give, arguments: tuple[str, ...], fails: bool = False) -> None:
    """Each rank runs a command, and gives its exit status, output and errors. Rank 1 may fail in the exchange."""
    if fails and os.environ["MLX_RANK"] == "1":
        actors.distributed.sharded_model.time_exchange = _fail
    runtime.doctor.report.load_of_others = lambda: None  # of other tests
    runtime.terminal.display.LOG_INTERVAL_S = math.inf  # slow machines print progress otherwise
    os.environ["COLUMNS"] = "1000"  # so that nothing is folded
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = outrider(arguments)
    give((status, out.getvalue(), err.getvalue()))
