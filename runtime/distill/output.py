"""The result of training: a folder in the format of Speculators, with a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.model import weights_of
from actors.trained.kinds.eagle3 import LoadedEagle3
from protocol.reprs import listed
from runtime.distill.evaluation import TEMPERATURE, AcceptanceRates
from runtime.distill.options import DistillOptions
from runtime.distill.training import NUM_STEPS
from runtime.distill.writing import replacing

# Most names of files in a model card.
MAX_FILES_SHOWN = 8


def write_drafter(folder: Path, drafter: LoadedEagle3, config: Mapping[str, Any], dtype: mx.Dtype, card: str) -> None:
    """Write a drafter's folder in the format of Speculators. Raises: SettingsError: it cannot be written."""
    weights = {name: value.astype(dtype) for name, value in weights_of(drafter.model).items()}
    # So Speculators calls the norm of the first layer.
    weights["layers.0.hidden_norm.weight"] = weights.pop("hidden_norm.weight")
    if drafter.embedding is not None:
        weights["embed_tokens.weight"] = drafter.embedding.weight.astype(dtype)
    if drafter.target_ids is not None:
        vocab_size = drafter.model.config.vocab_size
        ids = drafter.target_ids.astype(mx.int64)
        weights["d2t"] = ids - mx.arange(ids.size, dtype=mx.int64)
        weights["t2d"] = mx.zeros((vocab_size,), mx.bool_).at[ids].add(mx.array(True))
    with replacing(folder / "model.safetensors") as partial:
        mx.save_safetensors(str(partial), weights, {"format": "pt"})
    for name, text in (("config.json", json.dumps(config, indent=2) + "\n"), ("README.md", card)):
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def config_for(options: DistillOptions, target: Module, *, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a new drafter, in the format of Speculators; the sizes are the target's."""
    widths = (128, 64, 32, 16, 8, 4, 2) if hidden_size >= 1024 else (64, 32, 16, 8, 4, 2)
    head_dim = next(width for width in widths if hidden_size % width == 0)
    num_heads = hidden_size // head_dim
    num_kv_heads = next(num_heads // group for group in (4, 3, 2, 1) if num_heads % group == 0)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": min(vocab_size, options.draft_vocab_size or 32_768),
        "eagle_aux_hidden_state_layer_ids": feature_layers(len(target.layers)),
        "norm_before_residual": False,
        "target_hidden_size": hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_STEPS}],
            "verifier": {"architectures": [], "name_or_path": options.target},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": options.intermediate_size or _intermediate_size(target, hidden_size),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "num_hidden_layers": 1,
            "vocab_size": vocab_size,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_theta": 10_000.0,
        },
    }


def _intermediate_size(target: Module, hidden_size: int) -> int:
    """The target's; for a mixture of experts or the like, whose parts are small, a usual multiple of the width."""
    args: Any = getattr(target, "args", None)
    text = getattr(args, "text_config", None)
    given = getattr(args, "intermediate_size", None)
    if isinstance(text, dict):
        given = text.get("intermediate_size", given)
    return given if isinstance(given, int) and given >= hidden_size else 8 * hidden_size // 3


def model_card(
    options: DistillOptions, acceptance: Mapping[str, AcceptanceRates], num_tokens: int, num_windows: int
) -> str:
    """The model card of a drafter; `acceptance` is that of an `Evaluation`."""
    target_name, files = Path(options.target).name, [file.name for file in options.data]
    steps = range(1, NUM_STEPS + 1)
    columns = [*(f"draft {step}" for step in steps), *(f"draft {step}, {TEMPERATURE}" for step in steps)]
    cells = [[name, *(f"{rate:.3f}" for rate in (*each.greedy, *each.sampled))] for name, each in acceptance.items()]
    table = [["text", *columns], ["---"] * (1 + len(columns)), *cells]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"""---
tags: [speculative-decoding, eagle3]
---
# EAGLE-3 drafter for {target_name}

Made by `outrider distill`, in the format of [Speculators](https://github.com/vllm-project/speculators). It reads hidden
states of its target and is of no use with another one:

    outrider generate "..." --target {target_name} --draft DIR

How often each draft is accepted where those before it were the target's likeliest tokens, on held-out windows of
{options.window} tokens, at temperature 0 and at {TEMPERATURE}:

{rows}

It has seen {num_tokens:,} tokens, of {num_windows:,} windows, of which the target wrote {options.continuations:,}
itself. Texts: {listed(files, MAX_FILES_SHOWN)}.
"""


def feature_layers(num_layers: int) -> list[int]:
    """A low, a middle and a high layer: as EAGLE-3 has them, or all that a small target has."""
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    return sorted({1, (num_layers + 1) // 2, num_layers})
