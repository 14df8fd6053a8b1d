"""Measurements of what this device is best set to: overlap, prices, buffer sizes, and the GIL.

They pass if they can be made; what they found is in their figures. Each is a function of a `Subject`, called in a
process of its own, on a machine that should have nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import mlx.core as mx
import trio

from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set
from actors.mlx.model import MLXModel
from runtime.bench.one_stream import Plan, measure
from runtime.doctor.pass_times import time_passes
from runtime.selftest.baselines import in_parallel, median_step_s
from runtime.selftest.findings import Finding
from runtime.selftest.subject import Subject, running_pair

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
TEXT_LENGTHS = (64, 512)
SWITCH_INTERVALS_S = (0.005, 0.001, 0.0002)


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
    alone = {role: median_step_s(model, subject.seconds / 6) for role, model in models.items()}
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
    plan = Plan(max_tokens=max(32, subject.max_tokens), repeats=2, num_draft_tokens=(2, 4), lookaheads=(0, "auto"))
    result = trio.run(measure, subject.target, subject.draft, plan)
    medians = {row.name: row.median for row in result.rows}
    plain, auto = medians["mlx-lm plain"], medians["outrider lookahead auto"]
    ratio = f"{auto / plain:.2f} times" if auto and plain else "unknown against"
    return Finding(
        "passed",
        f"Outrider's \"auto\" has {ratio} the speed of mlx-lm's plain decoding",
        {"tokens_per_second": medians, "machine": result.machine, "dtypes": result.dtypes},
    )


def switch_intervals(subject: Subject) -> Finding:
    """Speed with "auto", and how long trio waits for its turn, at several switch intervals of the GIL."""
    target, draft = subject.load("target"), subject.load("draft")
    prompt = subject.prompts(target[1])[0]
    by_interval: dict[str, dict[str, float]] = {}
    before = sys.getswitchinterval()

    async def run() -> dict[str, float]:
        late: list[float] = []

        async def watch() -> None:
            while True:
                due = trio.current_time() + 0.002
                await trio.sleep_until(due)
                late.append(trio.current_time() - due)

        async with running_pair(target, draft) as rt:
            await rt.generate(prompt, max_tokens=subject.max_tokens)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                began = time.perf_counter()
                completion = await rt.generate(prompt, max_tokens=2 * subject.max_tokens)
                seconds = time.perf_counter() - began
                nursery.cancel_scope.cancel()
        late.sort()
        return {
            "tokens_per_second": len(completion.tokens) / seconds,
            "median_delay_s": statistics.median(late) if late else 0.0,
            "longest_delay_s": late[-1] if late else 0.0,
        }

    try:
        for interval_s in SWITCH_INTERVALS_S:
            sys.setswitchinterval(interval_s)
            by_interval[str(interval_s)] = trio.run(run)
    finally:
        sys.setswitchinterval(before)
    best = max(by_interval, key=lambda name: by_interval[name]["tokens_per_second"])
    return Finding(
        "passed",
        f"of the switch intervals that were tried, {float(best) * 1000:g} ms is the fastest",
        {"by_interval_s": by_interval},
    )


def memory(subject: Subject) -> Finding:
    """What the models take, and what the device recommends."""
    models = [subject.load(role)[0] for role in ("target", "draft")]
    taken = mx.get_active_memory()
    recommended = recommended_working_set()
    fits = recommended is None or taken <= recommended
    del models
    return Finding(
        "passed" if fits else "failed",
        f"the models take {taken / 1e9:.2f} GB"
        + ("" if recommended is None else f" of {recommended / 1e9:.1f} GB that the device recommends to use"),
        {"weights_bytes": taken, "recommended_bytes": recommended, "device": mx.default_device().type.name},
    )
