"""Ways to decode a prompt with the same two models: mlx-lm's, and this runtime's. Each run is timed alike.

A run is timed from the end of its first round to its last token: what came with the first round took no time
of its own, and how much that is depends on the contender. Prefill is left out with it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
import outcome
import trio
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.warm_up import warm_up
from actors.workers.worker import Job, JobError, Worker
from protocol.prices import Prices
from protocol.settings import NGRAM
from protocol.trace import Event, Span
from runtime.engine.events import Events
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.loading import blas

# A BLAS thread that has nothing more to do looks out for work before it sleeps, OpenBLAS's for a tenth of a second.
BLAS_IDLE_S = 0.2

Lookahead = int | Literal["auto"]


@attrs.frozen
class Contender:
    """One way to decode.

    Attributes:
        engine: whose.
        lookahead: most tokens in a proposal; 0 decodes plainly. For mlx-lm, its `num_draft_tokens`.
    """

    engine: Literal["mlx-lm", "outrider"]
    lookahead: Lookahead

    @property
    def name(self) -> str:
        """What it is called in tables."""
        if self.engine == "mlx-lm":
            return "mlx-lm plain" if self.lookahead == 0 else f"mlx-lm speculative {self.lookahead}"
        return f"outrider lookahead {self.lookahead}"


PLAIN = Contender("mlx-lm", 0)


@attrs.frozen
class Moment:
    """A token as it came.

    Attributes:
        token: its id.
        from_draft: whether it was proposed.
        at: seconds on `time.perf_counter`, when it was there to be used.
    """

    token: int
    from_draft: bool
    at: float


@attrs.frozen
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: the ids.
        num_timed: tokens after the first round.
        seconds: what those took.
        rounds: forward passes of the target that gave tokens.
        proposed, accepted: drafted tokens that were judged, and that stood.
        hits, misses: of the lookahead; None where there is no such thing.
        verify_seconds: of `seconds`, what the target's passes took; None where that is not known.
        target_seconds, draft_seconds: of `seconds`, when each model's thread had work; likewise.
        estimates: what the runtime had found out by then about prices; likewise.
    """

    tokens: tuple[int, ...]
    num_timed: int
    seconds: float
    rounds: int
    proposed: int
    accepted: int
    hits: int | None = None
    misses: int | None = None
    verify_seconds: float | None = None
    target_seconds: float | None = None
    draft_seconds: float | None = None
    estimates: dict[str, Any] | None = None


@attrs.frozen
class ModelPair:
    """Two models on their threads.

    Attributes:
        models, workers: by role, "target" and "draft"; each model was made on its worker. Without a drafter,
            the runtime looks up instead.
        events: where the workers announce their spans.
        cache_options: of which mlx-lm's caches have those about quantising.
    """

    models: dict[str, MLXModel]
    workers: dict[str, Worker]
    events: Switch
    cache_options: CacheOptions = attrs.field(factory=CacheOptions)


