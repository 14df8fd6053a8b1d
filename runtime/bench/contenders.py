"""Contenders of the benchmarks: ways to decode prompts with the same models, by mlx-lm or by this runtime."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any, Literal

import attrs
import mlx.core as mx
import outcome
import trio
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from actors.mlx.cache_options import CacheOptions
from actors.workers.worker import Job
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.statistics import Statistics
from runtime.bench.loaded_models import TARGET, LoadedModels
from runtime.bench.timing import TimedToken, count_rounds, first_timed, take_until_cancelled
from runtime.engine.events import Events
from runtime.engine.runtime import Runtime
from runtime.loading import blas

# An idle BLAS thread spins before it sleeps; those of OpenBLAS spin for 0.1 s.
BLAS_IDLE_S = 0.2

Lookahead = int | Literal["auto"]
Kind = Literal["one after another", "in turns", "at once", "batched"]
Prompts = Sequence[tuple[int, ...]]


@attrs.frozen
class Contender:
    """One way to decode prompts.

    Attributes:
        lookahead: most tokens in a proposal; 0 decodes plainly. For mlx-lm, its `num_draft_tokens`.
        kind: how several prompts are decoded. "in turns" and "at once" are streams of this runtime that all begin
            together; "in turns", each has passes of its own (`max_batch=1`). "batched" is mlx-lm's
            `BatchGenerator`, which decodes all prompts in one pass a token, and cannot speculate.
    """

    engine: Literal["mlx-lm", "outrider"]
    lookahead: Lookahead
    kind: Kind = "one after another"
    draft: str = ""  # the name of its drafter, if the benchmark has several; else empty
    named: str = ""  # its name in tables, if that does not follow from the rest

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.named:
            return self.named
        if self.lookahead == 0:
            return "mlx-lm plain" if self.engine == "mlx-lm" else "outrider lookahead 0"
        name = f"{self.engine} {'speculative' if self.engine == 'mlx-lm' else 'lookahead'} {self.lookahead}"
        return f"{name}, {self.draft}" if self.draft else name

    @property
    def max_batch(self) -> int:
        """Most streams that share a pass, for this runtime."""
        return 1 if self.kind == "in turns" else MAX_BATCH

    @property
    def runtime(self) -> tuple[Lookahead, int, str]:
        """The key of its runtime: contenders with the same key share a runtime, and so have the same prices."""
        return self.lookahead, self.max_batch, self.draft


PLAIN = Contender("mlx-lm", 0)
# For a target that is sharded over ranks: mlx-lm's decoding would have to run on all of them at once.
PLAIN_ON_RANKS = Contender("outrider", 0)
BATCHED = Contender("mlx-lm", 0, "batched", named="mlx-lm BatchGenerator")


@attrs.frozen
class Length:
    """How texts are drawn, and when they end: after `max_tokens`, or with one of `stop_tokens`, which counts."""

    max_tokens: int
    temperature: float = 0.0
    stop_tokens: frozenset[int] = frozenset()


# Counters of `Statistics` that a run adds up.
COUNTED = (
    "rounds",
    "accepted",
    "rejected",
    "accepted_copied",
    "rejected_copied",
    "passes",
    "pass_rows",
    "lookahead_hits",
    "lookahead_misses",
)


@attrs.frozen
class Run:
    """Some prompts, decoded once. Times are in seconds.

    Attributes:
        texts: token ids, by prompt.
        seconds: length of the timed part. It begins with the call or, for one stream, when the first round has ended.
        num_timed: number of tokens in the timed part.
        first_tokens: time from the call to the first token, by prompt; with prompts one after another it includes the
            earlier ones.
        counts: of `COUNTED`, those that are known: all for this runtime; for mlx-lm the rounds of single texts, and
            their accepted and rejected tokens.
    """

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    num_timed: int
    first_tokens: tuple[float, ...] = ()
    counts: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


def run_of(
    texts: Sequence[Sequence[TimedToken]], began: float, counts: Mapping[str, int], *, with_prompts: bool
) -> Run:
    """The run that tokens and their times describe, by prompt.

    Args:
        began: the time of the call, on the clock of the tokens.
        with_prompts: whether it is timed from the call to the last token of all; else it is a single text, timed
            without its prompt.
    """
    first, timed_from, timed_to = 0, began, max(text[-1].at for text in texts)
    if not with_prompts:
        (text,) = texts
        first, timed_from = first_timed(text)
    return Run(
        texts=tuple(tuple(token.token for token in text) for text in texts),
        seconds=timed_to - timed_from,
        num_timed=sum(map(len, texts)) - first,
        first_tokens=tuple(text[0].at - began for text in texts),
        counts=counts,
    )


class ContenderRunner:
    """Runs contenders on the same models, one at a time: all work of one is over before the next begins."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self._runtimes: dict[object, tuple[Runtime, Events]] = {}

    async def open_runtimes(
        self, stack: AsyncExitStack, contenders: Iterable[Contender], *, prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    ) -> None:
        """Open the runtimes that contenders need, so that none learns from another's streams; `stack` closes them."""
        models = self._models
        with models.evaluating_layers():
            for contender in contenders:
                if contender.engine == "outrider" and contender.runtime not in self._runtimes:
                    self._runtimes[contender.runtime] = await models.open_runtime(
                        stack,
                        contender.draft,
                        max_batch=contender.max_batch,
                        prefix_cache_bytes=prefix_cache_bytes,
                    )
            await self._wait_until_idle()

    async def run(self, contender: Contender, prompts: Prompts, length: Length, *, with_prompts: bool) -> Run:
        """Decode some prompts. Without `with_prompts` there is one prompt, and reading it does not count.

        Raises:
            JobError: mlx-lm raised.
            OutriderError: the runtime raised.

        Cancellation: takes effect after the current forward passes.
        """
        # A cancellation strikes here, and not as the error of a runtime that it has closed.
        await trio.lowlevel.checkpoint()
        gc.collect()
        # Until the BLAS threads that the last contender used have gone to sleep, and take no core's time.
        if blas.shares_cores():
            await trio.sleep(BLAS_IDLE_S)
        texts: list[list[TimedToken]] = [[] for _ in prompts]
        began = time.perf_counter()
        if contender.engine == "mlx-lm":
            counts = await self._run_mlx_lm(contender, prompts, length, texts)
        else:
            self._models.record_for(self._models.drafter(contender.draft))
            with self._models.evaluating_layers():
                counts = await self._run_outrider(contender, prompts, length, texts)
        return run_of(texts, began, counts, with_prompts=with_prompts)

    # --- this runtime -----------------------------------------------------------------------------

    async def _run_outrider(
        self, contender: Contender, prompts: Prompts, length: Length, texts: list[list[TimedToken]]
    ) -> dict[str, int]:
        runtime, self._models.events.listener = self._runtimes[contender.runtime]
        settings = {
            "max_tokens": length.max_tokens,
            "temperature": length.temperature,
            "lookahead": contender.lookahead,
            "stop_tokens": tuple(length.stop_tokens),
        }
        read = partial(_read, runtime, settings)
        statistics: list[Statistics] = []
        if contender.kind == "one after another":
            statistics += [await read(*each) for each in zip(prompts, texts, strict=True)]
        else:
            # Captured, since the nursery would wrap an exception in a group.
            done: list[outcome.Outcome[Statistics]] = []

            async def read_one(*each: Any) -> None:
                done.append(await outcome.acapture(read, *each))

            async with trio.open_nursery() as nursery:
                for each in zip(prompts, texts, strict=True):
                    nursery.start_soon(read_one, *each)
            statistics += [each.unwrap() for each in done]
        await self._wait_until_idle()
        return {name: sum(getattr(each, name) for each in statistics) for name in COUNTED}

    async def _wait_until_idle(self) -> None:
        """Wait until no model works: a drafter may still run a step that nobody needs."""
        # Not `num_streams`, which leaves out sessions that are over and not yet closed.
        while any(runtime._sessions for runtime, _ in self._runtimes.values()):
            await trio.lowlevel.checkpoint()
        # The first job waits for the current one, the second for a job that the end of that one started.
        for _ in range(2):
            for worker in self._models.workers.values():
                await worker.run(Job("close", lambda: None))

    # --- mlx-lm -----------------------------------------------------------------------------------

    async def _run_mlx_lm(
        self, contender: Contender, prompts: Prompts, length: Length, texts: list[list[TimedToken]]
    ) -> dict[str, int]:
        models, num_draft_tokens = self._models, int(contender.lookahead)
        target, worker = models.target.module, models.workers[TARGET]
        if contender.kind == "batched":
            owners: list[int] = []
            taken = await take_until_cancelled(worker, partial(_batched, target, prompts, length, owners))
            for owner, token in zip(owners, taken, strict=True):
                texts[owner].append(token)
            return {}
        draft = models.drafter(contender.draft)
        module = None if num_draft_tokens == 0 or draft is None else draft[0].module
        counts = dict.fromkeys(("rounds", "accepted", "rejected"), 0)
        for prompt, text in zip(prompts, texts, strict=True):
            options = target, module, prompt, num_draft_tokens, length, models.cache_options
            text += await take_until_cancelled(worker, partial(mlx_lm_steps, *options))
            flags = [token.from_draft for token in text]
            rounds, proposed = count_rounds(flags, num_draft_tokens, length.max_tokens)
            counts["rounds"] += rounds
            counts["accepted"] += sum(flags)
            counts["rejected"] += proposed - sum(flags)
        return counts


