"""Writes the cases of Speculators' kinds: tiny drafters, and the logits that its torch classes give.

    pip install torch speculators==0.9.0
    TORCHDYNAMO_DISABLE=1 python tests/trained/make_speculators_cases.py tests/trained

Neither is needed to run the tests. The case `dflash/authors` has a `config.json` as the authors write it. Its logits
come from Speculators' layers, too; embedding, attention mask and head follow `dflash/model.py` in
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
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

HIDDEN_SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE, MASK = 32, 96, 40, 95
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


def model_of(
    kind: str, layers: type, num_drafted: int, seed: int, layer: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """A drafter with random weights, of layers of some class, whose settings are `layer`."""
    config_class, model_class = KINDS[kind]
    of_layers = {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    layer_config = layers(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        **of_layers | (layer or {}),
    )
    layer_config._attn_implementation = "eager"
    of_target = "LlamaForCausalLM" if "eagle" in kind else "Qwen3ForCausalLM"
    config = config_class(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_drafted)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[of_target]),
        ),
        **settings,
    )
    torch.manual_seed(seed)
    model = model_class(config)
    for weights in model.parameters():
        is_norm = weights.dim() == 1
        weights.data = torch.randn_like(weights.data) * (0.5 if is_norm else 0.3) + float(is_norm)
    if config.draft_vocab_size != VOCAB_SIZE:
        ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
        in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        in_draft[ids] = True
        model.load_vocab_mappings(in_draft, ids - torch.arange(DRAFT_VOCAB_SIZE))
    return model.float().eval()


def write(folder: Path, model: Any, config: dict[str, Any], not_saved: tuple[str, ...], **expected: Any) -> None:
    """Write a drafter's folder, and what it is expected to give, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith(not_saved)}
    save_file({name: value.contiguous() for name, value in own.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(folder / "expected.npz", **expected)


# --- EAGLE-3 and P-EAGLE --------------------------------------------------------------------------

NUM_TOKENS, NUM_STEPS = 9, 3
LOSS = resolve_loss_config("kl_div", "eager")


def write_eagle3(folder: Path, layers: type, layer: dict[str, Any] | None = None, **settings: Any) -> None:
    """Write a drafter of the folder's kind, and its logits for random features and tokens."""
    kind = folder.parent.name
    settings |= {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    settings |= {"mask_token_id": MASK} if kind == "peagle" else {}
    model = model_of(kind, layers, NUM_STEPS, 5, layer, **settings)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, given: logits.append(given[0]))
    features = torch.randn(1, NUM_TOKENS, 3 * HIDDEN_SIZE)
    tokens = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS))
    documents = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    with torch.no_grad():
        if kind == "peagle":
            # All depths after every position, as far as the text goes.
            lengths = [NUM_TOKENS - step for step in range(NUM_STEPS)]
            rows = torch.cat([torch.arange(n) for n in lengths]), torch.repeat_interleave(torch.tensor(lengths))
            core.generate_cod_sample_indices = lambda **_: rows
            loss = {"verifier_last_hidden_states": features[..., :HIDDEN_SIZE], "loss_config": LOSS}
            model(features, tokens, documents, **loss)
            logits = list(logits[0].split(lengths))
        else:
            model(features, tokens, documents, ttt_steps=NUM_STEPS)
    steps = {f"logits{step}": given.numpy() for step, given in enumerate(logits)}
    config = json.loads(model.config.to_json_string())
    write(folder, model, config, ("verifier", "t2d"), features=features[0], tokens=tokens[0].int(), **steps)


# --- DFlash and DSpark ----------------------------------------------------------------------------

TEXT_SIZE, BLOCK_SIZE = 16, 5
FEATURE_LAYERS = [1, 2, 4]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
SCALES = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}


def speculators_given(model: DFlashDraftModel, features: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """(anchors, block, V) logits of the blocks at all positions but those at the end, and DSpark's estimates."""
    num_anchors = TEXT_SIZE - BLOCK_SIZE
    hidden, logits, *_ = model._backbone_forward(
        features[None],
        tokens[None],
        torch.ones(1, TEXT_SIZE, dtype=torch.long),
        torch.zeros(1, TEXT_SIZE, HIDDEN_SIZE),
        torch.zeros(1, TEXT_SIZE, dtype=torch.long),
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
    for anchor in range(TEXT_SIZE - BLOCK_SIZE):
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


def write_dflash(folder: Path, layer: dict[str, Any] | None = None, **settings: Any) -> None:
    """Write a drafter, DSpark's if it has a Markov head, and its logits for random features and tokens, with an
    embedding and a head of a target.
    """
    is_of_authors = folder.name == "authors"
    settings = {"draft_vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE, "mask_token_id": MASK} | settings
    settings["aux_hidden_state_layer_ids"] = FEATURE_LAYERS
    kind = "dspark" if "markov_head_type" in settings else "dflash"
    model = model_of(kind, Qwen3Config, BLOCK_SIZE - 1, 8, {"num_hidden_layers": 2} | (layer or {}), **settings)
    features = torch.randn(TEXT_SIZE, len(FEATURE_LAYERS) * HIDDEN_SIZE)
    tokens = torch.randint(0, VOCAB_SIZE - 1, (TEXT_SIZE,))
    with torch.no_grad():
        given = (authors_given if is_of_authors else speculators_given)(model, features, tokens)
    config = json.loads(model.config.to_json_string())
    if is_of_authors:
        config = config["transformer_layer_config"] | {
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK_SIZE,
            "num_target_layers": 6,
            # Of the layers that give the hidden states.
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in FEATURE_LAYERS], **SCALES},
        }
    of_target = {"embedding": model.embed_tokens.weight.detach(), "head": model.lm_head.weight.detach()}
    not_saved = ("verifier", "embed_tokens", *(() if model.use_draft_vocab else ("lm_head",)))
    write(folder, model, config, not_saved, features=features, tokens=tokens.int(), **of_target, **given)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    deep = {"num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE}
    write_eagle3(where / "eagle3/llama", LlamaConfig)
    write_eagle3(where / "eagle3/qwen3", Qwen3Config, norm_before_residual=True)
    write_eagle3(where / "eagle3/norms", LlamaConfig, fc_norm=True, norm_output=True)
    write_eagle3(where / "eagle3/deep", LlamaConfig, deep, norm_before_fc=True)
    write_eagle3(where / "peagle/llama", LlamaConfig)
    write_eagle3(where / "peagle/qwen3", Qwen3Config, norm_before_residual=True, fc_norm=True)
    write_eagle3(where / "peagle/deep", LlamaConfig, deep, norm_before_fc=True)
    where /= "dflash"
    write_dflash(where / "whole")
    write_dflash(where / "reduced", {"rope_parameters": LLAMA3_ROPE}, draft_vocab_size=DRAFT_VOCAB_SIZE)
    write_dflash(where / "sliding", SLIDING | {"attention_bias": True})
    write_dflash(where / "from_anchor", SLIDING, sample_from_anchor=True, sliding_window_non_causal=True)
    write_dflash(where / "authors", SLIDING)
    write_dflash(where / "dspark", draft_vocab_size=DRAFT_VOCAB_SIZE, markov_head_type="vanilla", markov_rank=8)
    write_dflash(where / "dspark_gated", markov_head_type="gated", markov_rank=8)
    by_hidden = {"markov_head_type": "rnn", "markov_rank": 8, "confidence_head_with_markov": False}
    write_dflash(where / "dspark_rnn", SLIDING, **by_hidden)
