"""Contenders of the benchmarks: ways to decode prompts with the same models, by mlx-lm or by this runtime."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any, Literal, cast

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
from protocol.prices import Estimates
from protocol.statistics import Statistics
from protocol.trace import Event, Span
from runtime.engine.events import Events
from runtime.engine.runtime import Runtime
from runtime.loading import blas
from runtime.measuring.loaded_models import TARGET, LoadedModels
from runtime.measuring.timing import (
    TimedToken,
    TimingWindow,
    busy_seconds,
    count_rounds,
    take_until_cancelled,
    timing_window,
)

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


# Counters of `Statistics` that a run adds up.
_COUNTED = ["rounds", "proposed", "accepted", "rejected_stale", "accepted_stale", "rejected_copied", "accepted_copied"]

PLAIN = Contender("mlx-lm", 0)
# For a target that is sharded over ranks: mlx-lm's decoding would have to run on all of them at once.
PLAIN_ON_RANKS = Contender("outrider", 0)
BATCHED = Contender("mlx-lm", 0, "batched", named="mlx-lm BatchGenerator")


@attrs.frozen
class Run:
    """Some prompts, decoded once. Times are in seconds.

    Attributes:
        seconds: length of the timed part. It begins with the call or, for one stream, when the first round has ended.
        first_tokens: time from the call to the first token, by prompt; with prompts one after another it includes the
            earlier ones.
        rounds, proposed, accepted: rounds that committed tokens, each of one text, and their drafted tokens; None for
            mlx-lm's batches.
        rejected_stale, accepted_stale, rejected_copied, accepted_copied: see `Statistics`.
        passes: the target's forward passes that verified or decoded; streams may share one. None for mlx-lm, like all
            fields below.
        hits, misses: verdicts whose text had been drafted ahead, and the others.
        target_seconds, draft_seconds: part of `seconds` in which each model's thread worked.
    """

    texts: tuple[tuple[int, ...], ...]  # token ids, by prompt
    seconds: float
    num_timed: int  # number of tokens in the timed part
    first_tokens: tuple[float, ...] = ()
    longest_wait: float = 0.0  # longest time between two tokens of one text
    peak_bytes: int = 0  # most memory that MLX held at once, beyond what it held before the call
    rounds: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    rejected_stale: int = 0
    accepted_stale: int = 0
    rejected_copied: int = 0
    accepted_copied: int = 0
    passes: int | None = None
    pass_rows: int | None = None  # parts that streams had in these passes
    hits: int | None = None
    misses: int | None = None
    drafted: int | None = None  # draft steps
    verify_seconds: float | None = None  # part of `seconds` in which the target verified or decoded
    target_seconds: float | None = None
    draft_seconds: float | None = None
    estimates: dict[str, Any] | None = None  # at the end of the run; see `observed`

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


def window_of(texts: Sequence[Sequence[TimedToken]], began: float, *, with_prompts: bool) -> TimingWindow:
    """The timed part of a run: from the call to the last token of all, or of a single text without its prompt."""
    if with_prompts:
        return TimingWindow(0, began, max(text[-1].at for text in texts))
    (text,) = texts
    return timing_window(text)


def run_of(texts: Sequence[Sequence[TimedToken]], began: float, window: TimingWindow, **counts: Any) -> Run:
    """The run that tokens and their times describe, by prompt; `began` is the time of the call on their clock."""
    waits = (b.at - a.at for text in texts for a, b in itertools.pairwise(text))
    return Run(
        texts=tuple(tuple(token.token for token in text) for text in texts),
        seconds=window.ended - window.began,
        num_timed=sum(map(len, texts)) - window.first,
        first_tokens=tuple(text[0].at - began for text in texts),
        longest_wait=max(waits, default=0.0),
        **counts,
    )


class ContenderRunner:
    """Runs contenders on the same models, one at a time: all work of one is over before the next begins."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self._runtimes: dict[object, tuple[Runtime, Events]] = {}
        self._spans: list[Span] = []  # those of the current run

    async def open_runtimes(
        self, stack: AsyncExitStack, contenders: Iterable[Contender], *, prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    ) -> None:
        """Open the runtimes that contenders need, so that none learns from another's streams; `stack` closes them."""
        models = self._models
        with models.evaluating_layers():
            for contender in contenders:
                if contender.engine == "outrider" and contender.runtime not in self._runtimes:
                    events = Events()
                    events.listen(self._record, only_spans=True)
                    runtime = await models.open_runtime(
                        stack,
                        contender.draft,
                        events=events,
                        max_batch=contender.max_batch,
                        prefix_cache_bytes=prefix_cache_bytes,
                    )
                    self._runtimes[contender.runtime] = (runtime, events)
            await self._wait_until_idle()

    async def run(
        self, contender: Contender, prompts: Prompts, max_tokens: int, temperature: float = 0.0, *, with_prompts: bool
    ) -> Run:
        """Decode some prompts. Without `with_prompts` there is one prompt, and reading it does not count.

        Raises:
            JobError: mlx-lm raised.
            OutriderError: the runtime raised.

        Cancellation: takes effect after the current forward passes.
        """
        gc.collect()
        # Until the BLAS threads that the last contender used have gone to sleep, and take no core's time.
        if blas.shares_cores():
            await trio.sleep(BLAS_IDLE_S)
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        if contender.engine == "mlx-lm":
            run = await self._run_mlx_lm(contender, prompts, max_tokens, temperature, with_prompts)
        else:
            self._models.record_for(self._models.drafter(contender.draft))
            with self._models.evaluating_layers():
                run = await self._run_outrider(contender, prompts, max_tokens, temperature, with_prompts)
        return attrs.evolve(run, peak_bytes=max(0, mx.get_peak_memory() - held))

    def _record(self, event: Event) -> None:
        if isinstance(event, Span):
            self._spans.append(event)

    # --- this runtime -----------------------------------------------------------------------------

    async def _run_outrider(
        self, contender: Contender, prompts: Prompts, max_tokens: int, temperature: float, with_prompts: bool
    ) -> Run:
        runtime, self._models.events.listener = self._runtimes[contender.runtime]
        spans: list[Span] = []
        self._spans = spans
        texts: list[list[TimedToken]] = [[] for _ in prompts]
        settings = {"max_tokens": max_tokens, "temperature": temperature, "lookahead": contender.lookahead}
        read = partial(_read, runtime, settings)
        began = time.perf_counter()
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
        window = window_of(texts, began, with_prompts=with_prompts)
        busy = {role: [span for span in spans if span.actor == role] for role in ("target", "draft")}
        passes = [span for span in busy["target"] if span.kind in ("verify", "decode")]
        estimates = getattr(statistics[-1], "estimates", None)
        return run_of(
            texts,
            began,
            window,
            **{name: sum(getattr(each, name) for each in statistics) for name in _COUNTED},
            passes=sum(bool(span.sessions) for span in passes),
            pass_rows=sum(len(span.sessions) for span in passes),
            hits=sum(each.lookahead_hits for each in statistics),
            misses=sum(each.lookahead_misses for each in statistics),
            drafted=sum(span.kind == "draft" for span in busy["draft"]),
            verify_seconds=busy_seconds(passes, window),
            target_seconds=busy_seconds(busy["target"], window),
            draft_seconds=busy_seconds(busy["draft"], window),
            estimates=None if estimates is None else observed(estimates, statistics),
        )

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
        self, contender: Contender, prompts: Prompts, max_tokens: int, temperature: float, with_prompts: bool
    ) -> Run:
        models, num_draft_tokens = self._models, int(contender.lookahead)
        texts: list[list[TimedToken]] = [[] for _ in prompts]
        counts: dict[str, int] = {}
        began = time.perf_counter()
        if contender.kind == "batched":
            owners: list[int] = []
            steps = partial(_batched, models.target.module, prompts, max_tokens, temperature, owners)
            taken = await take_until_cancelled(models.workers[TARGET], steps)
            for owner, token in zip(owners, taken, strict=True):
                texts[owner].append(token)
        else:
            draft = models.drafter(contender.draft)
            module = None if num_draft_tokens == 0 or draft is None else draft[0].module
            for prompt, text in zip(prompts, texts, strict=True):
                options = prompt, num_draft_tokens, max_tokens, temperature, models.cache_options
                steps = partial(mlx_lm_steps, models.target.module, module, *options)
                text += await take_until_cancelled(models.workers[TARGET], steps)
            flags = [[token.from_draft for token in text] for text in texts]
            rounds = [count_rounds(each, num_draft_tokens, max_tokens) for each in flags]
            counts = {
                "rounds": sum(number for number, _ in rounds),
                "proposed": sum(proposed for _, proposed in rounds),
                "accepted": sum(map(sum, flags)),
            }
        return run_of(texts, began, window_of(texts, began, with_prompts=with_prompts), **counts)


