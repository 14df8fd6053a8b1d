"""Contenders of the benchmark: ways to decode one prompt with the same two models, by mlx-lm or by this runtime."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
import trio
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.warm_up import warm_up
from actors.workers.core_sharing import CORES
from actors.workers.worker import Job, JobError, Worker
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.prices import Prices
from protocol.settings import NGRAM
from protocol.trace import Event, Span
from runtime.bench.timing import TimedToken, busy_seconds, count_rounds, take_until_cancelled, timing_window
from runtime.engine.events import Events
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.loading import blas
from runtime.ranks.leading import ending_all

# An idle BLAS thread spins before it sleeps; those of OpenBLAS spin for 0.1 s.
BLAS_IDLE_S = 0.2

Engine = Literal["mlx-lm", "outrider"]
Lookahead = int | Literal["auto"]


@attrs.frozen
class Contender:
    """One way to decode a prompt.

    Attributes:
        engine: whose decoding it is.
        lookahead: most tokens in a proposal; 0 decodes plainly. For mlx-lm, its `num_draft_tokens`.
        max_batch: most streams that share a pass, for this runtime.
        draft: the name of its drafter, if the benchmark has several; else empty.
    """

    engine: Engine
    lookahead: Lookahead
    max_batch: int = MAX_BATCH
    draft: str = ""

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.lookahead == 0:
            return "mlx-lm plain" if self.engine == "mlx-lm" else "outrider lookahead 0"
        name = f"{self.engine} {'speculative' if self.engine == 'mlx-lm' else 'lookahead'} {self.lookahead}"
        return f"{name}, {self.draft}" if self.draft else name


PLAIN = Contender("mlx-lm", 0)
# Of a target that is sharded over ranks, which mlx-lm's decoding would have to run on all at once.
PLAIN_ON_RANKS = Contender("outrider", 0)


@attrs.frozen
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: the ids.
        num_timed: number of tokens after the first round.
        seconds: time that those took.
        rounds: number of the target's forward passes that committed tokens.
        proposed, accepted: number of drafted tokens that were verified, and that were accepted.
        rejected_stale, accepted_stale: of those rejected and accepted, the stale ones; see `Statistics`.
        hits, misses: those of the lookahead; None for mlx-lm, as all that follows.
        verify_seconds: part of `seconds` in which the target verified or decoded.
        target_seconds, draft_seconds: part of `seconds` in which each model's thread worked.
        estimates: the runtime's estimates of prices at the end of the run.
    """

    tokens: tuple[int, ...]
    num_timed: int
    seconds: float
    rounds: int
    proposed: int
    accepted: int
    rejected_stale: int = 0
    accepted_stale: int = 0
    hits: int | None = None
    misses: int | None = None
    verify_seconds: float | None = None
    target_seconds: float | None = None
    draft_seconds: float | None = None
    estimates: dict[str, Any] | None = None


# Any of the models of a benchmark.
AnyModel = MLXModel | TranslatedModel | TrainedDrafter
# The names of the target and of an only drafter among the models of a benchmark.
TARGET, ONLY_DRAFT = "target", "draft"


@attrs.frozen
class ModelPair:
    """A target with one drafter or several, and their workers.

    Attributes:
        models, workers: by name: `TARGET`, `ONLY_DRAFT`, or `Contender.draft` if there are several. Each model was made
            on its worker's thread. A drafter that is missing here drafts by prompt lookup.
        events: receives the spans of the workers.
        cache_options: options of the runtime's caches; mlx-lm's caches follow those about quantisation.
        default_draft: the name of the drafter that contenders without a name for theirs have.
        group: the ranks that the target is sharded over; None for one machine. mlx-lm cannot decode with it there.
    """

    models: dict[str, AnyModel]
    workers: dict[str, Worker]
    events: EventSwitch
    cache_options: CacheOptions = attrs.field(factory=CacheOptions)
    default_draft: str = ONLY_DRAFT
    group: RankGroup | None = None

    @property
    def target(self) -> MLXModel:
        """The target."""
        target = self.models[TARGET]
        assert isinstance(target, MLXModel)
        return target

    def draft_of(self, contender: Contender) -> tuple[AnyModel, Worker] | None:
        """The drafter that a contender has, and its worker; None for prompt lookup."""
        name = contender.draft or self.default_draft
        return (self.models[name], self.workers[name]) if name in self.models else None


