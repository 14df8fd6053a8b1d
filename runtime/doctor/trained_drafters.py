"""What a drafter that was trained for its target reads, and what its steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import dtypes_of
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.worker import Job, Worker
from runtime.doctor.pass_times import Passes, time_passes
from runtime.loading.model_sources import Loaded, Source, load_draft_onto


@attrs.frozen
class ExaminedDrafter:
    """One trained drafter.

    Attributes:
        kind: such as "EAGLE-3".
        feature_layers: of the target, whose inputs it reads; the number of layers stands for what the last one gives.
        num_layers: of the target.
        num_draft_tokens, vocab_size: how many tokens it can propose, and how many the target has.
        num_bytes: memory of its weights; what it shares with the target does not count.
        dtypes: number formats of its weights.
        passes: of width 1 a draft step; wider ones read accepted tokens again, with hidden states of the target.
    """

    kind: str
    feature_layers: tuple[int, ...]
    num_layers: int
    num_draft_tokens: int
    vocab_size: int
    num_bytes: int
    dtypes: tuple[str, ...]
    passes: Passes


async def examine_drafter(worker: Worker, source: Source, options: CacheOptions, target: Loaded) -> ExaminedDrafter:
    """Load a trained drafter on a worker's thread, and time it.

    Raises: ModelError: it cannot be loaded, or was trained for another target.
    """
    drafter = await load_draft_onto(worker, source, options, target)
    target.model.record_features(None)  # the target is timed as it is
    assert isinstance(drafter.model, TrainedDrafter)
    assert drafter.kind is not None
    return await worker.run(
        Job(
            "load",
            partial(_examine, drafter.model, drafter.kind, len(target.model.module.layers), target.model.vocab_size),
        )
    )


def described(found: ExaminedDrafter, size: Callable[[int], str]) -> list[tuple[str, str]]:
    """The rows (name, finding) of the report.

    Args:
        size: formats a number of bytes.
    """
    rows = [
        ("kind", found.kind),
        ("reads", _read(found.feature_layers, found.num_layers)),
        ("proposes", f"{found.num_draft_tokens:,} of the target's {found.vocab_size:,} tokens"),
        ("weights", f"{size(found.num_bytes)}, {', '.join(found.dtypes)}"),
    ]
    for width, seconds in found.passes.seconds.items():
        low, high = found.passes.spread[width]
        name = "a draft step" if width == 1 else f"a refresh of {width}"
        rows.append((name, f"T_d({width}) = {seconds * 1e3:,.2f} ms ({low * 1e3:,.2f}–{high * 1e3:,.2f})"))
    return rows


def _read(layers: Sequence[int], num_layers: int) -> str:
    """What of the target is read, in words."""
    entered = [str(layer) for layer in layers if layer < num_layers]
    parts = []
    if entered:
        listed = " and ".join([", ".join(entered[:-1]), entered[-1]] if len(entered) > 1 else entered)
        parts.append(f"what enters layer{'s' if len(entered) > 1 else ''} {listed} of {num_layers}")
    if num_layers in layers:
        parts.append(f"what the last of {num_layers} layers gives")
    return ", ".join(parts)


def _examine(drafter: TrainedDrafter, kind: str, num_layers: int, vocab_size: int) -> ExaminedDrafter:
    return ExaminedDrafter(
        kind=kind,
        feature_layers=drafter.feature_layers,
        num_layers=num_layers,
        num_draft_tokens=drafter.num_draft_tokens,
        vocab_size=vocab_size,
        num_bytes=drafter.num_bytes,
        dtypes=dtypes_of(drafter.module),
        passes=time_passes(drafter),
    )