def observed(estimates: Estimates, statistics: Sequence[Statistics]) -> dict[str, Any]:
    """A runtime's estimates after some streams; None in the place of those for which nothing was observed, so that they
    are zeros or priors.
    """
    found: dict[str, Any] = {name: value or None for name, value in attrs.asdict(estimates).items()}
    if len(estimates.verify_table) < 2:
        found["verify_seconds_per_token"] = None
    if found["draft_seconds"] is None:
        found["contention"] = None
    if all(each.model_acceptance is None for each in statistics):
        found["acceptance"] = None
    return found


async def _read(
    runtime: Runtime, settings: dict[str, Any], prompt: tuple[int, ...], text: list[TimedToken]
) -> Statistics:
    stream = runtime.stream(prompt, ignore_eos=True, **settings)
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
    max_tokens: int,
    temperature: float,
    cache_options: CacheOptions,
) -> Iterator[tuple[int, bool]]:
    """(token, from_draft) of each token that mlx-lm generates."""
    keywords: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampler": make_sampler(temp=temperature),
        "kv_bits": cache_options.kv_bits,
        "kv_group_size": cache_options.kv_group_size,
        "quantized_kv_start": cache_options.quantized_kv_start,
    }
    if num_draft_tokens == 0:
        for token, _ in generate_step(mx.array(prompt), target, **keywords):
            yield cast(int, token), False
        return
    speculative = speculative_generate_step(
        mx.array(prompt), target, draft, num_draft_tokens=num_draft_tokens, **keywords
    )
    for token, _, from_draft in speculative:
        yield cast(int, token), from_draft


def _batched(
    target: Module, prompts: Prompts, max_tokens: int, temperature: float, owners: list[int]
) -> Iterator[tuple[int, bool]]:
    """(token, False) of each token of mlx-lm's batch; appends the index of its prompt to `owners`."""
    # All prompts are in one batch, in prefill too.
    generator = BatchGenerator(
        target,
        sampler=make_sampler(temp=temperature),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    with closing(generator):
        ids = generator.insert([list(prompt) for prompt in prompts], max_tokens=[max_tokens] * len(prompts))
        while responses := generator.next_generated():
            for response in responses:
                owners.append(ids.index(response.uid))
                yield response.token, False
