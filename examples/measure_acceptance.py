"""Measure how many drafted tokens are accepted: greedily, and over temperature by three rules, with an optional plot.

    python examples/measure_acceptance.py --plot acceptance.svg

*match* and *rejection* are this runtime's (see `protocol/acceptance.py`). *equality* is what mlx-lm's speculative
decoding does: target and draft each draw a token, and the drafted one is accepted if the two are equal. All three rules
give exact samples of the target's distribution; they differ in how many drafted tokens they accept. One token is
proposed at a time, so the figures are rates per position; in longer proposals, all tokens after a wrong one are
rejected too. The prompts begin top-level functions and classes that were held out of the demo pair's training.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import trio
from demo_corpus import SEED, held_out_prompts
from mlx_lm import load
from mlx_lm.generate import speculative_generate_step
from mlx_lm.sample_utils import make_sampler

import runtime

LOOKAHEADS = (1, 2, 4)
TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2, 1.5)
RULES = ("rejection", "match", "equality")


async def ours(prompts: list[str], **settings: Any) -> float:
    accepted = proposed = 0
    async with runtime.open(runtime.DEMO_TARGET, runtime.DEMO_DRAFT) as rt:
        for number, prompt in enumerate(prompts):
            completion = await rt.generate(prompt, seed=SEED + number, ignore_eos=True, **settings)
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


def plot(rows: dict[float, list[float]], where: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for rule, rates, marker in zip(RULES, zip(*rows.values(), strict=True), "os^", strict=True):
        axes.plot(list(rows), rates, marker=marker, label=rule)
    axes.set(xlabel="temperature", ylabel="drafted tokens that stand", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="write a plot here (SVG or PNG; needs matplotlib)")
    args = parser.parse_args()
    prompts = held_out_prompts(args.prompts)
    measured = partial(ours, prompts, max_tokens=args.max_tokens)
    for lookahead in LOOKAHEADS:
        print(f"greedy, proposals of {lookahead}: {trio.run(partial(measured, lookahead=lookahead)):.3f}", flush=True)
    rows: dict[float, list[float]] = {}
    print("temperature  " + "  ".join(f"{rule:>9}" for rule in RULES))
    for temperature in TEMPERATURES:
        settings = {"lookahead": 1, "temperature": temperature}
        rates = [trio.run(partial(measured, acceptance=rule, **settings)) for rule in ("rejection", "match")]
        rows[temperature] = [*rates, theirs(prompts, args.max_tokens, temperature)]
        print(f"{temperature:11.1f}  " + "  ".join(f"{rate:9.3f}" for rate in rows[temperature]), flush=True)
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
