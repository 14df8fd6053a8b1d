"""The examination of a model or a pair on this machine: caches, rewind modes and pass times, and the report on them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from actors.distributed.exchange import Exchange
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharded_model import ShardedModel
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import Anatomy, MLXModel, dtypes_of
from actors.model import Model, RewindMode
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import ModelError, RankError, VocabularyMismatchError
from protocol.open_options import OpenOptions
from protocol.reprs import size_in_words
from protocol.settings import AUTO_DRAFT, MTP
from protocol.trace import ActorName
from runtime.doctor.agreement import BEGINNINGS, agreement_rows
from runtime.doctor.conclusion import Findings, conclude, width_cost
from runtime.engine.memory import MemoryBudget, weights_of
from runtime.loading import model_sources
from runtime.loading.blas import blas_in_use
from runtime.loading.device import default_memory_limit, processor_name
from runtime.loading.drafters import suggest_draft
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import Loaded, LoadedDraft, ModelSource
from runtime.loading.model_spec import ModelSpec
from runtime.loading.tokenizers import vocabulary_map
from runtime.measuring.pass_times import (
    CONTEXT_TOKENS,
    REPEATS,
    SHARED_CONTEXT_TOKENS,
    WIDTHS,
    PassTime,
    medians,
    time_passes,
    time_shared_passes,
)
from runtime.ranks.leading import check_group, leading, worker_for
from runtime.ranks.sharded_target import load_target_onto
from runtime.terminal.tables import Section

# The thread, the source and the loaded model of a drafter.
_DraftHere = tuple[ThreadWorker, ModelSource, Loaded | LoadedDraft]

# What a report has of passes: widths in tokens, and numbers of texts that share a pass.
REPORT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
NUMBERS_OF_TEXTS = (1, 2, 4, 8, 16)


@attrs.frozen
class ExaminedModel:
    """One model; for a sharded target, the anatomy is that of rank 0's part, and the passes are those of all ranks."""

    anatomy: Anatomy
    passes: dict[int, PassTime]  # by width in tokens
    shared_passes: dict[int, PassTime] = attrs.field(factory=dict)  # by number of texts; empty if they were not timed
    exchange: dict[int, Exchange] | None = None  # of a pass of a sharded target, by width; None on one machine
    num_ranks: int = 1

    @property
    def exchange_seconds(self) -> dict[int, float] | None:
        """The median time of the exchange of a pass, by width; None on one machine."""
        if self.exchange is None:
            return None
        return {width: statistics.median(exchange.seconds) for width, exchange in self.exchange.items()}


@attrs.frozen
class ExaminedDrafter:
    """One trained drafter."""

    rows: list[tuple[str, str]]  # (name, finding) of the report
    passes: dict[int, PassTime]  # width 1 is a draft step; wider ones read accepted tokens again, with hidden states


@attrs.frozen
class Diagnosis:
    """The findings of `examine`."""

    target: ExaminedModel
    draft: ExaminedModel | ExaminedDrafter | None
    findings: Findings  # of both
    vocabulary_note: str  # how much of their vocabularies they share, what differs, or why nothing was compared
    device: str
    memory: str  # how long a text may be by default, in words
    load: str | None = None  # of the machine, where other programs were at work when the examination began


def load_of_others() -> str | None:
    """The load of the machine, as text, if programs take more than half of its cores, or a whole one; else None."""
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"{load:.1f} on {num_cores} cores" if load > max(1.0, num_cores / 2) else None


