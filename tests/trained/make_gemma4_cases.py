"""Writes the cases of `test_gemma4_assistant.py`: tiny assistants, keys and values of mlx-vlm's Gemma 4, its logits.

    pip install mlx-vlm==0.7.10
    python tests/trained/make_gemma4_cases.py tests/trained/gemma4

mlx-vlm is not needed to run the test.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel, ModelConfig

VOCAB_SIZE, NUM_TOKENS, NUM_STEPS = 96, 18, 3
KINDS = ["sliding_attention", "full_attention"]
COMMON = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 1e-6,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
# Width of the target, of the assistant, the window, what the assistant's configuration says besides, and the target's.
CASES: dict[str, tuple[int, int, int, dict[str, Any], dict[str, Any]]] = {
    "ordered": (
        24,
        16,
        5,
        {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3},
        {"num_kv_shared_layers": 2},
    ),
    "plain": (32, 24, 64, {"use_ordered_embeddings": False, "num_centroids": 2048}, {"num_kv_shared_layers": 0}),
    "unified": (
        40,
        16,
        7,
        {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]},
        {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}


def drawn(model: Any) -> Any:
    """A model with random weights."""
    weights = [
        (name, mx.random.normal(value.shape) * 0.3 + float("norm" in name or "scalar" in name))
        for name, value in tree_flatten(model.parameters())
        if "token_ordering" not in name
    ]
    model.update(tree_unflatten(weights))
    return model


def write(
    folder: Path, width: int, hidden_size: int, window: int, assistant: dict[str, Any], target: dict[str, Any]
) -> None:
    """Write an assistant, and what it says after each token and the steps that follow."""
    mx.random.seed(6)
    sizes = COMMON | {"sliding_window": window}
    of_target = sizes | {"hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 4}
    language_model = drawn(LanguageModel(TextConfig.from_dict(of_target | {"layer_types": KINDS * 2} | target)))
    tokens = mx.random.randint(0, VOCAB_SIZE, (NUM_TOKENS + NUM_STEPS,))
    read = language_model(tokens[None, :NUM_TOKENS], return_hidden=True, return_shared_kv=True)
    hidden = language_model.speculative_draft_hidden(read.hidden_states[-1])
    text = sizes | {"hidden_size": hidden_size, "intermediate_size": 32, "num_hidden_layers": 4}
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": width,
        "tie_word_embeddings": True,
        "text_config": text | {"layer_types": KINDS[:1] * 3 + KINDS[1:], "num_kv_shared_layers": 4},
    } | assistant
    model = drawn(Gemma4AssistantDraftModel(ModelConfig.from_dict(json.loads(json.dumps(config)))))
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering = mx.random.permutation(VOCAB_SIZE).astype(mx.int32)
    model.bind(language_model)
    logits, given = [], []
    for length in range(1, NUM_TOKENS + 1):
        shared = {
            kind: tuple(array[:, :, :length] for array in arrays) for kind, arrays in read.shared_kv_states.items()
        }
        model.set_shared_kv(shared, length, position=length - 1, kv_valid_len=length)
        state = hidden[:, length - 1 : length]
        for step in range(NUM_STEPS):
            embedded = language_model.model.embed_tokens(tokens[None, length + step : length + step + 1])
            inputs = mx.concatenate([embedded * width**0.5, state], axis=-1)
            state, found = model(inputs, shared, mx.array([[length - 1]]))
            logits.append(found[0, 0])
            given.append(state[0, 0])
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    if "masked_embedding.token_ordering" in weights:
        weights["masked_embedding.token_ordering"] = weights["masked_embedding.token_ordering"].astype(mx.int64)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shape = (NUM_TOKENS, NUM_STEPS, -1)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.astype(mx.int32),
        embedding=language_model.model.embed_tokens.weight,
        hidden=hidden[0],
        logits=mx.stack(logits).reshape(shape),
        given=mx.stack(given).reshape(shape),
        **{
            f"{kind}.{name}": array
            for kind, arrays in read.shared_kv_states.items()
            for name, array in zip(("keys", "values"), arrays, strict=True)
        },
    )


if __name__ == "__main__":
    for name, case in CASES.items():
        write(Path(sys.argv[1]) / name, *case)
