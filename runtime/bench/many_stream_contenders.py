"""Contenders of the benchmark of many streams: streams of this runtime, and mlx-lm's batches.

A run is timed from the call to its last token, prompts included, since the waiting times of streams count here.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Literal

import attrs
import outcome
import trio
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from actors.mlx.memory import begin_peak, peak_memory
from protocol.open_options import MAX_BATCH
from protocol.statistics import Statistics
from protocol.trace import Span
from runtime.bench.contenders import TARGET, Contender, ContenderRunner, Lookahead, mlx_lm_steps, wait_for_blas
from runtime.bench.timing import TimedToken, TimingWindow, busy_seconds, take_until_cancelled
from runtime.engine.runtime import Runtime

Prompts = Sequence[tuple[int, ...]]
StreamsKind = Literal["one after another", "in turns", "at once", "batched", "step by step"]


@attrs.frozen
class StreamsContender:
    """One contender to decode several prompts.

    Attributes:
        kind: "one after another", "in turns" and "at once" are streams of this runtime; "in turns" are at once too, but
            each has passes of its own (`max_batch=1`). "batched" is mlx-lm's `BatchGenerator`, which decodes all
            prompts in one forward pass a token, and cannot speculate; "step by step" is its `generate_step`, one prompt
            after another.
        lookahead: lookahead of the streams; 0 for mlx-lm.
    """

    kind: StreamsKind
    lookahead: Lookahead

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.kind == "batched":
            return "mlx-lm BatchGenerator"
        if self.kind == "step by step":
            return "mlx-lm generate_step"
        return f"outrider {self.kind}" + ("" if self.lookahead == "auto" else f", lookahead {self.lookahead}")

    @property
    def runtime(self) -> Contender:
        """The contender whose runtime decodes the streams."""
        return Contender("outrider", self.lookahead, 1 if self.kind == "in turns" else MAX_BATCH)


BATCHED = StreamsContender("batched", 0)
STEP_BY_STEP = StreamsContender("step by step", 0)


@attrs.frozen
class StreamsRun:
    """Several prompts, decoded once.

    Attributes:
        texts: token ids, by prompt.
        seconds: time from the call to the last token of all.
        first_tokens: time from the call to the first token, by prompt, in seconds; with streams one after another it
            includes the earlier streams.
        longest_wait: longest time between two tokens of one text, in seconds.
        peak_bytes: most memory that MLX held at once, beyond what it held before the call; 0 if that was not measured.
        rounds: number of rounds that committed tokens, each of one stream; None for mlx-lm, as all that follows.
        passes: number of the target's forward passes that verified or decoded; streams may share one.
        pass_rows: number of parts that streams had in these passes.
        proposed, accepted: number of drafted tokens that were verified, and that were accepted.
        hits, misses: number of verdicts whose text had been drafted ahead, and of the others.
        drafted: number of draft steps.
        target_seconds, draft_seconds: part of `seconds` in which each model's thread worked.
    """

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    first_tokens: tuple[float, ...]
    longest_wait: float
    peak_bytes: int = 0
    rounds: int | None = None
    passes: int | None = None
    pass_rows: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    hits: int | None = None
    misses: int | None = None
    drafted: int | None = None
    target_seconds: float | None = None
    draft_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


def streams_run(streams: Sequence[Sequence[TimedToken]], began: float) -> StreamsRun:
    """The run that tokens and their times describe.

    Args:
        streams: tokens by prompt; at least one of each.
        began: time of the call, on the clock of the tokens.
    """
    waits = (b.at - a.at for stream in streams for a, b in itertools.pairwise(stream))
    return StreamsRun(
        texts=tuple(tuple(token.token for token in stream) for stream in streams),
        seconds=max(stream[-1].at for stream in streams) - began,
        first_tokens=tuple(stream[0].at - began for stream in streams),
        longest_wait=max(waits, default=0.0),
    )


class StreamsRunner(ContenderRunner):
    """Runs contenders with several streams, one contender at a time, on one pair of models."""

    async def run_streams(
        self, contender: StreamsContender, prompts: Prompts, max_tokens: int, temperature: float
    ) -> StreamsRun:
        """Decode some prompts.

        Args:
            contender: its runtime is open (`open_runtimes`). Streams at once and one after another share one, so that
                they have the same prices.
            prompts: at least one.
            max_tokens, temperature: see `BenchmarkRequest`.

        Raises:
            JobError: mlx-lm raised.
            OutriderError: the runtime raised.

        Cancellation: takes effect after the current forward passes.
        """
        gc.collect()
        await wait_for_blas()
        held = begin_peak()
        if contender.kind == "batched":
            run = await self._run_batched(prompts, max_tokens, temperature)
        elif contender.kind == "step by step":
            run = await self._run_step_by_step(prompts, max_tokens, temperature)
        else:
            self._record_features(contender.runtime)
            with self._evaluating_layers():
                run = await self._run_outrider_streams(contender, prompts, max_tokens, temperature)
        return attrs.evolve(run, peak_bytes=max(0, peak_memory() - held))

    async def _run_outrider_streams(
        self, contender: StreamsContender, prompts: Prompts, max_tokens: int, temperature: float
    ) -> StreamsRun:
        runtime, events = self._runtimes[contender.runtime]
        spans: list[Span] = []
        self._events.listener, self._spans = events, spans
        tokens: list[list[TimedToken]] = [[] for _ in prompts]
        read = partial(_read, runtime, max_tokens=max_tokens, temperature=temperature, lookahead=contender.lookahead)
        began = time.perf_counter()
        if contender.kind == "one after another":
            statistics = [await read(*each) for each in zip(prompts, tokens, strict=True)]
        else:
            statistics = await _read_at_once(read, prompts, tokens)
        await self._wait_until_idle()
        run = streams_run(tokens, began)
        window = TimingWindow(0, began, began + run.seconds)
        busy = {role: [span for span in spans if span.actor == role] for role in ("target", "draft")}
        passes = [span for span in busy["target"] if span.kind in ("verify", "decode")]
        return attrs.evolve(
            run,
            rounds=sum(each.rounds for each in statistics),
            passes=sum(bool(span.sessions) for span in passes),
            pass_rows=sum(len(span.sessions) for span in passes),
            proposed=sum(each.proposed for each in statistics),
            accepted=sum(each.accepted for each in statistics),
            hits=sum(each.lookahead_hits for each in statistics),
            misses=sum(each.lookahead_misses for each in statistics),
            drafted=sum(span.kind == "draft" for span in busy["draft"]),
            target_seconds=busy_seconds(busy["target"], window),
            draft_seconds=busy_seconds(busy["draft"], window),
        )

    async def _run_batched(self, prompts: Prompts, max_tokens: int, temperature: float) -> StreamsRun:
        stream_of_token: list[int] = []
        steps = partial(_batched, self._pair.target.module, prompts, max_tokens, temperature, stream_of_token)
        began = time.perf_counter()
        taken = await take_until_cancelled(self._pair.workers[TARGET], steps)
        tokens: list[list[TimedToken]] = [[] for _ in prompts]
        for stream, token in zip(stream_of_token, taken, strict=True):
            tokens[stream].append(token)
        return streams_run(tokens, began)

    async def _run_step_by_step(self, prompts: Prompts, max_tokens: int, temperature: float) -> StreamsRun:
        began = time.perf_counter()
        options = self._pair.cache_options
        texts = []
        for prompt in prompts:
            steps = partial(mlx_lm_steps, self._pair.target.module, None, prompt, 0, max_tokens, temperature, options)
            texts.append(await take_until_cancelled(self._pair.workers[TARGET], steps))
        return streams_run(texts, began)


async def _read(
    runtime: Runtime,
    prompt: tuple[int, ...],
    tokens: list[TimedToken],
    *,
    max_tokens: int,
    temperature: float,
    lookahead: Lookahead,
) -> Statistics:
    """Read a stream to its end, and append its tokens and their times to `tokens`."""
    stream = runtime.stream(
        prompt, max_tokens=max_tokens, temperature=temperature, lookahead=lookahead, ignore_eos=True
    )
    async with stream:
        async for token in stream:
            tokens.append(TimedToken(token.id, token.from_draft, time.perf_counter()))
    return stream.statistics()


async def _read_at_once(
    read: Callable[[tuple[int, ...], list[TimedToken]], Awaitable[Statistics]],
    prompts: Prompts,
    tokens: Sequence[list[TimedToken]],
) -> list[Statistics]:
    done: list[outcome.Outcome[Statistics]] = []

    async def read_one(prompt: tuple[int, ...], its_tokens: list[TimedToken]) -> None:
        # Captured, since the nursery would wrap an exception in a group.
        done.append(await outcome.acapture(read, prompt, its_tokens))

    async with trio.open_nursery() as nursery:
        for each in zip(prompts, tokens, strict=True):
            nursery.start_soon(read_one, *each)
    return [each.unwrap() for each in done]


# --- on the target's thread -----------------------------------------------------------------------


def _batched(
    target: Module, prompts: Prompts, max_tokens: int, temperature: float, stream_of_token: list[int]
) -> Iterator[tuple[int, bool]]:
    """(token, False) of each token of mlx-lm's batch; appends the index of its prompt to `stream_of_token`."""
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
                stream_of_token.append(ids.index(response.uid))
                yield response.token, False