async def examine(
    target: ModelSource,
    draft: ModelSource | None = None,
    *,
    group: RankGroup | None = None,
    load: str | None = None,
    is_for_report: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
    **cache_options: Any,
) -> Diagnosis:
    """Examine a model or a pair on this machine.

    Args:
        target, draft, group: as for `runtime.open`; other ranks call `runtime.follow` meanwhile.
        load: see `Diagnosis`.
        is_for_report: whether to time passes of more widths, and passes that texts share, for `price_tables`.
        on_progress: called with a description of each step before it starts.
        **cache_options: options of `runtime.open`: rewind, max_kv_size, kv_bits, kv_group_size, quantized_kv_start.

    Raises:
        SettingsError: an option is out of its range, or does not go with ranks.
        ModelError: a model cannot be loaded, or fails; the original error is the cause.
        RankError: a rank has ended, hangs, differs or fails; it is named.

    Cancellation: takes effect after the current load or timing.
    """
    sources, options = check_examined(target, draft, group=group, **cache_options)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_for(lambda _: None, group, None))
        if group is not None:
            stack.enter_context(leading(group, worker))
        on_progress("loading the target")
        loaded = await load_target_onto(worker, sources["target"], options, group)

        async def load_draft(stack: AsyncExitStack, source: ModelSource) -> _DraftHere:
            worker = await stack.enter_async_context(ThreadWorker("draft"))
            on_progress("loading the draft")
            if str(source) != MTP and await model_sources.folder_of_trained_drafter(worker, source) is None:
                return worker, source, await model_sources.load_onto(worker, "draft", source, options)
            drafter = await model_sources.load_draft_onto(worker, source, options, loaded.drafted)
            loaded.model.record_features(None)  # the target is timed as it is
            return worker, source, drafter

        draft_here: _DraftHere | None = None
        if (source := sources.get("draft")) == AUTO_DRAFT:
            draft_here = await model_sources.load_auto_onto(stack, loaded.folder, load_draft)
        elif source is not None:
            draft_here = await load_draft(stack, source)
        # First what does not depend on the machine's speed, or on how busy it is.
        draft_model = draft_here[2] if draft_here is not None and isinstance(draft_here[2], Loaded) else None
        same, is_translated, note = await _compare(worker, loaded, draft_model)
        suggestions: tuple[str, ...] = ()
        has_trained = draft_here is not None and draft_model is None
        memory = _memory_of(loaded.model, None if draft_here is None else draft_here[2].model)
        if loaded.tokenizer is not None and not same and not has_trained and not isinstance(target, tuple):
            on_progress("looking for draft models on the disk")
            # Suggestions are optional: a disk that cannot be searched must not hide the measurements.
            with suppress(JobError):
                path = target.path if isinstance(target, ModelSpec) else target
                found = await worker.run(Job("load", partial(suggest_draft, path)))
                suggestions = tuple(suggestion.described for suggestion in found)
        # One after the other, so that each model is timed alone.
        on_progress("timing the target")
        widths = REPORT_WIDTHS if is_for_report else WIDTHS
        num_texts = NUMBERS_OF_TEXTS if is_for_report else ()
        examined = await _examine_on(worker, "target", sources["target"], loaded.model, widths, num_texts)
        examined_draft: ExaminedModel | ExaminedDrafter | None = None
        if draft_here is not None:
            draft_worker, source, its_model = draft_here
            if isinstance(its_model, Loaded):
                on_progress("timing the draft")
                examined_draft = await _examine_on(draft_worker, "draft", source, its_model.model, widths)
            else:
                on_progress("comparing the draft with the target's text, and timing it")
                decode_s = examined.passes[1].median
                examined_draft = await _examine_drafter(draft_worker, its_model, loaded, decode_s, widths)
    findings = Findings(
        verify_seconds=medians(examined.passes),
        draft_seconds=None if examined_draft is None else medians(examined_draft.passes),
        same_vocabulary=same,
        is_translated=is_translated,
        can_rewind=examined.anatomy.rewind_mode is not RewindMode.SINGLE,
        dtypes=examined.anatomy.dtypes,
        blas=blas_in_use(),
        suggestions=suggestions,
        exchange_seconds=examined.exchange_seconds,
        num_ranks=examined.num_ranks,
    )
    return Diagnosis(examined, examined_draft, findings, note, mx.default_device().type.name, memory, load)


def check_examined(
    target: ModelSource, draft: ModelSource | None = None, *, group: RankGroup | None = None, **cache_options: Any
) -> tuple[dict[ActorName, ModelSource], CacheOptions]:
    """The models to load and the options of their caches, from arguments of `examine`, checked as far as possible."""
    sources: dict[ActorName, ModelSource] = {"target": model_sources.check_source("target", target)}
    if draft is not None:
        sources["draft"] = model_sources.check_draft_source(draft, sources["target"])
    options = model_sources.caches_of(OpenOptions(**cache_options))
    if group is not None:
        check_group(group, sources["target"], sources.get("draft"))
    return sources, options


async def _examine_drafter(
    worker: Worker, drafter: LoadedDraft, target: Loaded, decode_s: float, widths: Sequence[int]
) -> ExaminedDrafter:
    model, kind = drafter.model, drafter.kind
    assert isinstance(model, TrainedDrafter)
    assert kind is not None

    def examine_here() -> ExaminedDrafter:
        passes = time_passes(model, widths)
        rows = [
            ("kind", kind),
            ("reads", described_layers(model.feature_layers, len(target.model.module.layers))),
            ("proposes", f"{model.num_draft_tokens:,} of the target's {target.model.vocab_size:,} tokens"),
            # What it shares with the target does not count.
            ("weights", f"{_size(model.num_bytes)}, {', '.join(dtypes_of(model.module))}"),
        ]
        if target.tokenizer is not None and target.model.num_ranks == 1:
            beginnings = [target.tokenizer.encode(text) for text in BEGINNINGS]
            rows += agreement_rows(target.model, beginnings, model, decode_s)
        rows += _times_of(passes, "T_d", lambda width: "a draft step" if width == 1 else f"reading {width} tokens")
        return ExaminedDrafter(rows, passes)

    return await worker.run(Job("load", examine_here))


