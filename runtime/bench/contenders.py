"""Contenders of the benchmarks: ways to decode prompts with the same models, by mlx-lm or by this runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
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
from actors.workers.worker import Job, Worker
from protocol.open_options import MAX_BATCH

Lookahead = int | Literal["auto"]
StreamsMode = Literal["one after another", "in turns", "at once", "batched"]
PromptIds = Sequence[tuple[int, ...]]


@attrs.frozen
class Contender:
    """One way to decode prompts.

    Attributes:
        kind: how several prompts are decoded. "in turns" and "at once" are streams of this runtime that all begin
            together; "in turns", each has passes of its own (`max_batch=1`). "batched" is mlx-lm's
            `BatchGenerator`, which decodes all prompts in one pass a token, and cannot speculate.
    """

    engine: Literal["mlx-lm", "outrider"]
    lookahead: Lookahead  # most tokens in a proposal; 0 decodes plainly. For mlx-lm, its `num_draft_tokens`
    kind: StreamsMode = "one after another"
    draft: str = ""  # the name of its drafter, if the benchmark has several; else empty
    named: str = ""  # its name in tables, if that does not follow from the rest

    @property
    def name(self) -> str:
        """Its name in tables."""
        how = "speculative" if self.engine == "mlx-lm" else "lookahead"
        return self.named or f"{self.engine} {how} {self.lookahead}" + (f", {self.draft}" if self.draft else "")

    @property
    def max_batch(self) -> int:
        """Most streams that share a pass, for this runtime."""
        return 1 if self.kind == "in turns" else MAX_BATCH

    @property
    def runtime(self) -> tuple[Lookahead, int, str]:
        """The key of its runtime: contenders with the same key share a runtime, and so have the same prices."""
        return self.lookahead, self.max_batch, self.draft


PLAIN = Contender("mlx-lm", 0, named="mlx-lm plain")
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
    *("rounds", "accepted", "rejected", "accepted_copied", "rejected_copied"),
    *("passes", "pass_rows", "lookahead_hits", "lookahead_misses"),
)


@attrs.frozen
class TimedToken:
    """A generated token, whether the draft proposed it, and when it was ready, in seconds on `time.perf_counter`."""

    token: int
    from_draft: bool
    at: float


def count_rounds(from_draft: Sequence[bool], num_draft_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Numbers of rounds and of proposed tokens in mlx-lm's speculative decoding, derived from the token flags.

    A round ends with a token of the target's own or with the text. It proposes `num_draft_tokens` tokens, or as many
    as `max_tokens` leaves.
    """
    begins = [i for i in range(len(from_draft)) if i == 0 or not from_draft[i - 1]]
    return len(begins), sum(min(max_tokens - begin, num_draft_tokens) for begin in begins)


@attrs.frozen
class Run:
    """Some prompts, decoded once.

    Attributes:
        seconds: length of the timed part. It begins with the call or, for one stream, when the first round has ended.
        first_tokens: seconds from the call to the first token, by prompt; with prompts one after another they include
            the earlier ones.
        counts: of `COUNTED`, those that are known: all for this runtime; for mlx-lm the rounds of single texts, and
            their accepted and rejected tokens.
    """

    texts: tuple[tuple[int, ...], ...]  # by prompt
    seconds: float
    num_timed: int  # tokens in the timed part
    first_tokens: tuple[float, ...] = ()
    counts: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


def run_of(
    texts: Sequence[Sequence[TimedToken]], began: float, counts: Mapping[str, int], *, with_prompts: bool
) -> Run:
    """The run that tokens and their times describe, by prompt; `began` is the time of the call.

    It is timed from the call to the last token of all; without its prompts it is a single text, which is timed from the
    end of its first round: tokens of that take no time of their own, and their number depends on the contender.
    """
    first, timed_from, timed_to = 0, began, max(text[-1].at for text in texts)
    if not with_prompts:
        (text,) = texts
        # The target's own first token ends the first round.
        end_of_first = next((i for i, token in enumerate(text) if not token.from_draft), len(text) - 1)
        first, timed_from = end_of_first + 1, text[end_of_first].at
    return Run(
        texts=tuple(tuple(token.token for token in text) for text in texts),
        seconds=timed_to - timed_from,
        num_timed=sum(map(len, texts)) - first,
        first_tokens=tuple(text[0].at - began for text in texts),
        counts=counts,
    )


# --- mlx-lm, on the target's thread ---------------------------------------------------------------


async def take_until_cancelled(worker: Worker, generate: Callable[[], Iterator[tuple[int, bool]]]) -> list[TimedToken]:
    """All tokens of a generator with their times; the generator is made, runs and is closed on a worker's thread.

    Raises: JobError: the generator raised.

    Cancellation: takes effect after the next token.
    """
    stop = trio.Event()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_when_cancelled)
        # Captured, since the nursery would wrap an exception in a group.
        taken = await outcome.acapture(worker.run, Job("decode", partial(_take, generate, stop)))
        nursery.cancel_scope.cancel()
    return taken.unwrap()


def _take(generate: Callable[[], Iterator[tuple[int, bool]]], stop: trio.Event) -> list[TimedToken]:
    tokens = []
    # Closed on this thread: mlx-lm's generators hold a stream of the thread that ran them.
    with closing(cast(Any, generate())) as steps:
        for token, from_draft in steps:
            tokens.append(TimedToken(token, from_draft, time.perf_counter()))
            if stop.is_set():
                break
    return tokens


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


def batched_steps(target: Module, prompts: PromptIds, length: Length, owners: list[int]) -> Iterator[tuple[int, bool]]:
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
