"""The models of a measurement: a target and its drafters, each on its own thread, and the contenders' runs on them."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import attrs
import mlx.core as mx
import outcome
import trio

from actors.distributed.rank_group import RankGroup
from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.mlx.model import MLXModel, dtypes_of
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.warm_up import warm_up
from actors.workers.core_sharing import CORES
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import ModelError, PromptError, SettingsError
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.prices import Prices
from protocol.settings import AUTO_DRAFT, NGRAM
from protocol.statistics import Statistics
from protocol.trace import Event, Events
from runtime.bench import contenders
from runtime.bench.contenders import PLAIN, Contender, Length, PromptIds, Run, TimedToken
from runtime.engine.opening import bounded_batch, running
from runtime.engine.runtime import Runtime
from runtime.generation.text import encode_prompt
from runtime.loading import blas
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import ModelSource, check_draft_source, check_source, load_auto_onto, load_draft_onto
from runtime.measuring.machine import machine
from runtime.ranks.leading import check_group, ending_all, leading, worker_for
from runtime.ranks.sharded_target import load_target_onto

# Any of the models of a benchmark.
AnyModel = MLXModel | TranslatedModel | TrainedDrafter
# An idle BLAS thread spins before it sleeps; those of OpenBLAS spin for 0.1 s.
BLAS_IDLE_S = 0.2
# The names of the target and of an only drafter among the models of a benchmark.
TARGET, ONLY_DRAFT = "target", "draft"


class EventSwitch:
    """Passes the workers' events to the runtime of the current contender."""

    def __init__(self) -> None:
        self.listener: Callable[[Event], None] = lambda _: None

    def __call__(self, event: Event) -> None:
        self.listener(event)