async def _read(
    runtime: Runtime, settings: dict[str, Any], prompt: tuple[int, ...], text: list[TimedToken]
) -> Statistics:
    stream = runtime.stream(prompt, **settings)
    async with stream:
        async for token in stream:
            text.append(TimedToken(token.id, token.from_draft, time.perf_counter()))
    return stream.statistics()


# --- on the target's thread -----------------------------------------------------------------------


def mlx_lm_steps(
    target: Module,
    draft: Module | None,
    prompt: tuple[int, ...],
    num_draft_tokens: int,
    length: Length,
    cache_options: CacheOptions,
) -> Iterator[tuple[int, bool]]:
    """(token, from_draft) of each token that mlx-lm generates."""
    keywords: dict[str, Any] = {
        "max_tokens": length.max_tokens,
        "sampler": make_sampler(temp=length.temperature),
        "kv_bits": cache_options.kv_bits,
        "kv_group_size": cache_options.kv_group_size,
        "quantized_kv_start": cache_options.quantized_kv_start,
    }
    steps: Iterator[tuple[Any, bool]]
    if num_draft_tokens == 0:
        steps = ((token, False) for token, _ in generate_step(mx.array(prompt), target, **keywords))
    else:
        keywords["num_draft_tokens"] = num_draft_tokens
        speculative = speculative_generate_step(mx.array(prompt), target, draft, **keywords)
        steps = ((token, from_draft) for token, _, from_draft in speculative)
    for token, from_draft in steps:
        yield int(token), from_draft
        if token in length.stop_tokens:
            return


def _batched(target: Module, prompts: Prompts, length: Length, owners: list[int]) -> Iterator[tuple[int, bool]]:
    """(token, False) of each token of mlx-lm's batch; appends the index of its prompt to `owners`."""
    # All prompts are in one batch, in prefill too.
    generator = BatchGenerator(
        target,
        sampler=make_sampler(temp=length.temperature),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    with closing(generator):
        ids = generator.insert([list(prompt) for prompt in prompts], max_tokens=[length.max_tokens] * len(prompts))
        while responses := generator.next_generated():
            for response in responses:
                owners.append(ids.index(response.uid))
                yield response.token, False