class ContenderRunner:
    """Runs contenders, one at a time, on one pair of models.

    All work of one contender is over before the next begins.
    """

    def __init__(self, pair: ModelPair) -> None:
        """A runner without runtimes yet."""
        self._pair = pair
        self._events = pair.events
        self._runtimes: dict[Contender, tuple[Runtime, Events]] = {}
        self._spans: list[Span] = []  # those of the current run

    async def open_runtimes(
        self, stack: AsyncExitStack, contenders: Iterable[Contender], *, prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    ) -> None:
        """Open a runtime for each contender that needs one, so that none learns from another's streams.

        Args:
            stack: closes the runtimes on exit.
            contenders: the contenders; those of mlx-lm are skipped.
            prefix_cache_bytes: see `runtime.open`.
        """
        with self._evaluating_layers():
            for contender in contenders:
                if contender.engine == "outrider":
                    events = Events()
                    self._events.listener = events
                    events.listen(self._record)
                    target = self._pair.target, self._pair.workers[TARGET]
                    draft = self._pair.draft_of(contender)
                    self._record_features(contender)
                    prices = Prices(core_hold_s=CORES.hold_s)
                    if draft is not None:
                        # As `runtime.open` does. What fails here fails again in a run, where the contender is known.
                        with suppress(JobError):
                            await warm_up(target, draft, prices)
                    runtime = await stack.enter_async_context(
                        running(
                            target,
                            draft or NGRAM,
                            events=events,
                            prices=prices,
                            max_batch=self._pair.target.bounded_batch(contender.max_batch),
                            prefix_cache_bytes=prefix_cache_bytes,
                        )
                    )
                    if self._pair.group is not None:
                        stack.enter_context(ending_all(self._pair.group, runtime._sessions.fail))
                    self._runtimes[contender] = (runtime, events)
            await self._wait_until_idle()

    async def run(self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> Run:
        """Decode a prompt.

        Raises:
            JobError: mlx-lm raised.
            OutriderError: the runtime raised.

        Cancellation: takes effect after the current forward passes.
        """
        gc.collect()
        await wait_for_blas()
        if contender.engine == "mlx-lm":
            return await self._run_mlx_lm(contender, prompt, max_tokens, temperature)
        self._record_features(contender)
        with self._evaluating_layers():
            return await self._run_outrider(contender, prompt, max_tokens, temperature)

    def _record_features(self, contender: Contender) -> None:
        """Have the target record what the contender's drafter reads, in texts that begin from now on."""
        draft = self._pair.draft_of(contender)
        model = None if draft is None else draft[0]
        self._pair.target.record_features(model.feature_layers if isinstance(model, TrainedDrafter) else None)

    def _record(self, event: Event) -> None:
        if isinstance(event, Span):
            self._spans.append(event)

    # --- this runtime -----------------------------------------------------------------------------

    async def _run_outrider(
        self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float
    ) -> Run:
        runtime, events = self._runtimes[contender]
        spans: list[Span] = []
        tokens: list[TimedToken] = []
        self._events.listener, self._spans = events, spans
        stream = runtime.stream(
            prompt, max_tokens=max_tokens, temperature=temperature, lookahead=contender.lookahead, ignore_eos=True
        )
        async with stream:
            async for token in stream:
                tokens.append(TimedToken(token.id, token.from_draft, time.perf_counter()))
        await self._wait_until_idle()
        statistics = stream.statistics()
        window = timing_window(tokens)
        busy = {role: [span for span in spans if span.actor == role] for role in ("target", "draft")}
        passes = [span for span in busy["target"] if span.kind in ("verify", "decode")]
        estimates = getattr(statistics, "estimates", None)
        return Run(
            tokens=tuple(token.token for token in tokens),
            num_timed=len(tokens) - window.first,
            seconds=window.ended - window.began,
            rounds=statistics.rounds,
            proposed=statistics.proposed,
            accepted=statistics.accepted,
            rejected_stale=statistics.rejected_stale,
            accepted_stale=statistics.accepted_stale,
            hits=statistics.lookahead_hits,
            misses=statistics.lookahead_misses,
            verify_seconds=busy_seconds(passes, window),
            target_seconds=busy_seconds(busy["target"], window),
            draft_seconds=busy_seconds(busy["draft"], window),
            estimates=None if estimates is None else attrs.asdict(estimates),
        )

    async def _wait_until_idle(self) -> None:
        """Wait until no model works: a drafter may still run a step that nobody needs."""
        # Not `num_streams`, which leaves out sessions that are over and not yet closed.
        while any(runtime._sessions for runtime, _ in self._runtimes.values()):
            await trio.lowlevel.checkpoint()
        # The first job waits for the current one, the second for a job that the end of that one started.
        for _ in range(2):
            for worker in self._pair.workers.values():
                await worker.run(Job("close", _do_nothing))

    @contextmanager
    def _evaluating_layers(self) -> Iterator[None]:
        """Evaluate layer by layer inside the block. Only for this runtime: mlx-lm runs the models as they are."""
        with ExitStack() as stack:
            for model in self._pair.models.values():
                stack.enter_context(model.evaluating_layers())
            yield

    # --- mlx-lm -----------------------------------------------------------------------------------

    async def _run_mlx_lm(
        self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float
    ) -> Run:
        draft = self._pair.draft_of(contender)
        steps = partial(
            mlx_lm_steps,
            self._pair.target.module,
            None if contender.lookahead == 0 or draft is None else draft[0].module,
            prompt,
            int(contender.lookahead),
            max_tokens,
            temperature,
            self._pair.cache_options,
        )
        tokens = await take_until_cancelled(self._pair.workers[TARGET], steps)
        window = timing_window(tokens)
        rounds, proposed = count_rounds([token.from_draft for token in tokens], int(contender.lookahead), max_tokens)
        return Run(
            tokens=tuple(token.token for token in tokens),
            num_timed=len(tokens) - window.first,
            seconds=window.ended - window.began,
            rounds=rounds,
            proposed=proposed,
            accepted=sum(token.from_draft for token in tokens),
        )


async def wait_for_blas() -> None:
    """Wait until threads of a BLAS that the last contender has used take no time of a core any more."""
    if blas.shares_cores():
        await trio.sleep(BLAS_IDLE_S)


class EventSwitch:
    """Passes the workers' events to the runtime of the current contender."""

    def __init__(self) -> None:
        self.listener: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        """Pass on an event."""
        if self.listener is not None:
            self.listener(event)


def _do_nothing() -> None:
    """An empty job, to wait for the ones before it."""


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
