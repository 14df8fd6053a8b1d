"""Every architecture of mlx-lm in tiny form: how to build it, which caches it makes, or why it is left out.

The weights are random float32, drawn wide enough that texts are varied and depend on everything that the caches hold.
Windows are of 8 to 16 tokens, so that a text of 48 tokens crosses them several times.
"""

import importlib
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache
from models import draw_weights

VOCAB_SIZE = 64

# Arguments that most architectures need, under the names that they use. An architecture takes those it knows.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "block_dim", "dim_model_base"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    "group_norm_size": 2,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), False),
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "sliding_window": 12,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "num_kv_shared_layers": 2,
    **dict.fromkeys(("logits_scaling", "residual_multiplier", "scale_emb"), 1.0),
    "attention_multiplier": 0.35,
    "scale_depth": 1.4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    # Mixtures of experts.
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    "expert_ffn_hidden_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "n_group", "topk_group"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_freq", "decoder_sparse_step"), 1),
    "mlp_only_layers": [],
    # Latent attention, and an index of it.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 16,
    # Linear attention, convolutions and state spaces.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "mamba_n_heads"), 4),
    **dict.fromkeys(("conv_bias", "use_conv_bias"), True),
    "conv_L_cache": 3,
    "mamba_n_groups": 1,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}

_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]


@attrs.frozen
class Architecture:
    """How to build the model of one mlx-lm module.

    Attributes:
        args: arguments beyond `_COMMON`, or different from it.
        embedding: scale of its embeddings; smaller where the model scales them up, or its layers would not matter.
        is_stepwise: whether one pass over several tokens gives other logits than one pass per token.
    """

    kinds: tuple[str, ...]
    args: dict[str, Any] = attrs.Factory(dict)
    seed: int = 0
    embedding: float = 2.0
    is_stepwise: bool = False


def _of(*kinds: str, seed: int = 0, embedding: float = 2.0, is_stepwise: bool = False, **args: Any) -> Architecture:
    return Architecture(kinds, args, seed, embedding, is_stepwise)


def _text(**args: Any) -> dict[str, Any]:
    """The configuration of the language model in a vision-language model."""
    return _COMMON | args


KV = "KVCache"
ROTATING = "RotatingKVCache"
CHUNKED = "ChunkedKVCache"
ARRAYS = "ArraysCache"

