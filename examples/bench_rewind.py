"""Benchmark of rewind modes on a hybrid model: plain, N=1, checkpoints with and without deferred replay.

    python examples/bench_rewind.py                  # bf16, MLX's own BLAS
    python examples/bench_rewind.py --dtype float32 --openblas

The target is an LFM2-style hybrid (short convolutions and attention) with random weights, so its text means
nothing; its caches are real. The draft is scripted: it knows the text of plain decoding, gets a fixed share of the
tokens wrong (by a hash of the position), and its proposals cost nothing. So the figures are those of the target's side
alone.

All modes are timed in turn, several times, in one run; the table has medians, the spread, and ratios to plain
decoding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from runtime.loading import blas

if "--openblas" in sys.argv:
    blas.load_before_mlx(blas.OPENBLAS)  # before mlx is imported

import mlx.core as mx
import trio
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import lfm2

import actors.target.target_session
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.model import CachedSequence, FeedsEach, RewindMode
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from protocol.pass_price import PassPrice
from protocol.replay import ReplayDebt
from runtime.engine.running import running

VOCAB_SIZE = 4096
PROMPT = tuple(range(7, 39))


def hybrid(hidden_size: int, num_layers: int, dtype: mx.Dtype) -> lfm2.Model:
    """An LFM2 model in which every third layer attends, and the others convolve."""
    layers = ["full_attention" if i % 3 == 2 else "conv" for i in range(num_layers)]
    mx.random.seed(0)
    model = lfm2.Model(
        lfm2.ModelArgs(
            model_type="lfm2",
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 128,
            max_position_embeddings=32768,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=hidden_size,
            block_multiple_of=64,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            block_ff_dim=int(2.5 * hidden_size),
            layer_types=layers,
        )
    )
    model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


class Oracle(FeedsEach):
    """A scripted draft model: it knows the text, and is wrong at positions chosen by a hash."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance
        self.text: Sequence[int] = PROMPT

    def open_sequence(self, *, beside_another: bool) -> OracleSequence:
        return OracleSequence(self)


class OracleSequence(CachedSequence):
    """A cached sequence of the oracle: its length. After n tokens comes the n-th of the text, right or wrong."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._length = 0

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self._length += len(tokens)
        if num_logits == 0:
            return None
        text = self._oracle.text
        token = text[self._length] if self._length < len(text) else 0
        if (self._length * 2654435761) % 2**32 / 2**32 >= self._oracle.acceptance:
            token = (token + 1) % VOCAB_SIZE
        return mx.where(mx.arange(VOCAB_SIZE) == token, 30.0, 0.0)[None]

    def feed_lazy(self, token: mx.array) -> mx.array:
        raise NotImplementedError("a drafter is never asked to decode")

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode.TRIM

    def rewind(self, length: int) -> int:
        self._length = length
        return length

    def forget(self) -> None:
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def check(self, length: int) -> None:
        assert self._length == length

    def close(self) -> None:
        pass


class SettleAtOnce(ReplayDebt):
    """Replay in a pass of its own after each rejection, the baseline for deferred replay."""

    def should_settle(self, num_pending: int, price: PassPrice, seconds_per_token: float) -> bool:
        return num_pending > 0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--openblas", action="store_true")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--lookahead", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-tokens", type=int, default=0, help="also measure memory over this many tokens")
    args = parser.parse_args()

    model = hybrid(args.hidden_size, args.layers, getattr(mx, args.dtype))
    num_parameters = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    print(f"LFM2-style hybrid, {num_parameters / 1e6:.0f} M parameters, {args.dtype}, {args.layers} layers", flush=True)
    oracle = Oracle(args.acceptance)
    ways = {
        "plain": ("auto", ReplayDebt, 0),
        "N=1": ("none", ReplayDebt, args.lookahead),
        "checkpoint, replay in a pass of its own": ("auto", SettleAtOnce, args.lookahead),
        "checkpoint, deferred replay": ("auto", ReplayDebt, args.lookahead),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    notes: dict[str, str] = {}
    async with ThreadWorker("target") as worker, ThreadWorker("draft") as draft_worker:
        for repeat in range(args.repeats + 1):
            for way, (rewind, replay, lookahead) in ways.items():
                actors.target.target_session.ReplayDebt = replay  # type: ignore[misc]
                target = await worker.run(Job("load", lambda r=rewind: MLXModel(model, CacheOptions(rewind=r))))  # type: ignore[misc]
                with target.evaluating_layers():
                    async with running((target, worker), (oracle, draft_worker)) as rt:
                        done = await rt.generate(PROMPT, max_tokens=args.tokens, lookahead=lookahead)
                ids = tuple(token.id for token in done.tokens)
                if len(oracle.text) == len(PROMPT):
                    oracle.text = PROMPT + ids  # the first run is plain, and not counted
                s = done.statistics
                if repeat > 0:
                    speeds[way].append(s.generation_tps or math.nan)
                same = "same text" if PROMPT + ids == tuple(oracle.text) else "text differs (near-tie)"
                notes[way] = (
                    f"acceptance {s.acceptance_rate or 0:.2f}, {s.rounds} rounds, {s.settling_rounds} settling, "
                    f"{s.replayed_tokens} replayed, {same}"
                )
        plain = statistics.median(speeds["plain"])
        for way, runs in speeds.items():
            middle = statistics.median(runs)
            spread = f"{min(runs):.1f}–{max(runs):.1f}"
            print(f"{way:42} {middle:6.1f} tokens/s ({spread:>11})  {middle / plain:5.2f}x   {notes[way]}", flush=True)
        if args.memory_tokens:
            await watch_memory(model, worker, draft_worker, args)


async def watch_memory(
    model: lfm2.Model, worker: ThreadWorker, draft_worker: ThreadWorker, args: argparse.Namespace
) -> None:
    """Print the memory that checkpoints add to that of plain decoding at the same length."""
    actors.target.target_session.ReplayDebt = ReplayDebt  # type: ignore[misc]
    oracle = Oracle(args.acceptance)
    held: dict[str, list[int]] = {}
    for way, lookahead in (("plain", 0), ("checkpoint", args.lookahead)):
        target = await worker.run(Job("load", lambda: MLXModel(model, CacheOptions())))
        sizes, ids = [], []
        with target.evaluating_layers():
            async with running((target, worker), (oracle, draft_worker)) as rt:
                async for token in rt.stream(PROMPT, max_tokens=args.memory_tokens, lookahead=lookahead):
                    ids.append(token.id)
                    if token.index % 100 == 99:
                        sizes.append(mx.get_active_memory())
        if way == "plain":
            oracle.text = PROMPT + tuple(ids)
        held[way] = sizes
    extra = [b - a for a, b in zip(held["plain"], held["checkpoint"], strict=True)]
    print("bytes held beyond plain decoding, each 100 tokens:", " ".join(f"{x / 1e3:.0f}k" for x in extra))


trio.run(main)
