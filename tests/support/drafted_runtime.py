"""A runtime with a trained drafter, and checks that its texts are the target's, whatever is drafted."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
from drafters_elsewhere import elsewhere
from models import greedy
from scripted import Price
from simulated_worker import SimulatedWorker

from actors.drafters.lookup_actor import LookupActor
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import evaluating_layers
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from protocol.trace import Event, Events, Instant
from runtime.engine.drafter_slot import LoadedDrafter
from runtime.engine.opening import running

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
NUM_TOKENS = 16


@asynccontextmanager
async def drafted(
    source: Path | Callable[[Any], Any],
    built: Any,
    *,
    cache_options: CacheOptions | None = None,
    price: Price | None = None,
    is_elsewhere: bool = False,
    on_drafter: Callable[[Any], None] | None = None,
    **options: Any,
) -> AsyncIterator[Any]:
    """A runtime of a target and a drafter.

    Args:
        source: the folder of a trained drafter; or a function that makes a drafter from the target's module: a model,
            or "ngram".
        is_elsewhere: whether the drafter is used as if it were in another process.
        price: of jobs in simulated time; None for real time.
        on_drafter: called with the drafter's model.
    """
    events = options.setdefault("events", Events())

    def worker(role: Any) -> ThreadWorker | SimulatedWorker:
        return ThreadWorker(role, events) if price is None else SimulatedWorker(role, price, events)

    async with worker("target") as target_worker, worker("draft") as draft_worker:
        target = await target_worker.run(Job("load", lambda: MLXModel(built, cache_options or CacheOptions())))
        load = partial(source, built) if callable(source) else partial(TrainedDrafter, source, built, target.vocab_size)
        drafter = await draft_worker.run(Job("load", load))
        if on_drafter is not None:
            on_drafter(drafter)
        if isinstance(drafter, TrainedDrafter):
            target.record_features(drafter.feature_layers)
        async with AsyncExitStack() as stack:
            stack.enter_context(target.evaluating_layers())
            at_draft: LoadedDrafter = drafter if drafter == "ngram" else (drafter, draft_worker)
            if is_elsewhere:
                there = elsewhere(drafter, lambda _: draft_worker, target.vocab_size, max_batch=options["max_batch"])
                at_draft, *_ = await stack.enter_async_context(there)
            yield await stack.enter_async_context(running((target, target_worker), at_draft, **options))


async def check_greedy(rt: Any, built: Any, lookaheads: Sequence[Any]) -> list[Any]:
    """Compare a greedy text for each lookahead with that of the target alone. Returns: the statistics of each."""
    found = []
    for prompt, lookahead in zip(cycle(PROMPTS), lookaheads, strict=False):
        stream = rt.stream(prompt, max_tokens=NUM_TOKENS, lookahead=lookahead, ignore_eos=True)
        assert [token.id async for token in stream] == greedy(built, prompt, NUM_TOKENS)
        found.append(stream.statistics())
        assert found[-1].draft_failures == 0
        # Where nothing is repeated, a lookup finds nothing.
        if lookahead != "auto" and not isinstance(rt._draft, LookupActor):
            assert found[-1].proposed > 0
    return found


async def check_seeded(rt: Any, lookahead: Any) -> None:
    """Compare texts at a temperature, several streams at once, with those of plain decoding, one after the other."""
    settings = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5, "acceptance": "match", "ignore_eos": True}
    plain = [await rt.generate(prompt, lookahead=0, **settings) for prompt in PROMPTS]
    completions = await rt.generate_many(PROMPTS, lookahead=lookahead, **settings)
    for completion, expected in zip(completions, plain, strict=True):
        assert [token.id for token in completion.tokens] == [token.id for token in expected.tokens]
        assert completion.statistics.proposed > 0 or isinstance(rt._draft, LookupActor)
        assert completion.statistics.draft_failures == 0


async def check_reuse(rt: Any, built: Any) -> None:
    """Compare texts that go on from the beginning of an earlier one with those of the target alone."""
    prompt = PROMPTS[2]
    for continued in (prompt, [*prompt, 3, 4, 5, 6], [*prompt[:5], 8, 9, 10], [*prompt, 3, 4, 7]):
        stream = rt.stream(continued, max_tokens=12, lookahead=2, ignore_eos=True, reuse_prefix=True)
        assert [token.id async for token in stream] == greedy(built, continued, 12)
        assert stream.statistics().draft_failures == 0


async def fresh_proposals(
    folder: Path, built: Any, lookahead: int
) -> tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]:
    """Stream a text at temperature 0. Returns: all of it, and what was proposed after each miss, with its position."""
    seen: list[Event] = []
    events = Events()
    events.listen(seen.append)
    async with drafted(folder, built, events=events) as rt:
        completion = await rt.generate(PROMPTS[0], max_tokens=40, lookahead=lookahead, ignore_eos=True)
    found, has_missed, position = [], False, 0
    for event in seen:
        if not isinstance(event, Instant):
            continue
        if event.kind == "verdict" and event.commit is not None:
            position = event.commit.start + len(event.commit.tokens)
        elif event.kind in ("hit", "miss"):
            has_missed = event.kind == "miss"
        elif event.kind == "proposal" and has_missed and event.tokens:
            found.append((position, event.tokens))
    assert len(found) > 3
    return (*PROMPTS[0], *(token.id for token in completion.tokens)), found


def features_of(built: Any, text: tuple[int, ...], layers: tuple[int, ...] | None = None) -> mx.array:
    """What enters some layers of a target for a text; by default, what the last one gives."""
    with evaluating_layers(built):
        model = MLXModel(built, CacheOptions())
        model.record_features((len(built.layers),) if layers is None else layers)
        return recorded(model, text)


def recorded(model: MLXModel, text: tuple[int, ...]) -> mx.array:
    """The features of a text that is read in one pass, which the model records."""
    sequence = model.open_sequence(alongside_model=False)
    sequence.feed(text, 0)
    taken = sequence.features.take(len(text))
    sequence.close()
    return taken.values