async def _examine_on(
    worker: ThreadWorker,
    role: ActorName,
    source: ModelSource,
    model: MLXModel,
    widths: Sequence[int],
    numbers_of_texts: Sequence[int] = (),
) -> ExaminedModel:
    def examine_here() -> ExaminedModel:
        anatomy, shared = model.anatomy(), {}
        if numbers_of_texts and anatomy.sharing_obstacle is None:
            shared = {num_texts: time_shared_passes(model, num_texts) for num_texts in numbers_of_texts}
        examined = ExaminedModel(anatomy, time_passes(model, widths), shared)
        if not isinstance(model, ShardedModel):
            return examined
        exchange = {width: model.time_exchange(width, REPEATS) for width in widths}
        return attrs.evolve(examined, exchange=exchange, num_ranks=model.num_ranks)

    try:
        return await worker.run(Job("load", examine_here))
    except JobError as error:
        if isinstance(error.__cause__, RankError):
            raise error.__cause__ from None
        named = f"{role} {name_of(source)!r}"
        raise ModelError(f"{named} failed while it was examined: {error.__cause__}") from error.__cause__


def _memory_of(target: MLXModel, draft: Model | None) -> str:
    """The longest text by the default of `memory_limit`, in words."""
    models = [target] if draft is None else [target, draft]
    limit = default_memory_limit(weights_of(models))
    budget = MemoryBudget(limit, target, lambda: draft, lambda: None)
    longest, token_bytes = budget.longest_text, sum(model.cache_size.slot_bytes for model in models)
    budget.close()
    length = "any number of tokens" if longest is None else f"{longest:,} tokens"
    bound = "" if target.context_length is None else f" (its context: {target.context_length:,})"
    return f"{length}{bound} at {size_in_words(token_bytes)} each, within a memory_limit of {size_in_words(limit)}"


async def _compare(worker: ThreadWorker, target: Loaded, draft: Loaded | None) -> tuple[bool | None, bool, str]:
    if draft is None:
        return None, False, "no draft model"
    if target.tokenizer is None or draft.tokenizer is None:
        return None, False, "no tokenizer to compare"
    sizes = target.model.vocab_size, draft.model.vocab_size
    compare = partial(vocabulary_map, target.tokenizer, sizes[0], draft.tokenizer, sizes[1])
    try:
        found = await worker.run(Job("load", compare))
    except JobError as error:
        if isinstance(error.__cause__, VocabularyMismatchError):
            return False, False, str(error.__cause__)
        raise
    return (True, False, f"{len(target.tokenizer):,} tokens") if found is None else (False, True, found.described)


def report(diagnosis: Diagnosis) -> list[Section]:
    """The report: sections, each a title and rows of (name, finding)."""
    findings, obstacle = diagnosis.findings, diagnosis.target.anatomy.sharing_obstacle
    shares = "share passes" if obstacle is None else f"take turns, a pass for each, because {obstacle}"
    sections = [("target", [*_rows(diagnosis.target, "T_v"), ("several streams", shares)])]
    if (draft := diagnosis.draft) is not None:
        ratio = draft.passes[1].median / diagnosis.target.passes[1].median
        pair = [("cost ratio", f"T_d(1) / T_v(1) = {ratio:.2f}")]
        if isinstance(draft, ExaminedDrafter):
            rows = draft.rows
        else:
            rows = _rows(draft, "T_d")
            compared = {True: "the same, ", False: "DIFFERENT: ", None: "not compared: "}[findings.same_vocabulary]
            said = "translated: the draft model can propose " if findings.is_translated else compared
            pair.insert(0, ("vocabularies", said + diagnosis.vocabulary_note))
        sections += [("draft", rows), ("pair", pair)]
    machine = [("device", diagnosis.device), ("longest text", diagnosis.memory)]
    if findings.blas is not None:
        machine.append(("linear algebra", findings.blas))
    if diagnosis.load is not None:
        machine.append(("load", f"{diagnosis.load} when this began: other programs work, and the times are too long"))
    return [*sections, ("machine", machine), ("conclusion", conclude(findings))]


