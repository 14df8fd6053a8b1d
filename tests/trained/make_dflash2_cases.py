"""Writes the cases of `test_dflash.py` in the authors' form: tiny DFlash 2 and DSpark drafters, and mlx-vlm's logits.

    pip install mlx-vlm==0.7.10
    python tests/trained/make_dflash2_cases.py tests/trained/dflash [CASE…]

mlx-vlm is not needed to run the test. The logits are those along the path that the drafter takes by itself.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn import Embedding, Linear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
from mlx_vlm.speculative.drafters.dspark import DSparkDraftModel
from mlx_vlm.speculative.drafters.dspark.config import DSparkConfig

HIDDEN_SIZE, VOCAB_SIZE, NUM_TOKENS, BLOCK_SIZE, MASK = 32, 96, 16, 5, 95
LAYER_IDS = [0, 1, 3]  # of the layers that give the hidden states
COMMON = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
SHARED = {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
# Three layers that see all of the context, interleaved and scaled rotary embeddings, a long block, capped logits.
DEEP = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "head_dim": 4,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_target_layers": 9,
    "layer_types": ["full_attention"] * 3,
    "rope_is_neox_style": False,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
# One layer with a window shorter than a block is long, as many key heads as query heads, sinks; a kernel longer than
# the block, one group, and a selector that sees the whole vocabulary.
SHORT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "sliding_window": 3,
}
DSPARK = {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dflash2": (
        DFlash2DraftModel,
        DFlash2Config,
        COMMON
        | {
            "architectures": ["DFlash2DraftModel"],
            "block_size": BLOCK_SIZE,
            "dflash_config": SHARED | DFLASH2 | {"input_embedding_scale": 2.0, "output_multiplier": 0.5},
        },
    ),
    "dflash2_deep": (
        DFlash2DraftModel,
        DFlash2Config,
        COMMON
        | DEEP
        | {
            "architectures": ["DFlash2DraftModel"],
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 127,
                "target_layer_ids": [1, 6],
                "conv_kernel_size": 3,
                "conv_group_size": 4,
                "selector_rank": 12,
                "selector_top_k": 16,
                "final_logit_softcapping": 3.0,
            },
        },
    ),
    "dflash2_short": (
        DFlash2DraftModel,
        DFlash2Config,
        COMMON
        | SHORT
        | {
            "architectures": ["DFlash2DraftModel"],
            "block_size": 4,
            "attention_sink_bias": True,
            "dflash_config": {
                "mask_token_id": 0,
                "target_layer_ids": [0, 1, 2, 4],
                "conv_kernel_size": 5,
                "conv_group_size": 24,
                "selector_rank": 3,
                "selector_top_k": VOCAB_SIZE,
            },
        },
    ),
    "dspark_authors": (
        DSparkDraftModel,
        DSparkConfig,
        COMMON
        | {
            "architectures": ["DSparkDraftModel"],
            "block_size": BLOCK_SIZE,
            "rope_is_neox_style": False,
            "dflash_config": SHARED | DSPARK | {"causal": True},
        },
    ),
    "dspark_anchored": (
        DSparkDraftModel,
        DSparkConfig,
        COMMON
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": BLOCK_SIZE,
            "dflash_config": SHARED
            | DSPARK
            | {"sample_from_anchor": False, "attention_sink_bias": True, "enable_confidence_head": False},
        },
    ),
}


class Seen:
    """Takes the best token, and keeps the logits that it is taken from."""

    def __init__(self) -> None:
        self.logits: list[mx.array] = []

    def __call__(self, logits: mx.array) -> mx.array:
        self.logits.append(logits[0])
        return mx.argmax(logits, axis=-1)

    sample_proposal = __call__


class Target:
    """An embedding and a head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.embed_tokens = Embedding(vocab_size, hidden_size)
        self.lm_head = Linear(hidden_size, vocab_size, bias=False)


def write(folder: Path, model_class: Any, config_class: Any, config: dict[str, Any]) -> None:
    """Write a drafter, and its path and logits after each of the tokens."""
    mx.random.seed(5)
    model_class.validate_target_compatibility = lambda *_: None
    model = model_class(config_class.from_dict(json.loads(json.dumps(config))))
    settings = model.config
    target = Target(settings.vocab_size, settings.hidden_size)
    weights = [
        (name, mx.random.normal(value.shape) * (0.5 if value.ndim == 1 else 0.3) + float(name.endswith("norm.weight")))
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    model.bind(target)
    features = mx.random.normal((NUM_TOKENS, len(settings.target_layer_ids) * settings.hidden_size))
    tokens = mx.random.randint(0, settings.vocab_size - 1, (NUM_TOKENS,))
    paths, logits, acceptance = [], [], []
    for anchor in range(1, NUM_TOKENS):
        seen = Seen()
        paths.append(
            model.draft_block(
                int(tokens[anchor]), features[None, :anchor], model.make_cache(), settings.block_size, seen
            )[0]
        )
        if getattr(model, "confidence_head", None) is not None:
            block = [int(tokens[anchor])] + [MASK] * (len(seen.logits) - 1)
            hidden = model._hidden(mx.array([block]), features[None, :anchor], model.make_cache())
            acceptance.append(model.confidence(hidden, tokens[anchor : anchor + 1], paths[-1][None])[0])
        # A selector sees its candidates alone.
        logits.append(mx.sort(mx.stack(seen.logits), axis=-1))
    folder.mkdir(parents=True, exist_ok=True)
    named = {name.removesuffix(".weight") if "codebook" in name else name: value for name, value in weights}
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(
        folder / "expected.npz",
        features=features,
        tokens=tokens.astype(mx.int32),
        embedding=target.embed_tokens.weight,
        head=target.lm_head.weight,
        paths=mx.stack(paths).astype(mx.int32),
        ordered_logits=mx.stack(logits),
        **({"acceptance": mx.stack(acceptance)} if acceptance else {}),
    )


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        write(Path(sys.argv[1]) / name, *CASES[name])
