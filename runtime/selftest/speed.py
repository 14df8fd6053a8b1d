"""Measurements of what this device is best set to: overlap, prices, buffer sizes, and the GIL.

They pass if they can be made; what they found is in their figures. Each is a function of a `Subject`, called in a
process of its own, on a machine that should have nothing else to do.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import mlx.core as mx
import trio

from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set
from actors.mlx.model import MLXModel
from runtime.bench.one_stream import OneStream, OneStreamPlan
from runtime.loading.vocabularies import check_vocabularies
from runtime.measuring.contest import Contest
from runtime.measuring.figures import spread
from runtime.measuring.pass_times import time_passes
from runtime.selftest.baselines import in_parallel, median_step_s
from runtime.selftest.checks import Finding
from runtime.selftest.subject import Subject, running_pair

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
TEXT_LENGTHS = (64, 512)
# In seconds; Python's default is the first.
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0002)
NUM_TURNS = 3
# Of `mx.device_info`, which has different fields on each backend.
DEVICE_FIELDS = (
    "device_name",
    "architecture",
    "memory_size",
    "max_buffer_length",
    "compute_capability_major",
    "compute_capability_minor",
)


def prices(subject: Subject) -> Finding:
    """The time of a forward pass of each model by the number of its tokens, at two text lengths."""
    tables: dict[str, dict[str, list[float]]] = {}
    for role in ("target", "draft"):
        model = MLXModel(subject.load(role)[0], CacheOptions())
        tables[role] = {
            str(length): list(time_passes(model, WIDTHS, num_context=length).seconds.values())
            for length in TEXT_LENGTHS
        }
    shortest = str(TEXT_LENGTHS[0])
    target_s, draft_s = tables["target"][shortest], tables["draft"][shortest]
    return Finding(
        "passed",
        f"a pass of the target over 4 tokens takes {target_s[WIDTHS.index(4)] / target_s[0]:.2f} times as long as over "
        f"one, and a draft step {draft_s[0] / target_s[0]:.2f} times",
        {"widths": list(WIDTHS), "text_lengths": list(TEXT_LENGTHS), "seconds": tables},
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
    plan = OneStreamPlan(
        max_tokens=max(32, subject.max_tokens), repeats=2, num_draft_tokens=(2, 4), lookaheads=(0, "auto")
    )
    result = trio.run(OneStream(plan).measure, subject.target, subject.draft)
    medians = {row.name: row.median for row in result.rows}
    plain, auto = medians["mlx-lm plain"], medians["outrider lookahead auto"]
    ratio = f"{auto / plain:.2f} times" if auto and plain else "unknown against"
    return Finding(
        "passed",
        f"Outrider's \"auto\" has {ratio} the speed of mlx-lm's plain decoding",
        {"tokens_per_second": medians, "machine": result.machine, "dtypes": result.dtypes},
    )


def switch_intervals(subject: Subject) -> Finding:
    """Speed with "auto", and how late trio gets its turn, at several switch intervals of the GIL, in turn."""
    target, draft = subject.load("target"), subject.load("draft")
    prompt = subject.prompts(target[1])[0]
    contest: Contest[float, int, float] = Contest(SWITCH_INTERVALS_S, [0], NUM_TURNS, warm_up=[0])
    delays_s: dict[float, list[float]] = {interval_s: [] for interval_s in SWITCH_INTERVALS_S}

    async def watch(delays_s: list[float]) -> None:
        while True:
            due = trio.current_time() + 0.002
            await trio.sleep_until(due)
            delays_s.append(trio.current_time() - due)

    async def run() -> None:
        async with running_pair(target, draft) as rt:
            for step in contest.steps():
                sys.setswitchinterval(step.contender)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch, delays_s[step.contender])
                    began = time.perf_counter()
                    completion = await rt.generate(prompt, max_tokens=subject.max_tokens)
                    contest.record(step, len(completion.tokens) / (time.perf_counter() - began))
                    nursery.cancel_scope.cancel()

    before = sys.getswitchinterval()
    try:
        trio.run(run)
    finally:
        sys.setswitchinterval(before)
    speeds = {interval_s: spread(contest.runs(interval_s).values()) for interval_s in SWITCH_INTERVALS_S}
    default, *others = SWITCH_INTERVALS_S
    # The slowest turn of a better one is faster than the fastest turn of the default.
    better = [each for each in others if (speeds[each].low or 0.0) > (speeds[default].high or 0.0)]
    best = max(better, key=lambda interval_s: speeds[interval_s].median or 0.0, default=default)
    late = {interval_s: spread(each) for interval_s, each in delays_s.items()}
    return Finding(
        "passed",
        f"a switch interval of {best * 1000:g} ms suits draft steps"
        + (" as well as any that was tried" if best == default else " better than Python's default"),
        {
            "best_s": best,
            "default_s": default,
            "tokens_per_second": {str(interval_s): each.values for interval_s, each in speeds.items()},
            "median_delay_s": {str(interval_s): each.median for interval_s, each in late.items()},
            "longest_delay_s": {str(interval_s): each.high for interval_s, each in late.items()},
        },
    )


# Its checks compare the two models on the same token ids, beside everything that would translate them.
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
