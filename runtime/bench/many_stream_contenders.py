"""Ways to decode several prompts with the same models: as streams of this runtime, and in mlx-lm's batches.

A group is timed from the call to its last token, prompts included: who waits for how long is part of the question.
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

from protocol.statistics import Statistics
from protocol.trace import Span
from runtime.bench.contenders import Contender, Lookahead, Moment, Stage, Window, take_until_cancelled, within
from runtime.engine.runtime import Runtime

Prompts = Sequence[tuple[int, ...]]


@attrs.frozen
class Way:
    """One way to decode several prompts.

    Attributes:
        kind: this runtime's streams one after another, or at once; or mlx-lm's `BatchGenerator`, which takes all of
            them through one forward pass a token, and cannot speculate.
        lookahead: of the streams; 0 for mlx-lm.
    """

    kind: Literal["one after another", "at once", "batched"]
    lookahead: Lookahead

    @property
    def name(self) -> str:
        """What it is called in tables."""
        if self.kind == "batched":
            return "mlx-lm BatchGenerator"
        return f"outrider {self.kind}" + ("" if self.lookahead == "auto" else f", lookahead {self.lookahead}")


BATCHED = Way("batched", 0)


@attrs.frozen
class Group:
    """Several prompts, decoded once.

    Attributes:
        texts: the ids, by prompt.
        seconds: from the call to the last token of all.
        first_tokens: by prompt, seconds from the call to its first token; one after another, that includes the others.
        longest_wait: most seconds between two tokens of one text.
        rounds: forward passes of the target that gave tokens, each for one stream; None for mlx-lm, as what follows.
        proposed, accepted: drafted tokens that were judged, and that stood.
        hits, misses: verdicts whose text had been drafted for already, and the others.
        drafted: passes of the drafter that were draft steps.
        target_seconds, draft_seconds: of `seconds`, when each model's thread had work.
    """

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    first_tokens: tuple[float, ...]
    longest_wait: float
    rounds: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    hits: int | None = None
    misses: int | None = None
    drafted: int | None = None
    target_seconds: float | None = None
    draft_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))


def grouped(moments: Sequence[Sequence[Moment]], began: float) -> Group:
    """What tokens that came say of a group that began at some moment.

    Args:
        moments: by prompt; at least one of each.
        began: on the clock of the moments.
    """
    waits = (b.at - a.at for stream in moments for a, b in itertools.pairwise(stream))
    return Group(
        texts=tuple(tuple(moment.token for moment in stream) for stream in moments),
        seconds=max(stream[-1].at for stream in moments) - began,
        first_tokens=tuple(stream[0].at - began for stream in moments),
        longest_wait=max(waits, default=0.0),
    )


class StreamStage(Stage):
    """A stage for groups of streams."""

    async def run_group(self, way: Way, prompts: Prompts, max_tokens: int, temperature: float) -> Group:
        """Decode some prompts.

        Args:
            way: the runtime for its lookahead was opened (`open_runtimes`); one for all its kinds, so that streams at
                once meet the same prices as one after another.
            prompts: at least one.
            max_tokens, temperature: see `runtime.bench.setup.Asked`.

        Raises: JobError: mlx-lm raised; OutriderError: the runtime did.

        Cancellation: strikes after the forward passes that are under way.
        """
        gc.collect()
        if way.kind == "batched":
            await self._share_out_threads(0)
            return await self._run_batched(prompts, max_tokens, temperature)
        await self._share_out_threads(1)
        with self._evaluating_layers():
            return await self._run_streams(way, prompts, max_tokens, temperature)

    async def _run_streams(self, way: Way, prompts: Prompts, max_tokens: int, temperature: float) -> Group:
        runtime, events = self._runtimes[Contender("outrider", way.lookahead)]
        spans: list[Span] = []
        self._events.listener, self._spans = events, spans
        moments: list[list[Moment]] = [[] for _ in prompts]
        read = partial(_read, runtime, max_tokens=max_tokens, temperature=temperature, lookahead=way.lookahead)
        began = time.perf_counter()
        if way.kind == "at once":
            statistics = await _read_at_once(read, prompts, moments)
        else:
            statistics = [await read(*each) for each in zip(prompts, moments, strict=True)]
        await self._rest()
        group = grouped(moments, began)
        window = Window(0, began, began + group.seconds)
        busy = {role: [span for span in spans if span.actor == role] for role in ("target", "draft")}
        return attrs.evolve(
            group,
            rounds=sum(each.rounds for each in statistics),
            proposed=sum(each.proposed for each in statistics),
            accepted=sum(each.accepted for each in statistics),
            hits=sum(each.lookahead_hits for each in statistics),
            misses=sum(each.lookahead_misses for each in statistics),
            drafted=sum(span.kind == "draft" for span in busy["draft"]),
            target_seconds=within(busy["target"], window),
            draft_seconds=within(busy["draft"], window),
        )

    async def _run_batched(self, prompts: Prompts, max_tokens: int, temperature: float) -> Group:
        whose: list[int] = []
        steps = partial(_batched, self._models["target"].module, prompts, max_tokens, temperature, whose)
        began = time.perf_counter()
        taken = await take_until_cancelled(self._workers["target"], steps)
        moments: list[list[Moment]] = [[] for _ in prompts]
        for stream, moment in zip(whose, taken, strict=True):
            moments[stream].append(moment)
        return grouped(moments, began)


async def _read(
    runtime: Runtime,
    prompt: tuple[int, ...],
    moments: list[Moment],
    *,
    max_tokens: int,
    temperature: float,
    lookahead: Lookahead,
) -> Statistics:
    """Read a stream to its end, and note its tokens as they come."""
    stream = runtime.stream(
        prompt, max_tokens=max_tokens, temperature=temperature, lookahead=lookahead, ignore_eos=True
    )
    async with stream:
        async for token in stream:
            moments.append(Moment(token.id, token.from_draft, time.perf_counter()))
    return stream.statistics()


async def _read_at_once(
    read: Callable[[tuple[int, ...], list[Moment]], Awaitable[Statistics]],
    prompts: Prompts,
    moments: Sequence[list[Moment]],
) -> list[Statistics]:
    done: list[outcome.Outcome[Statistics]] = []

    async def read_one(prompt: tuple[int, ...], its_moments: list[Moment]) -> None:
        # Kept, not let through: the nursery would wrap it in a group.
        done.append(await outcome.acapture(read, prompt, its_moments))

    async with trio.open_nursery() as nursery:
        for each in zip(prompts, moments, strict=True):
            nursery.start_soon(read_one, *each)
    return [each.unwrap() for each in done]


# --- on the target's thread -----------------------------------------------------------------------


def _batched(
    target: Module, prompts: Prompts, max_tokens: int, temperature: float, whose: list[int]
) -> Iterator[tuple[int, bool]]:
    """Tokens as mlx-lm's batches bring them, none of them proposed; `whose` has the prompt of each."""
    # Room for all of them at once, prompts too.
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
                whose.append(ids.index(response.uid))
                yield response.token, False
