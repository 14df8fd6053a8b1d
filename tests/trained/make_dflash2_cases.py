"""Writes the cases of `test_dflash.py` in the authors' form: tiny DFlash 2 and DSpark drafters, and mlx-vlm's logits.

    pip install mlx-vlm==0.7.10
    python tests/trained/make_dflash2_cases.py tests/trained/dflash [CASE…]

mlx-vlm is not needed to run the test. The logits are those along the path that the drafter takes by itself.
"""

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

NUM_TOKENS = 16
COMMON = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "block_size": 5,
}
# Three layers that see all of the context, interleaved and scaled rotary embeddings, a long block, small groups.
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
# One layer with a window shorter than the block, as many key heads as query heads, sinks; a kernel longer than the
# block, one group, and a selector that sees the whole vocabulary.
SHORT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "sliding_window": 3,
    "attention_sink_bias": True,
    "block_size": 4,
}
# The layers that give the hidden states.
SHARED = {"mask_token_id": 95, "target_layer_ids": [0, 1, 3]}
DSPARK = {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}


def sizes(conv_kernel_size: int, conv_group_size: int, selector_rank: int, selector_top_k: int) -> dict[str, int]:
    return locals()


# By name: the architecture, what its `config.json` says besides, and in "dflash_config".
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash2": (
        "DFlash2DraftModel",
        {},
        SHARED | sizes(2, 8, 8, 6) | {"input_embedding_scale": 2.0, "output_multiplier": 0.5},
    ),
    "dflash2_deep": (
        "DFlash2DraftModel",
        DEEP,
        {"block_size": 8, "mask_token_id": 127, "target_layer_ids": [1, 6], "final_logit_softcapping": 3.0}
        | sizes(3, 4, 12, 16),
    ),
    "dflash2_short": (
        "DFlash2DraftModel",
        SHORT,
        {"mask_token_id": 0, "target_layer_ids": [0, 1, 2, 4]} | sizes(5, 24, 3, 96),
    ),
    "dspark_authors": ("DSparkDraftModel", {"rope_is_neox_style": False}, SHARED | DSPARK | {"causal": True}),
    "dspark_anchored": (
        "Qwen3DSparkModel",
        {},
        SHARED | DSPARK | {"sample_from_anchor": False, "attention_sink_bias": True, "enable_confidence_head": False},
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


def write(folder: Path, architecture: str, changes: dict[str, Any], of_dflash: dict[str, Any]) -> None:
    """Write a drafter, and its path and logits after each of the tokens."""
    is_second = architecture == "DFlash2DraftModel"
    model_class, config_class = (DFlash2DraftModel, DFlash2Config) if is_second else (DSparkDraftModel, DSparkConfig)
    config = COMMON | changes | {"architectures": [architecture], "dflash_config": of_dflash}
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
            block = [int(tokens[anchor])] + [settings.mask_token_id] * (len(seen.logits) - 1)
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