class Stage:
    """Two models on their threads, on which contenders take turns.

    Nothing of one contender is under way any more when the next begins.
    """

    def __init__(self, cast: ModelPair) -> None:
        """A stage on which nobody stands yet."""
        self._models = cast.models
        self._workers = cast.workers
        self._events = cast.events
        self._cache_options = cast.cache_options
        self._runtimes: dict[Contender, tuple[Runtime, Events]] = {}
        self._spans: list[Span] = []  # of the run that is under way

    async def open_runtimes(self, stack: AsyncExitStack, contenders: Iterable[Contender]) -> None:
        """A runtime for each contender that needs one, so that none learns from another's streams.

        Args:
            stack: on leaving it, they are closed.
            contenders: mlx-lm's may be among them.
        """
        with self._evaluating_layers():
            for contender in contenders:
                if contender.engine == "outrider":
                    events = Events()
                    self._events.listener = events
                    events.listen(self._note)
                    pairs = {role: (model, self._workers[role]) for role, model in self._models.items()}
                    prices = Prices()
                    if "draft" in pairs:
                        # As `runtime.open` does; what fails here fails again where it can be told whose it is.
                        with suppress(JobError):
                            await warm_up(pairs["target"], pairs["draft"], prices)
                    runtime = await stack.enter_async_context(
                        running(pairs["target"], pairs.get("draft", NGRAM), events=events, prices=prices)
                    )
                    self._runtimes[contender] = (runtime, events)
            await self._rest()

    async def run(self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> Run:
        """Decode a prompt.

        Raises: JobError: mlx-lm raised; OutriderError: the runtime did.

        Cancellation: strikes after the forward passes that are under way.
        """
        gc.collect()
        if contender.engine == "mlx-lm":
            await self._share_out_threads(0)
            return await self._run_mlx_lm(contender, prompt, max_tokens, temperature)
        await self._share_out_threads(1)
        with self._evaluating_layers():
            return await self._run_outrider(contender, prompt, max_tokens, temperature)

    async def _share_out_threads(self, whose: int) -> None:
        threads = blas_threads(len(self._workers))
        if threads is not None and threads[whose] != blas.threads_in_front():
            blas.set_threads_in_front(threads[whose])
            await trio.sleep(BLAS_IDLE_S)

    def _note(self, event: Event) -> None:
        if isinstance(event, Span):
            self._spans.append(event)

    # --- ours -------------------------------------------------------------------------------------

    async def _run_outrider(
        self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float
    ) -> Run:
        runtime, events = self._runtimes[contender]
        spans: list[Span] = []
        moments: list[Moment] = []
        self._events.listener, self._spans = events, spans
        stream = runtime.stream(
            prompt, max_tokens=max_tokens, temperature=temperature, lookahead=contender.lookahead, ignore_eos=True
        )
        async with stream:
            async for token in stream:
                moments.append(Moment(token.id, token.from_draft, time.perf_counter()))
        await self._rest()
        statistics = stream.statistics()
        window = timed(moments)
        busy = {role: [span for span in spans if span.actor == role] for role in ("target", "draft")}
        passes = [span for span in busy["target"] if span.kind in ("verify", "decode")]
        estimates = getattr(statistics, "estimates", None)
        return Run(
            tokens=tuple(moment.token for moment in moments),
            num_timed=len(moments) - window.first,
            seconds=window.ended - window.began,
            rounds=statistics.rounds,
            proposed=statistics.proposed,
            accepted=statistics.accepted,
            hits=statistics.lookahead_hits,
            misses=statistics.lookahead_misses,
            verify_seconds=within(passes, window),
            target_seconds=within(busy["target"], window),
            draft_seconds=within(busy["draft"], window),
            estimates=None if estimates is None else attrs.asdict(estimates),
        )

    async def _rest(self) -> None:
        """Wait until no model works any more: a drafter may still be at a step that nobody needs."""
        # Not `num_streams`, which does not count what is over and still to be put away.
        while any(runtime._sessions for runtime, _ in self._runtimes.values()):
            await trio.lowlevel.checkpoint()
        # The first of two follows the job that was under way, the second what came of that one's end.
        for _ in range(2):
            for worker in self._workers.values():
                await worker.run(Job("close", _nothing))

    @contextmanager
    def _evaluating_layers(self) -> Iterator[None]:
        """Only while ours are on stage: mlx-lm's have the models as they are."""
        with ExitStack() as stack:
            for model in self._models.values():
                stack.enter_context(model.evaluating_layers())
            yield

    # --- mlx-lm's ---------------------------------------------------------------------------------

    async def _run_mlx_lm(
        self, contender: Contender, prompt: tuple[int, ...], max_tokens: int, temperature: float
    ) -> Run:
        steps = partial(
            _mlx_lm_steps,
            self._models["target"].module,
            self._models["draft"].module if contender.lookahead != 0 else None,
            prompt,
            int(contender.lookahead),
            max_tokens,
            temperature,
            self._cache_options,
        )
        moments = await take_until_cancelled(self._workers["target"], steps)
        window = timed(moments)
        rounds, proposed = count_rounds([m.from_draft for m in moments], int(contender.lookahead), max_tokens)
        return Run(
            tokens=tuple(moment.token for moment in moments),
            num_timed=len(moments) - window.first,
            seconds=window.ended - window.began,
            rounds=rounds,
            proposed=proposed,
            accepted=sum(moment.from_draft for moment in moments),
        )


def blas_threads(num_workers: int) -> tuple[int, int] | None:
    """Threads of the BLAS for mlx-lm, whose models take turns and may have all cores each, and for each of ours.

    None where that is not to be decided here: MLX's own has one, and a user may have set a number.
    """
    cores = blas.num_usable_cores()
    return (cores, max(1, cores // num_workers)) if blas.can_set_threads_in_front() else None


class Switch:
    """Hands events on to whoever is on stage."""

    def __init__(self) -> None:
        self.listener: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        """Hand on an event."""
        if self.listener is not None:
            self.listener(event)


def _nothing() -> None:
    """A job to wait for."""


# --- on the target's thread -----------------------------------------------------------------------


def _mlx_lm_steps(
    target: Module,
    draft: Module | None,
    prompt: tuple[int, ...],
    num_draft_tokens: int,
    max_tokens: int,
    temperature: float,
    cache_options: CacheOptions,
) -> Iterator[tuple[int, bool]]:
    """Tokens, and whether they were proposed, as mlx-lm generates them."""
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


class _Stop:
    """What a job looks at between two tokens."""

    is_wanted = False


async def take_until_cancelled(worker: Worker, generate: Callable[[], Iterator[tuple[int, bool]]]) -> list[Moment]:
    """All that a generator yields, with the times, advanced and ended on a worker's thread.

    Args:
        worker: where.
        generate: called there, for (token, from_draft).

    Raises: JobError: it raised.

    Cancellation: strikes after the next token.
    """
    stop = _Stop()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stop.is_wanted = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_when_cancelled)
        # Kept, not let through: the nursery would wrap it in a group.
        taken = await outcome.acapture(worker.run, Job("decode", partial(_take, generate, stop)))
        nursery.cancel_scope.cancel()
    return taken.unwrap()


def _take(generate: Callable[[], Iterator[tuple[int, bool]]], stop: _Stop) -> list[Moment]:
    moments = []
    # Ended here and now: mlx-lm's generators hold a stream of the thread that advanced them.
    with closing(cast(Any, generate())) as steps:
        for token, from_draft in steps:
            moments.append(Moment(token, from_draft, time.perf_counter()))
            if stop.is_wanted:
                break
    return moments


# --- what came when -------------------------------------------------------------------------------


@attrs.frozen
class Window:
    """What of a run is timed: tokens from `first` on, and the seconds between two moments."""

    first: int
    began: float
    ended: float


def timed(moments: Sequence[Moment]) -> Window:
    """From the end of the first round, which is the first token of the target's own, to the last token."""
    end_of_first = next((i for i, moment in enumerate(moments) if not moment.from_draft), len(moments) - 1)
    return Window(end_of_first + 1, moments[end_of_first].at, moments[-1].at)


def within(spans: Iterable[Span], window: Window) -> float:
    """Seconds of a window in which one of these spans lay; one worker's, so they do not overlap."""
    return sum(max(0.0, min(span.ended, window.ended) - max(span.began, window.began)) for span in spans)


def count_rounds(from_draft: Sequence[bool], num_draft_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Rounds and proposed tokens of mlx-lm's speculative decoding, from which tokens were drafted.

    A round ends with a token of the target's own, or with the text; it proposes as many as are still wanted.
    """
    rounds = proposed = 0
    is_new_round = True
    for i, drafted in enumerate(from_draft):
        if is_new_round:
            rounds += 1
            proposed += min(max_tokens - i, num_draft_tokens)
        is_new_round = not drafted
    return rounds, proposed
