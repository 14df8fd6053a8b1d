"""Measurements that show the best settings of this device: overlap, prices, buffer sizes, and what Python takes.

They pass if they can be made. The machine should have nothing else to do. The results are in the findings' figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import trio
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear

from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set
from actors.mlx.model import MLXModel, dtypes_of, quantize_weights
from runtime.bench.benchmark import MIN_CLOCK
from runtime.bench.many_streams import ManyStreams, StreamsPlan
from runtime.bench.one_stream import OneStream, OneStreamPlan
from runtime.bench.overhead import Overhead, OverheadPlan
from runtime.bench.shapes import PROMPTS, shaped_pair
from runtime.bench.small_models import small_model
from runtime.loading.device import processor_name
from runtime.loading.vocabularies import check_vocabularies
from runtime.measuring.figures import Record
from runtime.measuring.pass_times import REPEATS, Passes, time_passes, time_shared_passes
from runtime.measuring.report_files import PriceTable
from runtime.selftest.baselines import in_parallel, median_step_s
from runtime.selftest.checks import Finding
from runtime.selftest.subject import Subject

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
NUMBERS_OF_TEXTS = (1, 2, 4, 8, 16)
TEXT_LENGTHS = (64, 512)
# Each text is read before its pass is timed; on a CPU, that takes 10 ms a token.
SHARED_TEXT_LENGTH = 16
BITS = 4
_QUANTIZED: dict[str, Any] = {"bits": BITS, "group_size": 64, "mode": "affine"}
NUMBERS_OF_LAYERS = (4, 36)
NUMBERS_OF_STREAMS = (4, 16)
SHAPE_ACCEPTANCE = 0.75
NUM_QUICK_REPEATS = 3  # of passes
NUM_REPEATS = 2  # of benchmarks
# Fields of `mx.device_info`, which has others on each backend.
DEVICE_FIELDS = (
    "device_name",
    "architecture",
    "memory_size",
    "max_buffer_length",
    "compute_capability_major",
    "compute_capability_minor",
)


def prices(subject: Subject) -> Finding:
    """The times of forward passes: by tokens of one text and by texts that share them, by the length of the text, and
    by the bits of the weights.
    """
    tables: list[PriceTable] = []
    models = {"target": subject.load("target")[0], "draft": subject.load("draft")[0]}
    for bits in (None, BITS):
        if bits is not None and any(isinstance(module, QuantizedLinear) for module in models["target"].modules()):
            break  # the models are already quantised
        named = ", ".join(dtypes_of(models["target"])) if bits is None else f"{bits} bits"
        if bits is not None:
            for model in models.values():
                quantize_weights(model, **_QUANTIZED)
                mx.eval(model.parameters())
        tables += _price_tables(models, f"{_device_name()}, {named}", subject)
    shortest = str(TEXT_LENGTHS[0])
    target_s, draft_s = (tables[0].seconds[role][shortest] for role in ("target", "draft"))
    return Finding(
        "passed",
        f"a pass of the target over 4 tokens takes {target_s[WIDTHS.index(4)] / target_s[0]:.2f} times as long as over "
        f"one, and a draft step {draft_s[0] / target_s[0]:.2f} times",
        {"price_tables": [attrs.asdict(table) for table in tables]},
    )


def _price_tables(models: Mapping[str, Module], device: str, subject: Subject) -> list[PriceTable]:
    """The prices of a pair by tokens of one text, and of the target also by texts, if they can share passes."""
    wrapped = {role: MLXModel(model, CacheOptions()) for role, model in models.items()}
    repeats, lengths = (NUM_QUICK_REPEATS, TEXT_LENGTHS[:1]) if subject.is_quick else (REPEATS, TEXT_LENGTHS)
    by_tokens = {
        role: {str(n): time_passes(model, WIDTHS, repeats=repeats, num_context=n) for n in lengths}
        for role, model in wrapped.items()
    }
    tables = [_price_table(device, f"by tokens of one text, {subject.pair_name}", WIDTHS, by_tokens)]
    if wrapped["target"].sharing_obstacle() is None:
        length = SHARED_TEXT_LENGTH
        passes = time_shared_passes(wrapped["target"], NUMBERS_OF_TEXTS, repeats=repeats, num_context=length)
        source = f"by texts that share a pass, {subject.pair_name}"
        tables.append(_price_table(device, source, NUMBERS_OF_TEXTS, {"target": {str(length): passes}}))
    return tables


def _price_table(
    device: str, source: str, widths: Sequence[int], passes: Mapping[str, Mapping[str, Passes]]
) -> PriceTable:
    seconds = {
        role: {length: list(each.seconds.values()) for length, each in by_length.items()}
        for role, by_length in passes.items()
    }
    return PriceTable(device, source, widths, [int(length) for length in next(iter(passes.values()))], seconds)


def _device_name() -> str:
    return str(mx.device_info().get("device_name") or processor_name())


def python(subject: Subject) -> Finding:
    """How long a pass holds the GIL: to build its graph, by the number of layers, and in the loop around it."""
    models = [small_model("llama", 0, num_hidden_layers=layers) for layers in NUMBERS_OF_LAYERS]
    building = [time_passes(MLXModel(model, CacheOptions()), (1,)).building[1].median or 0.0 for model in models]
    per_layer = (building[-1] - building[0]) / (NUMBERS_OF_LAYERS[-1] - NUMBERS_OF_LAYERS[0])
    plan = OverheadPlan(
        streams=(1, NUMBERS_OF_STREAMS[-1]), max_tokens=max(16, subject.max_tokens // 2), repeats=NUM_REPEATS
    )
    rows = trio.run(Overhead(plan).measure).rows
    return Finding(
        "passed",
        f"building the graph of a pass holds Python's lock for {per_layer * 1e6:.0f} µs a layer, that is "
        f"{per_layer * 64e3:.1f} ms with 64 layers",
        {
            "building_s": dict(zip(map(str, NUMBERS_OF_LAYERS), building, strict=True)),
            "microseconds_a_token": {f"{row.streams} streams, {row.way}": row.median for row in rows},
        },
    )


def many_streams(subject: Subject) -> Finding:
    """Tokens per second of several streams at once, against mlx-lm's `BatchGenerator`."""
    plan = StreamsPlan(
        max_tokens=max(32, subject.max_tokens // 2),
        repeats=NUM_REPEATS,
        cooldown=subject.cooldown,
        streams=NUMBERS_OF_STREAMS,
        kinds=("at once",),
    )
    result = trio.run(ManyStreams(plan).measure, subject.target, subject.draft)
    speeds = {f"{row.streams} streams, {row.name}": row.median for row in result.rows}
    ours, batched = (row.median for row in result.rows[-2:])
    ratio = f"{ours / batched:.2f} times" if ours and batched else "unknown against"
    return Finding(
        "passed",
        f"{NUMBERS_OF_STREAMS[-1]} streams have {ratio} the speed of mlx-lm's BatchGenerator",
        {"tokens_per_second": speeds, "clock": result.clock},
    )


def shape(subject: Subject) -> Finding:
    """The speeds and prices of a pair with the cost of an 8B in 4 bits; skipped on a CPU, which takes too long."""
    if subject.shape is None:
        return Finding("skipped", "a CPU takes too long for the shape of a real pair")
    target, draft = shaped_pair(subject.shape, SHAPE_ACCEPTANCE, quantization=_QUANTIZED)
    mx.eval(target, draft)
    named = attrs.evolve(subject, target=target.source_name, draft=draft.source_name)
    tables = _price_tables({"target": target, "draft": draft}, _device_name(), named)
    plan = _plan(subject, prompts=PROMPTS[:2], max_tokens=subject.max_tokens)
    result = trio.run(OneStream(plan).measure, (target, None), (draft, None))
    return Finding(
        "passed",
        f"{target.source_name}: {_against_plain(result)}, with guesses right {SHAPE_ACCEPTANCE:.0%} of the time",
        {**_figures(result), "price_tables": [attrs.asdict(table) for table in tables]},
    )


def overlap(subject: Subject) -> Finding:
    """How much a pass of the target and a draft step slow each other down when both run."""
    models = {"target": subject.load("target")[0], "draft": subject.load("draft")[0]}
    alone = {role: median_step_s(model, subject.seconds / 3) for role, model in models.items()}
    beside = in_parallel({role: partial(median_step_s, model, subject.seconds / 3) for role, model in models.items()})
    slower = {role: beside[role] / alone[role] for role in models}
    return Finding(
        "passed",
        f"beside each other a pass of the target takes {slower['target']:.2f} times as long as alone, and a draft step "
        f"{slower['draft']:.2f} times",
        {"alone_s": alone, "beside_s": beside, "slower": slower},
    )


def speeds(subject: Subject) -> Finding:
    """Tokens per second: mlx-lm plain and speculative, Outrider plain and with "auto"."""
    plan = _plan(subject, max_tokens=max(32, subject.max_tokens))
    result = trio.run(OneStream(plan).measure, subject.target, subject.draft)
    return Finding("passed", _against_plain(result), _figures(result))


def _plan(subject: Subject, **given: Any) -> OneStreamPlan:
    rest = subject.cooldown
    return OneStreamPlan(repeats=NUM_REPEATS, cooldown=rest, num_draft_tokens=(2, 4), lookaheads=(0, "auto"), **given)


def _figures(result: Record) -> dict[str, Any]:
    medians = {row.name: row.median for row in result.rows}
    return {"tokens_per_second": medians, "clock": result.clock, "machine": result.machine, "dtypes": result.dtypes}


def _against_plain(result: Record) -> str:
    """What "auto" gains, and whether the machine became slower meanwhile."""
    medians = {row.name: row.median for row in result.rows}
    plain, auto = medians["mlx-lm plain"], medians["outrider lookahead auto"]
    ratio = f"{auto / plain:.2f} times" if auto and plain else "unknown against"
    sunk = (
        "" if result.clock is None or result.clock >= MIN_CLOCK else f"; the clock sank to {result.clock:.2f} meanwhile"
    )
    return f"Outrider's \"auto\" has {ratio} the speed of mlx-lm's plain decoding{sunk}"


# The checks compare the two models on the same token ids, without any translation.
_OTHER_VOCABULARY = (
    "selftest gives both models the same token ids: check the target with a draft model of its own vocabulary, or "
    "leave both out; this pair can be used all the same if `outrider doctor --draft` says so"
)


def models(subject: Subject) -> Finding:
    """The models load, and fit the device."""
    target, draft = subject.load("target"), subject.load("draft")
    if target[1] is not None and draft[1] is not None:
        check_vocabularies(target[1], draft[1], _OTHER_VOCABULARY)
    taken, recommended = mx.get_active_memory(), recommended_working_set()
    fits = recommended is None or taken <= recommended
    information = {name: value for name, value in mx.device_info().items() if name in DEVICE_FIELDS}
    device = mx.default_device().type.name
    return Finding(
        "passed" if fits else "failed",
        f"the models take {taken / 1e9:.2f} GB"
        + ("" if recommended is None else f" of {recommended / 1e9:.1f} GB that the device recommends to use"),
        {"weights_bytes": taken, "recommended_bytes": recommended, "device": device, "device_info": information},
    )
