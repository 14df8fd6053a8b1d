"""Writes the cases of `test_dflash.py`: tiny DFlash and DSpark drafters, and the logits of Speculators' torch classes.

    pip install torch speculators==0.9.0
    TORCHDYNAMO_DISABLE=1 python tests/trained/make_dflash_cases.py tests/trained/dflash

Neither is needed to run the test. The case `authors` has a `config.json` as the authors write it. Its logits come from
Speculators' layers, too; embedding, attention mask and head follow `dflash/model.py` in
https://github.com/z-lab/dflash.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

HIDDEN_SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE, NUM_TOKENS, BLOCK_SIZE, MASK = 32, 96, 40, 16, 5, 95
FEATURE_LAYERS = [1, 2, 4]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
SCALES = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}


def configuration(
    draft_vocab_size: int = VOCAB_SIZE, layer: dict[str, Any] | None = None, **changes: Any
) -> DFlashSpeculatorConfig:
    """The configuration of a drafter: DSpark's if it has a Markov head."""
    of_kind = DSparkSpeculatorConfig if "markov_head_type" in changes else DFlashSpeculatorConfig
    layer_config = Qwen3Config(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        **({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}} | (layer or {})),
    )
    layer_config._attn_implementation = "eager"
    return of_kind(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab_size,
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=FEATURE_LAYERS,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark" if "markov_head_type" in changes else "dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **changes,
    )


def model_of(config: DFlashSpeculatorConfig) -> DFlashDraftModel:
    """A drafter with random weights."""
    torch.manual_seed(8)
    model = (DSparkDraftModel if isinstance(config, DSparkSpeculatorConfig) else DFlashDraftModel)(config)
    for weights in model.parameters():
        is_norm = weights.dim() == 1
        weights.data = torch.randn_like(weights.data) * (0.5 if is_norm else 0.3) + float(is_norm)
    if config.draft_vocab_size != VOCAB_SIZE:
        ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
        in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        in_draft[ids] = True
        model.load_vocab_mappings(in_draft, ids - torch.arange(DRAFT_VOCAB_SIZE))
    return model.float().eval()


def speculators_given(model: DFlashDraftModel, features: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """(anchors, block, V) logits of the blocks at all positions but those at the end, and DSpark's estimates."""
    num_anchors = NUM_TOKENS - BLOCK_SIZE
    hidden, logits, *_ = model._backbone_forward(
        features[None],
        tokens[None],
        torch.ones(1, NUM_TOKENS, dtype=torch.long),
        torch.zeros(1, NUM_TOKENS, HIDDEN_SIZE),
        torch.zeros(1, NUM_TOKENS, dtype=torch.long),
        max_anchors=num_anchors,
    )
    blocks = logits[0].view(num_anchors, BLOCK_SIZE, -1)
    if isinstance(model, DSparkDraftModel):
        before, hidden = tokens.unfold(0, BLOCK_SIZE, 1)[:num_anchors], hidden.view(num_anchors, BLOCK_SIZE, -1)
        blocks = blocks + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        by_token = [model.markov_head.prev_embeddings(before)] if model.config.confidence_head_with_markov else []
        return {
            "logits": blocks,
            "acceptance": torch.sigmoid(model.confidence_head(torch.cat([hidden, *by_token], dim=-1))),
        }
    return {"logits": blocks if model.config.sample_from_anchor else blocks[:, 1:]}


def authors_given(model: DFlashDraftModel, features: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, by the authors' definition."""
    found = []
    context = model.hidden_norm(model.fc(features))
    for anchor in range(NUM_TOKENS - BLOCK_SIZE):
        ids = torch.tensor([tokens[anchor]] + [MASK] * (BLOCK_SIZE - 1))
        hidden = model.embed_tokens(ids)[None] * SCALES["input_embedding_scale"]
        positions = torch.arange(anchor + BLOCK_SIZE)
        rotary = model.rotary_emb(hidden, positions[None])
        query, key = positions[anchor:, None], positions[None]
        for index, layer in enumerate(model.layers):
            seen = torch.ones(BLOCK_SIZE, anchor + BLOCK_SIZE, dtype=torch.bool)
            if index in model.sliding_window_indices:
                seen = (key <= query) & (query - key < model.sliding_window)
            mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
            hidden = layer(
                hidden_states=hidden,
                target_hidden=context[None, :anchor],
                attention_mask=mask,
                position_embeddings=rotary,
            )
        logits = model.lm_head(model.norm(hidden))[0, 1:] * SCALES["output_multiplier"]
        cap = SCALES["final_logit_softcapping"]
        found.append(torch.tanh(logits / cap) * cap)
    return {"logits": torch.stack(found)}


def write(folder: Path, config: DFlashSpeculatorConfig, *, of_authors: bool = False) -> None:
    """Write a drafter, and its logits for random features and tokens, with an embedding and a head of a target."""
    model = model_of(config)
    features = torch.randn(NUM_TOKENS, len(FEATURE_LAYERS) * HIDDEN_SIZE)
    tokens = torch.randint(0, VOCAB_SIZE - 1, (NUM_TOKENS,))
    with torch.no_grad():
        given = (authors_given if of_authors else speculators_given)(model, features, tokens)
    folder.mkdir(parents=True, exist_ok=True)
    not_saved = ("verifier", "embed_tokens", *(() if model.use_draft_vocab else ("lm_head",)))
    own = {name: value for name, value in model.state_dict().items() if not name.startswith(not_saved)}
    save_file({name: value.contiguous() for name, value in own.items()}, folder / "model.safetensors")
    described = json.loads(config.to_json_string())
    if of_authors:
        described = described["transformer_layer_config"] | {
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK_SIZE,
            "num_target_layers": 6,
            # Of the layers that give the hidden states.
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in FEATURE_LAYERS], **SCALES},
        }
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    np.savez_compressed(
        folder / "expected.npz",
        features=features,
        tokens=tokens.int(),
        embedding=model.embed_tokens.weight.detach(),
        head=model.lm_head.weight.detach(),
        **given,
    )


if __name__ == "__main__":
    where = Path(sys.argv[1])
    write(where / "whole", configuration())
    write(where / "reduced", configuration(DRAFT_VOCAB_SIZE, {"rope_parameters": LLAMA3_ROPE}))
    write(where / "sliding", configuration(layer=SLIDING | {"attention_bias": True}))
    write(where / "from_anchor", configuration(layer=SLIDING, sample_from_anchor=True, sliding_window_non_causal=True))
    write(where / "authors", configuration(layer=SLIDING), of_authors=True)
    write(where / "dspark", configuration(DRAFT_VOCAB_SIZE, markov_head_type="vanilla", markov_rank=8))
    write(where / "dspark_gated", configuration(markov_head_type="gated", markov_rank=8))
    by_hidden = {"markov_head_type": "rnn", "markov_rank": 8, "confidence_head_with_markov": False}
    write(where / "dspark_rnn", configuration(layer=SLIDING, **by_hidden))
