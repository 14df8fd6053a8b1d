"""The result of training: a folder in the format of Speculators, with a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from actors.trained.eagle3 import Eagle3
from runtime.distill.training import NUM_STEPS

# What Speculators calls the norm of the first layer.
_HIDDEN_NORM = "layers.0.hidden_norm.weight"


def write_drafter(
    folder: Path,
    drafter: Eagle3,
    config: Mapping[str, Any],
    *,
    target_ids: Sequence[int] | None,
    embedding: mx.array | None,
    dtype: mx.Dtype,
    card: str,
) -> None:
    """Write a drafter.

    Args:
        folder: is made.
        drafter: with its weights.
        config: the content of `config.json`.
        target_ids: (draft_vocab_size,) the target's id of each of the drafter's, ascending; None if they are the same.
        embedding: (vocab_size, hidden size) to go with it; None if the drafter reads its target's.
        dtype: of the weights.
        card: text of the model card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(drafter.parameters()))  # type: ignore[no-untyped-call]
    weights = {_HIDDEN_NORM if name == "hidden_norm.weight" else name: value.astype(dtype) for name, value in flat}
    if embedding is not None:
        weights["embed_tokens.weight"] = embedding.astype(dtype)
    if target_ids is not None:
        vocab_size = drafter.config.vocab_size
        ids = mx.array(list(target_ids), mx.int64)
        weights["d2t"] = ids - mx.arange(len(target_ids), dtype=mx.int64)
        weights["t2d"] = mx.zeros((vocab_size,), mx.bool_).at[ids].add(mx.array(True))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def config_for(
    target: Mapping[str, Any],
    *,
    target_name: str,
    num_layers: int,
    draft_vocab_size: int,
    num_heads: int,
    intermediate_size: int,
) -> dict[str, Any]:
    """The `config.json` of a new drafter, as Speculators has it.

    Args:
        target: the target's `config.json`.
        target_name: its name or path.
        num_layers: of the target.
        draft_vocab_size: of the drafter.
        num_heads: of its one layer.
        intermediate_size: of its one layer.
    """
    hidden_size = int(target["hidden_size"])
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": _feature_layers(num_layers),
        "norm_before_residual": False,
        "target_hidden_size": hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_STEPS}],
            "verifier": {"architectures": target.get("architectures", []), "name_or_path": target_name},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": hidden_size // num_heads,
            "num_hidden_layers": 1,
            "vocab_size": int(target["vocab_size"]),
            "rms_norm_eps": float(target.get("rms_norm_eps", 1e-5)),
            "max_position_embeddings": int(target.get("max_position_embeddings", 4096)),
            "rope_theta": 10_000.0,
        },
    }


def _feature_layers(num_layers: int) -> list[int]:
    """A low, a middle and a high layer: as EAGLE-3 has them, or all that a small target has."""
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    return sorted({1, (num_layers + 1) // 2, num_layers})
