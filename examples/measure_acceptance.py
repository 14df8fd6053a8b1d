"""Measure the acceptance rate of drafted tokens over temperature, for three rules: a table, and optionally a plot.

    python examples/measure_acceptance.py --plot acceptance.svg

*match* and *rejection* are this runtime's (see `protocol/acceptance.py`). *equality* is what mlx-lm's speculative
decoding does: target and draft each draw a token, and the drafted one is accepted if the two are equal. All three rules
give exact samples of the target's distribution; they differ in how many drafted tokens they accept. One token is
proposed at a time, so the figures are rates per position. Prompts as in `measure_demo_pair.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import trio
from demo_corpus import SEED, held_out_prompts
from mlx_lm import load
from mlx_lm.generate import speculative_generate_step
from mlx_lm.sample_utils import make_sampler

import runtime

TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2, 1.5)
RULES = ("rejection", "match", "equality")


async def ours(prompts: list[str], max_tokens: int, rule: str, temperature: float) -> float:
    accepted = proposed = 0
    async with runtime.open(runtime.DEMO_TARGET, runtime.DEMO_DRAFT) as rt:
        for number, prompt in enumerate(prompts):
            settings: dict[str, Any] = {"temperature": temperature, "seed": SEED + number, "acceptance": rule}
            completion = await rt.generate(prompt, max_tokens=max_tokens, lookahead=1, ignore_eos=True, **settings)
            accepted += completion.statistics.accepted
            proposed += completion.statistics.proposed
    return accepted / proposed


def theirs(prompts: list[str], max_tokens: int, temperature: float) -> float:
    target, tokenizer, *_ = load(str(runtime.DEMO_TARGET))
    draft, *_ = load(str(runtime.DEMO_DRAFT))
    mx.random.seed(SEED)
    accepted = rounds = 0
    for prompt in prompts:
        for _, _, from_draft in speculative_generate_step(
            mx.array(tokenizer.encode(prompt)),
            target,
            draft,
            num_draft_tokens=1,
            max_tokens=max_tokens,
            sampler=make_sampler(temp=temperature),
        ):
            accepted += from_draft
            rounds += not from_draft  # every round ends with a token of the target's own
    return accepted / rounds


def measured(prompts: list[str], max_tokens: int) -> Iterator[tuple[float, dict[str, float]]]:
    for temperature in TEMPERATURES:
        row = {rule: trio.run(ours, prompts, max_tokens, rule, temperature) for rule in ("rejection", "match")}
        row["equality"] = theirs(prompts, max_tokens, temperature)
        yield temperature, row


def plot(rows: dict[float, dict[str, float]], where: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for rule, marker in zip(RULES, "os^", strict=True):
        axes.plot(list(rows), [row[rule] for row in rows.values()], marker=marker, label=rule)
    axes.set(xlabel="temperature", ylabel="drafted tokens that stand", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a plot here (SVG or PNG; needs matplotlib)")
    args = parser.parse_args()
    rows: dict[float, dict[str, float]] = {}
    print("temperature  " + "  ".join(f"{rule:>9}" for rule in RULES))
    for temperature, row in measured(held_out_prompts(args.prompts), args.max_tokens):
        rows[temperature] = row
        print(f"{temperature:11.1f}  " + "  ".join(f"{row[rule]:9.3f}" for rule in RULES), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
