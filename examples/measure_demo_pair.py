"""Measure the acceptance rate of the demo pair on files that were held out of its training.

    python examples/measure_demo_pair.py

Prompts are the openings of top-level functions and classes in the held-out files of the corpus
(see `demo_corpus.py`), chosen by a fixed seed. Each is continued greedily by the target, with the
drafter proposing. *Acceptance* is accepted / proposed. It falls with longer proposals, since all tokens
after a wrong one are rejected too; at lookahead 1 it is the rate of agreement.
"""

from __future__ import annotations

import argparse

import trio
from demo_corpus import SEED, held_out_prompts

import runtime


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=runtime.DEMO_TARGET)
    parser.add_argument("--draft", default=runtime.DEMO_DRAFT)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--show", type=int, default=3, help="completions to print")
    args = parser.parse_args()
    prompts = held_out_prompts(args.prompts)
    rows: list[tuple[str, dict[str, object]]] = [
        *((f"greedy, lookahead {k}", {"lookahead": k}) for k in (1, 2, 4)),
        ("temperature 0.8, match, lookahead 1", {"lookahead": 1, "temperature": 0.8, "seed": SEED}),
        (
            "temperature 0.8, rejection, lookahead 1",
            {"lookahead": 1, "temperature": 0.8, "seed": SEED, "acceptance": "rejection"},
        ),
    ]
    async with runtime.open(args.target, args.draft) as rt:
        for prompt in prompts[: args.show]:
            completion = await rt.generate(prompt, max_tokens=args.max_tokens)
            print(f"{'-' * 80}\n\x1b[2m{prompt}\x1b[0m{completion.text}")
        print("-" * 80)
        for name, settings in rows:
            accepted = proposed = 0
            for prompt in prompts:
                counts = (await rt.generate(prompt, max_tokens=args.max_tokens, **settings)).statistics
                accepted += counts.accepted
                proposed += counts.proposed
            print(f"{name:40} acceptance {accepted / proposed:.3f}  ({accepted:,} of {proposed:,})", flush=True)


trio.run(main)