@attrs.frozen
class LoadedModels:
    """A target with one drafter or several, each on its worker's thread.

    Attributes:
        models, workers: by name: `TARGET`, `ONLY_DRAFT`, or the drafter's if there are several. A drafter that is
            missing here drafts by prompt lookup.
        cache_options: of the runtime's caches; mlx-lm's caches follow those about quantisation.
        drafts: the drafters' sources, by name. The first is the drafter without a name.
        group: the ranks that the target is sharded over; None for one machine.
    """

    models: dict[str, AnyModel]
    workers: dict[str, Worker]
    events: EventSwitch
    tokenizer: Any = None
    cache_options: CacheOptions = attrs.field(factory=CacheOptions)
    drafts: Mapping[str, ModelSource] = {ONLY_DRAFT: NGRAM}
    group: RankGroup | None = None
    target_source: ModelSource = ""
    _runtimes: dict[object, tuple[Runtime, Events]] = attrs.field(init=False, factory=dict)  # by `Contender.runtime`

    @property
    def target(self) -> MLXModel:
        """The target."""
        return cast(MLXModel, self.models[TARGET])

    @property
    def has_template(self) -> bool:
        """Whether the target has a chat template."""
        return bool(getattr(self.tokenizer, "has_chat_template", False))

    def about(self) -> dict[str, Any]:
        """The models, their dtypes by role (or by the drafter's name, of several), the machine, and the ranks."""
        about = {"device": mx.default_device().type.name, **machine()}
        if (library := blas.blas_in_use()) is not None:
            about["linear algebra"] = library
        if blas.shares_cores():
            num_cores = blas.num_usable_cores()
            about["BLAS threads"] = (
                f"{num_cores} for a model that computes alone, shared by models that compute at the same time"
            )
        if self.group is not None:
            about["ranks"] = f"{self.group.size}, of which this is the first"
        return {
            "target": name_of(self.target_source),
            "draft": ", ".join(name_of(draft) for draft in self.drafts.values()),
            "dtypes": {name: dtypes_of(model.module) for name, model in self.models.items()},
            "machine": about,
            "num_ranks": 1 if self.group is None else self.group.size,
        }

    def drafter(self, name: str = "") -> tuple[AnyModel, Worker] | None:
        """A drafter and its worker, the first one for ""; None for prompt lookup."""
        name = name or next(iter(self.drafts))
        return (self.models[name], self.workers[name]) if name in self.models else None

    def record_for(self, drafter: tuple[AnyModel, Worker] | None) -> None:
        """Have the target record what a drafter reads, in texts that begin from now on."""
        model = None if drafter is None else drafter[0]
        self.target.record_features(model.feature_layers if isinstance(model, TrainedDrafter) else None)

    @contextmanager
    def evaluating_layers(self) -> Iterator[None]:
        """Evaluate layer by layer inside the block, as this runtime does; mlx-lm runs the models as they are."""
        with ExitStack() as stack:
            for model in self.models.values():
                stack.enter_context(model.evaluating_layers())
            yield

    async def open_runtime(
        self,
        stack: AsyncExitStack,
        draft: str = "",
        *,
        max_batch: int = MAX_BATCH,
        prefix_cache_bytes: int,
        make_policy: MakePolicy = policy_by_settings,
    ) -> tuple[Runtime, Events]:
        """Open a runtime as `runtime.open` does, inside `evaluating_layers`; `stack` closes it.

        Returns: the runtime, and its events, which listen to the workers through `self.events` while it works.
        """
        self.events.listener = events = Events()
        target, drafter = (self.target, self.workers[TARGET]), self.drafter(draft)
        self.record_for(drafter)
        prices = Prices(core_hold_s=CORES.hold_s)
        if drafter is not None:
            # Not only for the prices: it runs each model for the first time while the other one rests. What fails here
            # fails again in a run, where it is known which contender failed.
            with suppress(JobError):
                await warm_up(target, drafter, prices)
        options: dict[str, Any] = {"prefix_cache_bytes": prefix_cache_bytes, "make_policy": make_policy}
        options["max_batch"] = await bounded_batch(*target, max_batch)
        opening = running(target, drafter or NGRAM, events=events, prices=prices, **options)
        runtime = await stack.enter_async_context(opening)
        if self.group is not None:
            stack.enter_context(ending_all(self.group, runtime._sessions.fail))
        return runtime, events

    async def open_runtimes(
        self, stack: AsyncExitStack, contenders: Iterable[Contender], *, prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    ) -> None:
        """Open the runtimes that contenders need, so that none learns from another's streams; `stack` closes them."""
        with self.evaluating_layers():
            for contender in contenders:
                if contender.engine == "outrider" and contender.runtime not in self._runtimes:
                    self._runtimes[contender.runtime] = await self.open_runtime(
                        stack, contender.draft, max_batch=contender.max_batch, prefix_cache_bytes=prefix_cache_bytes
                    )
            await self._wait_until_idle()

    def encoded(self, prompts: Sequence[str | Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        """Prompts as token ids. Each leaves room for `max_tokens` more in every context.

        Raises: PromptError.
        """
        found = [encode_prompt(prompt, self.tokenizer, self.target.vocab_size) for prompt in prompts]
        lengths = [model.context_length for model in self.models.values() if model.context_length is not None]
        longest, context = max(map(len, found)), min(lengths, default=math.inf)
        if longest + max_tokens > context:
            raise PromptError(
                f"a prompt of {longest} tokens and max_tokens={max_tokens} do not fit a context of {context} tokens; "
                "shorten one of them"
            )
        return found

    # --- decoding -------------------------------------------------------------------------------

    async def run(self, contender: Contender, prompts: PromptIds, length: Length, *, with_prompts: bool = True) -> Run:
        """Decode some prompts. Without `with_prompts` there is one prompt, and reading it does not count.

        Raises:
            JobError: mlx-lm raised.
            ModelError: likewise in plain decoding, with which everything is compared.
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
            try:
                counts = await self._run_mlx_lm(contender, prompts, length, texts)
            except JobError as error:
                if contender != PLAIN:
                    raise
                raise ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}") from error.__cause__
        else:
            self.record_for(self.drafter(contender.draft))
            with self.evaluating_layers():
                counts = await self._run_outrider(contender, prompts, length, texts)
        return contenders.run_of(texts, began, counts, with_prompts=with_prompts)

    # --- this runtime -----------------------------------------------------------------------------

    async def _run_outrider(
        self, contender: Contender, prompts: PromptIds, length: Length, texts: list[list[TimedToken]]
    ) -> dict[str, int]:
        runtime, self.events.listener = self._runtimes[contender.runtime]
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
        return {name: sum(getattr(each, name) for each in statistics) for name in contenders.COUNTED}

    async def _wait_until_idle(self) -> None:
        """Wait until no model works: a drafter may still run a step that nobody needs."""
        # Not `num_streams`, which leaves out sessions that are over and not yet closed.
        while any(runtime._sessions.by_id for runtime, _ in self._runtimes.values()):
            await trio.lowlevel.checkpoint()
        # The first job waits for the current one, the second for a job that the end of that one started.
        for _ in range(2):
            for worker in self.workers.values():
                await worker.run(Job("close", lambda: None))

    # --- mlx-lm -----------------------------------------------------------------------------------

    async def _run_mlx_lm(
        self, contender: Contender, prompts: PromptIds, length: Length, texts: list[list[TimedToken]]
    ) -> dict[str, int]:
        num_draft_tokens = int(contender.lookahead)
        target, worker = self.target.module, self.workers[TARGET]
        if contender.kind == "batched":
            owners: list[int] = []
            taken = await contenders.take_until_cancelled(
                worker, partial(contenders.batched_steps, target, prompts, length, owners)
            )
            for owner, token in zip(owners, taken, strict=True):
                texts[owner].append(token)
            return {}
        draft = self.drafter(contender.draft)
        module = None if num_draft_tokens == 0 or draft is None else draft[0].module
        counts: Counter[str] = Counter(rounds=0, accepted=0, rejected=0)
        for prompt, text in zip(prompts, texts, strict=True):
            options = target, module, prompt, num_draft_tokens, length, self.cache_options
            text += await contenders.take_until_cancelled(worker, partial(contenders.mlx_lm_steps, *options))
            flags = [token.from_draft for token in text]
            rounds, proposed = contenders.count_rounds(flags, num_draft_tokens, length.max_tokens)
            counts.update(rounds=rounds, accepted=sum(flags), rejected=proposed - sum(flags))
        return counts


async def _read(
    runtime: Runtime, settings: dict[str, Any], prompt: tuple[int, ...], text: list[TimedToken]
) -> Statistics:
    stream = runtime.stream(prompt, **settings)
    async with stream:
        async for token in stream:
            text.append(TimedToken(token.id, token.from_draft, time.perf_counter()))
    return stream.statistics()


async def load_models(
    stack: AsyncExitStack,
    target: ModelSource,
    drafts: Mapping[str, ModelSource],
    options: CacheOptions,
    *,
    dtype: str | None,
    group: RankGroup | None,
    on_progress: Callable[[str], None],
) -> LoadedModels:
    """Load a target and its drafters onto threads of their own, which end with `stack`; see `Benchmark.measure`.

    Args:
        drafts: by name: `ONLY_DRAFT`, or names of several. "ngram" loads nothing; "auto" must find one.
    """
    target = check_source("target", target)
    sources = {name: check_draft_source(draft, target) for name, draft in drafts.items() if draft != NGRAM}
    if dtype is not None and any(isinstance(source, tuple) for source in (target, *sources.values())):
        raise SettingsError("dtype is for models that are loaded here; cast one that is there already yourself")
    if group is not None:
        for draft in (None, *sources.values()):
            check_group(group, target, draft)
        if dtype is not None:
            raise SettingsError("dtype does not go with ranks: each has its part as it is in the files; leave it out")
    stack.enter_context(wired_memory())
    events = EventSwitch()
    target_thread = worker_for(events, group, None)
    workers: dict[str, Worker] = {TARGET: await stack.enter_async_context(target_thread)}
    if group is not None:
        stack.enter_context(leading(group, target_thread))
    on_progress("loading the target")
    loaded = await load_target_onto(workers[TARGET], target, options, group)
    models: dict[str, AnyModel] = {TARGET: loaded.model}
    await _cast_on(workers[TARGET], loaded.model, dtype)
    taken = dict(drafts)

    async def load_draft(stack: AsyncExitStack, source: ModelSource) -> tuple[ModelSource, Worker, AnyModel]:
        worker = await stack.enter_async_context(ThreadWorker("draft", events))
        return source, worker, (await load_draft_onto(worker, source, options, loaded.drafted)).model

    for name, source in sources.items():
        on_progress("loading the draft" + ("" if name == ONLY_DRAFT else f" {name}"))
        if source != AUTO_DRAFT:
            drafter = await load_draft(stack, source)
        elif (found := await load_auto_onto(stack, loaded.folder, load_draft)) is not None:
            drafter = found
        else:
            raise ModelError(f'draft "{AUTO_DRAFT}" finds none that fits the target, and one is measured; name one')
        taken[name], workers[name], models[name] = drafter
        await _cast_on(workers[name], models[name], dtype)
    loaded.model.record_features(None)  # until a drafter needs them
    return LoadedModels(models, workers, events, loaded.tokenizer, options, taken, group, target)


async def _cast_on(worker: Worker, model: AnyModel, dtype: str | None) -> None:
    def set_dtype(dtype: str) -> None:
        model.module.set_dtype(getattr(mx, dtype))
        mx.eval(model.module)

    if dtype is not None:
        await worker.run(Job("load", partial(set_dtype, dtype)))
