"""Writes the cases of `test_mtp.py`: tiny MTP layers with decoder layers of transformers, and their logits in torch.

    pip install torch transformers==5.23.0 numpy safetensors
    python tests/trained/make_mtp_cases.py tests/trained/mtp

None is needed to run the test. What is around the decoder layer follows vLLM: `deepseek_mtp.py`, `glm4_moe_mtp.py`,
`glm4_moe_lite_mtp.py`, `mimo_mtp.py`, `nemotron_h_mtp.py`, `qwen3_next_mtp.py`, `qwen3_5_mtp.py` and `step3p5_mtp.py`
in https://github.com/vllm-project/vllm. One thing differs: vLLM sets the embedding beside the hidden state of position
0 to zero, and the models were not trained so.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

HIDDEN_SIZE, VOCAB_SIZE, NUM_TOKENS, NUM_STEPS, NUM_LAYERS, NUM_EXPERTS = 32, 48, 7, 3, 2, 4
COMMON = {
    "hidden_size": HIDDEN_SIZE,
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
ROUTED = EXPERTS | {
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED = EXPERTS | {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "deepseek_v3": ROUTED | LATENT,
    "glm4_moe_lite": ROUTED | LATENT | {"n_group": 1, "topk_group": 1},
    "nemotron_h": {
        "hybrid_override_pattern": "M*E",
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 1,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
    },
    "step3p5": {
        "num_attention_groups": 2,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_theta": [5_000_000.0, 10_000.0, 10_000.0],
        "partial_rotary_factors": [0.5, 1.0, 0.5],
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "num_nextn_predict_layers": 1,
        "moe_num_experts": NUM_EXPERTS,
        "moe_top_k": 2,
        "moe_intermediate_size": 8,
        "share_expert_dim": 8,
        "moe_layers_enum": "1",
    },
    "glm4_moe": ROUTED | {"use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_parameters": ROPE},
    "qwen3_next": LINEAR
    | SHARED
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.5, "rope_parameters": ROPE},
    "qwen3_5": LINEAR | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}},
    "qwen3_5_moe": LINEAR | SHARED | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}},
    "mimo": {"attention_bias": True, "num_nextn_predict_layers": 1},
}
# What transformers calls the text model of a family, or another of the same layers.
IN_TORCH = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "mimo": "qwen2"}
# Arguments of the one layer in torch that differ from the target's.
ALONE = {
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"], "hybrid_override_pattern": None},
    "step3p5": {
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["dense"],
        "num_sliding_attention_heads": 6,
        "partial_rotary_factors": [0.5],
        "rope_theta": [10_000.0],
        "moe_layers_enum": None,
        "attention_other_setting": None,
        "num_nextn_predict_layers": 0,
    },
}
# By family: the prefix of the layer and of what is around it; embedding norm, hidden norm, projection and final norm.
NEXTN = (f"model.layers.{NUM_LAYERS}.", f"model.layers.{NUM_LAYERS}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("mtp.layers.0.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
MIMO = (*("model.mtp_layers.0.",) * 2, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
NEMOTRON = (
    "mtp.layers.", "mtp.", "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm",
)  # fmt: skip
STEP = (*NEXTN[:5], "transformer.shared_head.norm")
NAMES = {
    "deepseek_v3": NEXTN,
    "glm4_moe": NEXTN,
    "glm4_moe_lite": NEXTN,
    "mimo": MIMO,
    "nemotron_h": NEMOTRON,
    "step3p5": STEP,
}
# The embedding and the head beside a layer that are not its target's.
OWN = {
    "glm4_moe_lite": ("embed_tokens.weight", "shared_head.head.weight"),
    "step3p5": ("embed_tokens.weight", "transformer.shared_head.output.weight"),
}


def norm(weight: torch.Tensor, hidden: torch.Tensor, offset: float) -> torch.Tensor:
    """RMS norm; some families keep the difference to one."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + COMMON["rms_norm_eps"]) * (weight + offset)


def apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, as in the files of all families but Qwen 3.5."""
    given = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for e, expert in enumerate(value):
                prefix = name.removesuffix("gate_up_proj") + f"{e}."
                given[prefix + "gate_proj.weight"], given[prefix + "up_proj.weight"] = expert.chunk(2)
        elif name.endswith("experts.up_proj"):
            given |= {name.removesuffix("up_proj") + f"{e}.up_proj.weight": part for e, part in enumerate(value)}
        elif name.endswith("experts.down_proj"):
            given |= {name.removesuffix("down_proj") + f"{e}.down_proj.weight": part for e, part in enumerate(value)}
        else:
            given[name] = value
    return given


def model_of(family: str) -> nn.Module:
    """A model of one layer with random weights, as MTP has it: full attention, and experts if the family has any."""
    alone = COMMON | FAMILIES[family] | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "use_cache": False}
    if family in ALONE:
        alone |= ALONE[family]
    elif "layer_types" in alone:
        alone |= {"layer_types": ["full_attention"], "full_attention_interval": 1}
    kind = IN_TORCH.get(family, family)
    config = AutoConfig.for_model(kind, **alone, attn_implementation="eager")
    # The text model alone has no entry among the automatic ones.
    model = (Step3p7TextModel(config) if family == "step3p5" else AutoModel.from_config(config)).float().eval()
    for name, weights in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            weights.data = torch.randn_like(weights.data) * 0.3 + float(weights.dim() == 1 and "bias" not in name)
        if "e_score_correction_bias" in name:
            # Positive, as in the published models: with a negative score, an expert of a group that is left out, whose
            # score is zero in some implementations and minus infinity in others, may come first.
            weights.data = weights.data.abs()
    setattr(model, "norm_f" if family == "nemotron_h" else "norm", nn.Identity())
    return model


class Layer:
    """An MTP layer with random weights: what it reads at each position, and what it gives."""

    def __init__(self, family: str, number: int) -> None:
        self.family, self.model, self.offset = family, model_of(family), float(family.startswith(("qwen", "step")))
        layer_prefix, self.prefix, *names = (
            name.replace(f"layers.{NUM_LAYERS}.", f"layers.{NUM_LAYERS + number}.") for name in NAMES.get(family, QWEN)
        )
        self.around = {
            name: torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE) * 0.3
            if i == 2
            else torch.randn(HIDDEN_SIZE) * 0.3 + 1 - self.offset
            for i, name in enumerate(names)
        }
        layers = self.model.layers if family == "nemotron_h" else self.model.layers[0]
        layer = {name: value for name, value in layers.state_dict().items() if "inv_freq" not in name}
        self.weights = {f"{self.prefix}{name}.weight": value for name, value in self.around.items()}
        self.weights |= {layer_prefix + n: v for n, v in (layer if family == "qwen3_5_moe" else apart(layer)).items()}

    def share(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Have an embedding and a head, the target's or some of its own."""
        own = {self.prefix + n: torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * 0.3 for n in OWN.get(self.family, ())}
        self.weights |= own
        self.embedding, self.head = own.values() if own else (embedding, head)

    def entering(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        embedding_norm, hidden_norm, projection, _ = self.around.values()
        embedded = norm(embedding_norm, self.embedding[token], self.offset)
        halves = [embedded, norm(hidden_norm, hidden, self.offset)]
        return torch.cat(halves[::-1] if self.family == "mimo" else halves, dim=-1) @ projection.T

    def given(self, entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states that go on from all positions, and the logits of the last one."""
        hidden = self.model(inputs_embeds=entering[None]).last_hidden_state[0]
        normalized = norm(self.around[[*self.around][-1]], hidden, self.offset)
        is_normalized = NAMES.get(self.family) not in (NEXTN, STEP)
        return normalized if is_normalized else hidden, normalized[-1] @ self.head.T


def write(folder: Path, family: str, num_layers: int = 1) -> None:
    """Write a target's folder with MTP layers with random weights, and their logits for random hidden states.

    Layer k reads what the one before it gave at each position, and the token k + 1 positions further on.
    """
    torch.manual_seed(7)
    layers = [Layer(family, number) for number in range(num_layers)]
    of_target = "backbone.embeddings" if family == "nemotron_h" else "model.embed_tokens", "lm_head"
    final = "backbone.norm_f.weight" if family == "nemotron_h" else "model.norm.weight"
    target = {
        f"{of_target[0]}.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE),
        "lm_head.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * 0.3,
        final: torch.randn(HIDDEN_SIZE) * 0.3 + 1 - layers[0].offset,
    }
    for layer in layers:
        layer.share(*(target[f"{name}.weight"] for name in of_target))
    num_steps = NUM_STEPS + num_layers - 1
    features, tokens = torch.randn(NUM_TOKENS, HIDDEN_SIZE), torch.randint(0, VOCAB_SIZE, (NUM_TOKENS + num_steps,))
    # At each position, and on from there: with the next layer, and then with the last one's own hidden states.
    expected = torch.zeros(num_steps, NUM_TOKENS, VOCAB_SIZE)
    with torch.no_grad():
        for begin in range(NUM_TOKENS):
            hidden, last = norm(target[final], features[: begin + 1], layers[0].offset), layers[-1]
            for step in range(num_steps):
                if step < num_layers:
                    last = layers[step]
                    inputs = last.entering(hidden, tokens[step : begin + 1 + step])
                else:
                    inputs = torch.cat([inputs, last.entering(hidden[-1:], tokens[begin + step : begin + 1 + step])])
                hidden, expected[step, begin] = last.given(inputs)
    weights = {name: value for part in (target, *(layer.weights for layer in layers)) for name, value in part.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    config = COMMON | FAMILIES[family] | {"model_type": family}
    if num_layers > 1:
        config["num_nextn_predict_layers"] = num_layers
        for name in ("layer_types", "rope_theta", "partial_rotary_factors"):
            if isinstance(config.get(name), list):
                config[name] = config[name] + config[name][-1:] * (num_layers - 1)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(
        folder / "expected.npz", features=features.numpy(), tokens=tokens.int().numpy(), logits=expected.numpy()
    )


if __name__ == "__main__":
    where = Path(sys.argv[1])
    for each in FAMILIES:
        write(where / each, each)
    for each, num_of_it in (("deepseek_v3", 2), ("glm4_moe", 3), ("step3p5", 3)):
        write(where / f"{each}_deep", each, num_of_it)
