"""Writes the cases of `test_eagle3.py`: tiny drafters of Speculators, and the logits that its torch classes give.

    pip install torch speculators==0.9.0
    TORCHDYNAMO_DISABLE=1 python tests/trained/make_eagle3_cases.py tests/trained

Neither is needed to run the test.
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
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

HIDDEN_SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE, NUM_TOKENS, NUM_STEPS, MASK = 32, 96, 40, 9, 3, 95
LOSS = resolve_loss_config("kl_div", "eager")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configuration(kind: type, layers: int = 1, rope: dict[str, Any] | None = None, **flags: Any) -> Any:
    """The configuration of a drafter with layers of some kind."""
    layer = kind(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10_000.0},
    )
    layer._attn_implementation = "eager"
    is_parallel = "mask_token_id" in flags
    return (PEagleSpeculatorConfig if is_parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="peagle" if is_parallel else "eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )


def write(folder: Path, config: Any) -> None:
    """Write a drafter with random weights, and its logits for random features and tokens."""
    torch.manual_seed(5)
    is_parallel = isinstance(config, PEagleSpeculatorConfig)
    model = (PEagleDraftModel if is_parallel else Eagle3DraftModel)(config)
    for weights in model.parameters():
        is_norm = weights.dim() == 1
        weights.data = torch.randn_like(weights.data) * (0.5 if is_norm else 0.3) + float(is_norm)
    ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    in_draft[ids] = True
    model.load_vocab_mappings(in_draft, ids - torch.arange(DRAFT_VOCAB_SIZE))
    model = model.float().eval()
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, given: logits.append(given[0]))
    features = torch.randn(1, NUM_TOKENS, 3 * HIDDEN_SIZE)
    tokens = torch.randint(0, VOCAB_SIZE, (1, NUM_TOKENS))
    with torch.no_grad():
        documents = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
        if is_parallel:
            # All depths after every position, as far as the text goes.
            lengths = [NUM_TOKENS - step for step in range(NUM_STEPS)]
            rows = torch.cat([torch.arange(n) for n in lengths]), torch.repeat_interleave(torch.tensor(lengths))
            core.generate_cod_sample_indices = lambda **_: rows
            loss = {"verifier_last_hidden_states": features[..., :HIDDEN_SIZE], "loss_config": LOSS}
            model(features, tokens, documents, **loss)
            logits = list(logits[0].split(lengths))
        else:
            model(features, tokens, documents, ttt_steps=NUM_STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith(("verifier", "t2d"))}
    save_file({name: value.contiguous() for name, value in own.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads(config.to_json_string()), indent=1) + "\n")
    steps = {f"logits{step}": given.numpy() for step, given in enumerate(logits)}
    np.savez_compressed(folder / "expected.npz", features=features[0], tokens=tokens[0].int(), **steps)


if __name__ == "__main__":
    where = Path(sys.argv[1]) / "eagle3"
    write(where / "llama", configuration(LlamaConfig))
    write(where / "qwen3", configuration(Qwen3Config, norm_before_residual=True))
    write(where / "norms", configuration(LlamaConfig, fc_norm=True, norm_output=True))
    write(where / "deep", configuration(LlamaConfig, layers=2, rope=LLAMA3_ROPE, norm_before_fc=True))
    where, mask = where.with_name("peagle"), {"mask_token_id": MASK}
    write(where / "llama", configuration(LlamaConfig, **mask))
    write(where / "qwen3", configuration(Qwen3Config, norm_before_residual=True, fc_norm=True, **mask))
    write(where / "deep", configuration(LlamaConfig, layers=2, rope=LLAMA3_ROPE, norm_before_fc=True, **mask))
