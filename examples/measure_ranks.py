"""Measure what a round costs on two ranks beyond the pass itself, from one verdict to the next.

    python examples/measure_ranks.py                                # two ranks on this machine
    mlx.launch --hostfile hosts.json examples/measure_ranks.py      # or on others

The target is a small Llama with random weights. A logit bias makes it repeat one token, so prompt lookup proposes the
same number of tokens in each round, and all are accepted. Three things are timed, on one process and on the ranks:

* pass alone: each rank feeds the same tokens by itself, as fast as it can, without announcements. On ranks this is the
  time of the model and MLX's ring.
* pass: the target's job of one round in a runtime, in which rank 0 announces the pass and the others follow.
* round: from one verdict to the next, with everything between two passes.

What a round takes beyond the pass alone is the runtime's share. The last line says what ranks add to it. Figures are
medians; use an idle machine with at least two cores for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import trio
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

import runtime
from actors.distributed.rank_address import rank_address
from actors.distributed.rank_group import RankGroup
from runtime.bench.small_models import small_model

TOKEN = 7
PROMPT = (TOKEN,) * 16
# Rounds before the first one that is timed.
NUM_WARM = 20


def llama(width: int, num_layers: int) -> Module:
    """A Llama with random weights, the same in each process."""
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers, "vocab_size": 1024}
    return small_model("llama", 0, **shape, num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8)


def passes_alone(model: Module, width: int, num_rounds: int) -> list[float]:
    """Seconds of passes over `width` tokens one after another; each rank calls this at the same time."""
    cache, seconds = make_prompt_cache(model), []
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    for _ in range(NUM_WARM + num_rounds):
        began = time.perf_counter()
        mx.eval(mx.argmax(model(mx.array([[TOKEN] * width]), cache=cache), axis=-1))
        seconds.append(time.perf_counter() - began)
    return seconds[NUM_WARM:]


async def rounds(model: Module, width: int, num_rounds: int, group: object) -> tuple[list[float], list[float]]:
    """Seconds of the passes of a runtime's rounds over `width` tokens, and from one verdict to the next."""
    spans: list[runtime.Span] = []

    def note(event: runtime.Event) -> None:
        if isinstance(event, runtime.Span) and (event.actor, event.kind) == ("target", "verify"):
            spans.append(event)

    async with runtime.open((model, None), "ngram", group=group, trace=note, max_streams=1) as rt:
        await rt.generate(
            PROMPT,
            max_tokens=width * (NUM_WARM + num_rounds),
            lookahead=width - 1,
            logit_bias={TOKEN: 100.0},
            ignore_eos=True,
        )
    pairs = [
        (before, after)
        for before, after in zip(spans[NUM_WARM:], spans[NUM_WARM + 1 :], strict=False)
        if before.num_tokens == after.num_tokens == width
    ]
    return [after.ended - after.began for _, after in pairs], [after.ended - before.ended for before, after in pairs]


def times_of(arguments: argparse.Namespace, group: RankGroup | None = None) -> list[float]:
    """Median milliseconds of a pass alone, a pass and a round, on one process or at rank 0 of a group."""
    alone, model = (llama(arguments.hidden_size, arguments.layers) for _ in range(2))
    if group is not None:
        alone.shard(group.mlx)
    found: list[list[float]] = [[], [], []]
    for _ in range(arguments.repeats):
        found[0] += passes_alone(alone, arguments.width, arguments.rounds)
        if group is not None and group.rank > 0:
            runtime.follow((model, None), group)
        else:
            passes, from_verdicts = trio.run(rounds, model, arguments.width, arguments.rounds, group)
            found[1] += passes
            found[2] += from_verdicts
    return [1000 * statistics.median(seconds) for seconds in found if seconds]


def start_two() -> int:
    """Run this program as two ranks on this machine. Returns: the exit status."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder, "hosts.json")
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))
        processes = []
        for rank in range(2):
            environment = os.environ | {
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hostfile),
                "OUTRIDER_CONTROL": f"127.0.0.1:{ports[2]}",
            }
            processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
        return max(process.wait() for process in processes)


def main(arguments: argparse.Namespace) -> None:
    address = rank_address()
    if address is None:
        raise SystemExit(start_two())
    # Timed before the other ranks have something to do.
    one = times_of(arguments) if address.rank == 0 else []
    several = times_of(arguments, runtime.join_ranks(timeout_s=600.0))
    if not one:
        return
    print(f"{'milliseconds':>14}  pass alone    pass   round  beyond the pass alone")
    beyond = []
    for name, (alone, in_pass, in_round) in {"one process": one, f"{address.size} ranks": several}.items():
        beyond.append(in_round - alone)
        print(f"{name:>14}  {alone:10.2f} {in_pass:7.2f} {in_round:7.2f} {beyond[-1]:22.2f}")
    print(f"ranks add {beyond[1] - beyond[0]:.2f} ms to what a round takes beyond its pass")


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--width", type=int, default=4, help="tokens of a pass (default: %(default)s)")
parser.add_argument("--rounds", type=int, default=200, help="rounds that are timed each time (default: %(default)s)")
parser.add_argument("--repeats", type=int, default=3, help="how often all is timed in turn (default: %(default)s)")
parser.add_argument("--hidden-size", type=int, default=256, help="width of the model (default: %(default)s)")
parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: %(default)s)")
if __name__ == "__main__":
    main(parser.parse_args())