def _rows(examined: ExaminedModel, symbol: str) -> list[tuple[str, str]]:
    anatomy, passes, exchanged = examined.anatomy, examined.passes, examined.exchange_seconds
    rows = [
        ("family", anatomy.family),
        (
            "weights" if exchanged is None else "weights of rank 0",
            f"{anatomy.num_parameters / 1e6:,.1f} M values, {_size(anatomy.num_bytes)}, {', '.join(anatomy.dtypes)}",
        ),
        ("caches", ", ".join(f"{count} × {kind}" for kind, count in anatomy.cache_kinds.items())),
        ("rewinds by", _REWIND_MODES[anatomy.rewind_mode]),
    ]
    if anatomy.window is not None and anatomy.rewind_mode_beyond_window is not None:
        rows.append((f"beyond {anatomy.window:,} tokens", _REWIND_MODES[anatomy.rewind_mode_beyond_window]))
    if RewindMode.CHECKPOINT in (anatomy.rewind_mode, anatomy.rewind_mode_beyond_window):
        rows.append(("a checkpoint keeps", _size(anatomy.checkpoint_bytes)))
    rows += [
        (name, took if exchanged is None else f"{took}, of it exchange {exchanged[width] * 1e3:,.2f} ms")
        for width, (name, took) in zip(
            passes, _times_of(passes, symbol, lambda n: f"a pass of {n} token{'s' * (n > 1)}"), strict=True
        )
    ]
    if examined.exchange is not None:
        collectives = ", ".join(f"{count} × {name}" for name, count in examined.exchange[1].collectives.items())
        rows.append(("a pass exchanges", f"{_size(examined.exchange[1].num_bytes)} a token, by {collectives}"))
    held_s = passes[1].building
    a_layer = f", {held_s / anatomy.num_layers * 1e6:,.0f} µs a layer" if anatomy.num_layers else ""
    rows.append(("Python's lock", f"held for {held_s * 1e3:,.2f} ms to build a pass{a_layer}"))
    rows.append(("each further token", f"adds {width_cost(medians(passes)):.0%} of {symbol}(1)"))
    return rows


def _times_of(passes: Mapping[int, PassTime], symbol: str, named: Callable[[int], str]) -> list[tuple[str, str]]:
    """Rows (name, times) of a report; `named` gives the name of a width."""
    return [
        (named(n), f"{symbol}({n}) = {t.median * 1e3:,.2f} ms ({t.low * 1e3:,.2f}–{t.high * 1e3:,.2f})")
        for n, t in passes.items()
    ]


def price_tables(diagnosis: Diagnosis, named: str) -> list[dict[str, Any]]:
    """Median times of passes in seconds, in the form of `tests/protocol/device_prices/`; `named` is the target."""
    target, draft = diagnosis.target, diagnosis.draft
    of_tokens = {"target": target.passes} | ({} if draft is None else {"draft": draft.passes})
    device = str(mx.device_info().get("device_name") or processor_name())
    tables = []
    for how, num_context, passes in (
        ("by tokens of one text", CONTEXT_TOKENS, of_tokens),
        ("by texts that share a pass", SHARED_CONTEXT_TOKENS, {"target": target.shared_passes}),
    ):
        if widths := list(passes["target"]):
            tables.append(
                {
                    "device": f"{device}, {', '.join(target.anatomy.dtypes)}",
                    "source": f"{how}, {named}",
                    "widths": widths,
                    "text_lengths": [num_context],
                    "seconds": {
                        role: {str(num_context): [each[width].median for width in widths]}
                        for role, each in passes.items()
                        if each.keys() >= set(widths)
                    },
                }
            )
    return tables


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"


_REWIND_MODES = {
    RewindMode.TRIM: "trim: drops rejected tokens, at no cost",
    RewindMode.CHECKPOINT: "checkpoint: restores the state before the round, and reads accepted tokens again",
    RewindMode.SINGLE: "nothing (N=1): reads one committed token at a time, so speculation gains nothing",
}


def described_layers(layers: Sequence[int], num_layers: int) -> str:
    """What a drafter reads: the inputs of layers of its target, where `num_layers` stands for the last one's output."""
    *others, last = [str(layer) for layer in layers if layer < num_layers] or [""]
    parts = []
    if last:
        listed = f"layers {', '.join(others)} and {last}" if others else f"layer {last}"
        parts.append(f"what enters {listed} of {num_layers}")
    if num_layers in layers:
        parts.append(f"what the last of {num_layers} layers gives")
    return ", ".join(parts)