# Of full attention, without any arguments of their own.
_PLAIN = [
    "Klear", "bailing_moe", "deepseek", "deepseek_v3", "ernie4_5", "glm", "glm4_moe", "glm4_moe_lite", "helium",
    "internlm2", "internlm3", "mimo", "minicpm", "mixtral", "olmoe", "phimoe", "qwen2", "qwen2_moe", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "starcoder2", "talkie", "telechat3", "youtu_llm",
]  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    # --- full attention
    **dict.fromkeys(_PLAIN, _of(KV)),
    **dict.fromkeys(("dots1", "gemma", "glm4", "olmo2", "phi3"), _of(KV, seed=1)),
    **dict.fromkeys(("exaone", "hunyuan_v1_dense", "qwen3"), _of(KV, seed=2)),
    "afm7": _of(KV, hidden_dim=32, num_layers=3, num_kv_reuse_layers=1, num_kv_heads=2),
    "apertus": _of(KV, seed=28, embedding=0.2, post_norm=False, qk_norm=True),
    "cohere": _of(KV, seed=5, logit_scale=1.0),
    "dbrx": _of(
        KV,
        d_model=32,
        n_heads=4,
        n_layers=2,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16},
    ),
    "deepseek_v2": _of(KV, rope_scaling=_YARN),
    "ernie4_5_moe": _of(KV, seed=2, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1),
    "gemma2": _of(KV, embedding=0.2, query_pre_attn_scalar=8.0),
    "gpt2": _of(KV, seed=3, n_ctx=512),
    "gpt_bigcode": _of(KV, n_inner=48),
    "gpt_neox": _of(KV, seed=3, rotary_emb_base=10_000, rotary_pct=0.5),
    "gptj": _of(KV, seed=7, rotary_dim=4),
    "granite": _of(KV, embedding_multiplier=1.0, residual_multiplier=1.0),
    "granitemoe": _of(KV, embedding_multiplier=1.0, residual_multiplier=1.0),
    "hunyuan": _of(
        KV,
        seed=1,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "kimi_k25": _of(KV, text_config=_text()),
    "kimi_vl": _of(KV, text_config=_text()),
    "lille-130m": _of(KV, block_size=512, n_embd=64, n_kv_heads=2),
    "llama4_text": _of(KV, seed=1, intermediate_size_mlp=48, no_rope_layers=[1, 0]),
    "minicpm3": _of(
        KV,
        seed=3,
        rope_scaling={"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.5] * 4},
    ),
    "minimax": _of(KV, rotary_dim=4),
    "mistral3": _of(KV, text_config=_text(model_type="llama")),
    "mistral4": _of(KV, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.1}),
    "nanbeige": _of(KV, num_loops=2),
    "nanochat": _of(KV, seed=32, embedding=0.2),
    "nemotron": _of(KV, hidden_act="relu2"),
    "nemotron-nas": _of(
        KV,
        num_hidden_layers=3,
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ],
    ),
    "openelm": _of(
        KV,
        seed=2,
        num_transformer_layers=2,
        model_dim=32,
        ffn_dim_divisor=8,
        num_query_heads=[4, 4],
        num_kv_heads=[2, 2],
        ffn_multipliers=[1.0, 1.5],
    ),
    "phi": _of(KV, seed=6),
    "phi3small": _of(
        KV,
        seed=1,
        embedding=0.5,
        is_stepwise=True,
        mup_width_multiplier=0.5,
        dense_attention_every_n_layers=2,
        ff_intermediate_size=48,
        gegelu_limit=20.0,
        vocab_size=100_352,  # it refers to special ids up to there
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=2,
        blocksparse_vert_stride=2,
    ),
    "phixtral": _of(KV, num_vocab=VOCAB_SIZE, model_dim=32, rotary_dim=4),
    "pixtral": _of(KV, text_config=_text(model_type="llama")),
    "plamo": _of(KV, n_shared_head=2),
    "qwen": _of(KV, seed=1, kv_channels=8),
    "qwen2_vl": _of(KV, text_config=_text(model_type="qwen2")),
    "qwen3_vl": _of(KV, seed=2, text_config=_text(model_type="qwen3")),
    "qwen3_vl_moe": _of(KV, text_config=_text(model_type="qwen3_moe")),
    "stablelm": _of(KV, use_qkv_bias=True),
    # --- full attention, and an index with keys of its own
    "deepseek_v32": _of("CacheList(KVCache, KVCache)"),
    "glm_moe_dsa": _of(
        "CacheList(KVCache, KVCache)",
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
    ),
    "longcat_flash": _of("CacheList(KVCache, KVCache)", attention_method="MLA", zero_expert_type="identity"),
    "minimax_m3_vl": _of(
        "CacheList(KVCache)",
        "CacheList(KVCache, KVCache)",
        text_config=_text(
            num_hidden_layers=3,
            dense_intermediate_size=48,
            mlp_layer_types=["dense", "sparse", "sparse"],
            layer_types=["full_attention", "sparse_attention", "sparse_attention"],
            index_block_size=4,
            index_topk_blocks=3,
        ),
    ),
    # --- sliding windows
    "afmoe": _of(KV, ROTATING, seed=1, layer_types=_SLIDING_AND_FULL),
    "cohere2": _of(KV, ROTATING, logit_scale=1.0, sliding_window_pattern=2),
    "exaone4": _of(KV, ROTATING, num_hidden_layers=3, sliding_window_pattern="LLG"),
    "exaone_moe": _of(KV, ROTATING, seed=1, layer_types=_SLIDING_AND_FULL, is_moe_layer=[False, True]),
    "gemma3": _of(
        KV,
        ROTATING,
        text_config=_text(
            model_type="gemma3_text", num_hidden_layers=3, query_pre_attn_scalar=8, sliding_window_pattern=3
        ),
    ),
    "gemma3_text": _of(KV, ROTATING, num_hidden_layers=3, query_pre_attn_scalar=8, sliding_window_pattern=3),
    "gemma3n": _of(
        KV,
        ROTATING,
        seed=6,
        embedding=0.2,
        text_config=_text(
            model_type="gemma3n",
            num_hidden_layers=4,
            rope_local_base_freq=1_000.0,
            final_logit_softcapping=30.0,
            layer_types=_SLIDING_AND_FULL * 2,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=4,
        ),
    ),
    "gemma4": _of(
        KV, ROTATING, text_config=_text(model_type="gemma4_text", num_hidden_layers=4, sliding_window_pattern=2)
    ),
    "gemma4_text": _of(KV, ROTATING, seed=1, num_hidden_layers=4, sliding_window_pattern=2),
    "gpt_oss": _of(KV, ROTATING, rope_scaling=_YARN),
    "iquestloopcoder": _of(KV, ROTATING, loop_window_size=8),
    "laguna": _of(
        KV,
        ROTATING,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads_per_layer=[4, 4, 2],
    ),
    "llama": _of(KV, ROTATING, seed=3, layer_types=_SLIDING_AND_FULL),
    "mellum": _of(
        KV,
        ROTATING,
        layer_types=_SLIDING_AND_FULL,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in _SLIDING_AND_FULL},
    ),
    "mimo_v2_flash": _of(
        KV,
        ROTATING,
        num_hidden_layers=3,
        hybrid_layer_pattern=[0, 1, 1],
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=8,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        layernorm_epsilon=1e-5,
        swa_rope_theta=1_000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        swa_v_head_dim=8,
    ),
    "ministral3": _of(
        KV, ROTATING, seed=2, layer_types=_SLIDING_AND_FULL, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.1}
    ),
    "muse_glimmer": _of(KV, ROTATING, num_hidden_layers=4, output_multiplier=1.0),
    "olmo3": _of(KV, ROTATING, layer_types=_SLIDING_AND_FULL),
    "plamo3": _of(KV, ROTATING, is_stepwise=True, window_size=8, sliding_window_pattern=2),
    "spark2_5": _of(
        KV,
        ROTATING,
        num_hidden_layers=4,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in _SLIDING_AND_FULL},
    ),
    "step3p5": _of(
        KV,
        ROTATING,
        num_hidden_layers=3,
        num_attention_groups=2,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        moe_num_experts=4,
        moe_top_k=2,
        share_expert_dim=16,
        moe_layers_enum="1,2",
    ),
    # --- chunked attention
    "llama4": _of(
        CHUNKED,
        KV,
        seed=1,
        text_config=_text(
            model_type="llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=12,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=48,
            num_experts_per_tok=1,
            floor_scale=16,
        ),
    ),
    # --- recurrent, and hybrids of recurrence and attention
    "baichuan_m1": _of(
        "CacheList(ArraysCache, KVCache)",
        "CacheList(ArraysCache, RotatingKVCache)",
        seed=1,
        sliding_window_layers=[1],
        conv_window=2,
    ),
    "bailing_hybrid": _of(ARRAYS, KV, num_hidden_layers=4),
    "bailing_moe_linear": _of(ARRAYS, KV, seed=1, num_hidden_layers=4),
    "bailing_moe_v3": _of(ARRAYS, KV, num_hidden_layers=4, short_conv_kernel_size=4),
    "falcon_h1": _of("CacheList(ArraysCache, KVCache)", mamba_d_ssm=32, mamba_d_head=8, lm_head_multiplier=1.0),
    "gear": _of(
        ARRAYS,
        KV,
        ROTATING,
        seed=1,
        num_hidden_layers=3,
        layer_types=["conv_mixer", "sliding_attention", "full_attention"],
    ),
    "granitemoehybrid": _of(
        ARRAYS,
        KV,
        seed=1,
        layer_types=["mamba", "attention"],
        embedding_multiplier=1.0,
        mamba_d_head=16,
        mamba_proj_bias=False,
        mamba_conv_bias=True,
    ),
    "jamba": _of(
        ARRAYS,
        KV,
        seed=1,
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_expand=2,
    ),
    "kimi_k3": _of(
        ARRAYS,
        KV,
        text_config=_text(
            model_type="kimi_linear",
            num_key_value_heads=4,
            linear_attn_config={"kda_layers": [1], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
        ),
    ),
    "kimi_linear": _of(
        ARRAYS,
        KV,
        model_max_length=512,
        linear_attn_config={"kda_layers": [1], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
    ),
    "lfm2": _of(ARRAYS, KV, seed=2, layer_types=["conv", "full_attention"]),
    "lfm2-vl": _of(ARRAYS, KV, seed=2, text_config=_text(model_type="lfm2", layer_types=["conv", "full_attention"])),
    "lfm2_moe": _of(ARRAYS, KV, layer_types=["conv", "full_attention"], use_expert_bias=True),
    "longcat_flash_ngram": _of(
        ARRAYS, "CacheList(KVCache, KVCache)", ngram_vocab_size_ratio=4, emb_neighbor_num=3, emb_split_num=2
    ),
    "mamba": _of(ARRAYS, intermediate_size=64, state_size=8, time_step_rank=2),
    "mamba2": _of(
        ARRAYS,
        head_dim=16,
        intermediate_size=64,
        state_size=8,
        n_groups=1,
        time_step_limit=(0.001, 100.0),
        time_step_rank=2,
    ),
    "nemotron_h": _of(
        ARRAYS,
        KV,
        seed=1,
        hybrid_override_pattern=["M", "*", "-", "E"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_proj_bias=False,
        ssm_state_size=8,
        n_groups=1,
        moe_shared_expert_intermediate_size=16,
    ),
    "olmo_hybrid": _of(ARRAYS, KV, layer_types=_LINEAR_AND_FULL, linear_allow_neg_eigval=True),
    "plamo2": _of(ARRAYS, KV, seed=4, hidden_size_per_head=8, mamba_num_heads=4, mamba_step=2),
    "qwen3_5": _of(ARRAYS, KV, text_config=_text(num_experts=0)),
    "qwen3_5_moe": _of(ARRAYS, KV, text_config=_text()),
    "prism_hadamard_qwen35": _of(
        ARRAYS,
        KV,
        seed=1,
        schema_version=1,
        tensor_namespace="mlx-lm-text",
        quantization={"bits": 2, "group_size": 128, "mode": "affine"},
        modules=[{"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
        text_config=_text(num_experts=0, intermediate_size=128),
    ),
    "qwen3_next": _of(ARRAYS, KV),
    "recurrent_gemma": _of(
        ARRAYS,
        ROTATING,
        num_hidden_layers=3,
        num_key_value_heads=1,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "rwkv7": _of(ARRAYS, seed=3, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
    # --- a cache class of its own
    "deepseek_v41": _of(
        "LayerCache",
        num_hidden_layers=3,
        head_dim=16,
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
        compress_ratios=(1, 4, 4),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        index_topk=4,
        rms_norm_eps=1e-5,
    ),
}

# All cache kinds; of the models that can always be trimmed, two with fewer and more caches than layers, and one like
# most.
OF_ALL_CACHES = [name for name, architecture in ARCHITECTURES.items() if architecture.kinds != (KV,)]
OF_ALL_CACHES += ["afm7", "nanbeige", "qwen3"]

# Architectures that can be built anywhere, but run with Metal only.
FOR_METAL: dict[str, Architecture] = {
    "bitnet": _of(KV),
    "muse_spark": _of(
        KV,
        ROTATING,
        text_config=_text(
            post_norm_eps=1e-5,
            rope_parameters={"rope_theta": 10_000.0},
            layer_rope_theta=[10_000.0, 0],
            layer_types=_SLIDING_AND_FULL,
            final_logit_softcapping=20.0,
            output_multiplier=1.0,
            moe_hidden_size=16,
            num_shared_experts=0,
        ),
    ),
}

# Modules that models are made of, without a model of their own.
_PARTS = (
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
)

NO_MODEL = "defines no Model; other modules use its parts"
NO_IMPORT = "importing it ends the process without a package that mlx-lm does not depend on"
METAL_ONLY = "calls Metal kernels that have no other implementation"

LEFT_OUT = {**dict.fromkeys(_PARTS, NO_MODEL), "olmo": NO_IMPORT, **dict.fromkeys(FOR_METAL, METAL_ONLY)}


def build(name: str, *, seed: int | None = None, **changes: Any) -> nn.Module:
    """The model of a module with random weights, evaluated."""
    architecture = ARCHITECTURES.get(name) or FOR_METAL[name]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = module.ModelArgs.from_dict(_COMMON | {"model_type": name} | architecture.args | changes)
    seed = architecture.seed if seed is None else seed
    mx.random.seed(seed)  # for decays, which some models draw themselves
    return draw_weights(module.Model(args), seed, embedding=architecture.embedding)


def kinds(model: nn.Module) -> tuple[str, ...]:
    return tuple(sorted({_kind(layer) for layer in make_prompt_cache(model)}))


def _kind(layer: Any) -> str:
    if isinstance(layer, CacheList):
        return f"CacheList({', '.join(_kind(part) for part in layer.caches)})"
    return type(layer).__name__
