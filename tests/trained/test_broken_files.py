"""Drafters in files that are broken, or of another target: the sentence says what is wrong and names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import VOCAB_SIZE, build
from sweeps import sweep
from trained_drafters import KINDS, make

from actors.trained.drafter_files import check_named_target
from actors.trained.drafter_model import TrainedDrafter
from protocol.errors import ModelError

Weights = dict[str, mx.array]
# Changes a folder's configuration and weights.
Break = Callable[[dict[str, Any], Weights], None]


def without(*names: str) -> Break:
    def change(config: dict[str, Any], weights: Weights) -> None:
        for name in names:
            del weights[name]

    return change


def as_well(name: str, value: mx.array) -> Break:
    def change(config: dict[str, Any], weights: Weights) -> None:
        weights[name] = value

    return change


def settings(inside: str | None = None, **changes: Any) -> Break:
    def change(config: dict[str, Any], weights: Weights) -> None:
        (config if inside is None else config.setdefault(inside, {})).update(changes)

    return change


def without_settings(*path: str) -> Break:
    def change(config: dict[str, Any], weights: Weights) -> None:
        *inside, name = path
        for outer in inside:
            config = config[outer]
        del config[name]

    return change


def both(*changes: Break) -> Break:
    def change(config: dict[str, Any], weights: Weights) -> None:
        for each in changes:
            each(config, weights)

    return change


LAYER = "transformer_layer_config"
ORDERING = "masked_embedding.token_ordering"
MADE_FOR_ANOTHER = "it was made for another one"
BROKEN: list[tuple[str, Break, str]] = [
    ("eagle3", without("fc.weight"), "it has no fc.weight"),
    ("eagle3", without("norm.weight", "hidden_norm.weight"), "it has no hidden_norm.weight, norm.weight"),
    ("eagle3", as_well("layers.1.norm.weight", mx.ones(4)), "it has layers.1.norm.weight as well"),
    ("eagle3", as_well("norm.weight", mx.ones(4)), r"norm.weight is \(4,\), and should be \(32,\)"),
    (
        "eagle3",
        both(settings(quantization_config={"quant_method": "fp8"}), as_well("fc.weight_scale", mx.ones(1))),
        r"quantised in a way that MLX does not have \(fp8\)",
    ),
    ("eagle3", as_well("fc.scales", mx.ones((32, 5))), "in which MLX quantises nothing"),
    ("eagle3", settings(LAYER, model_type="mamba"), "layers of the kind 'mamba' is not supported"),
    ("eagle3", settings(LAYER, layer_types=["sliding_attention"]), "sliding windows"),
    ("eagle3", settings(eagle_aux_hidden_state_layer_ids=[0, 1, 90]), MADE_FOR_ANOTHER),
    ("eagle3", settings(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]), MADE_FOR_ANOTHER),
    ("eagle3", settings(eagle_aux_hidden_state_layer_ids=[2, 2, 3]), MADE_FOR_ANOTHER),
    ("eagle3", settings(target_hidden_size=64), "is not what its configuration says: fc.weight is"),
    ("eagle3", settings(eagle_aux_hidden_state_layer_ids=[0, 1]), "is not what its configuration says"),
    ("eagle3", settings(transformer_layer_config={"model_type": "llama"}), "has no 'hidden_size'"),
    ("eagle3", settings(draft_vocab_size=7), "has 7 tokens and its target 64, but nothing .* which is which"),
    (
        "eagle3",
        both(settings(draft_vocab_size=41), as_well("d2t", mx.zeros(40, mx.int64))),
        "has 41 tokens, and d2t says for 40 which they are",
    ),
    (
        "eagle3",
        settings(eagle_config={"use_aux_hidden_state": False}, target_hidden_size=64),
        "the two must be the same",
    ),
    ("eagle3", settings(eagle_config={"norm_before_fc": True, "fc_norm": True}), "which exclude each other"),
    ("eagle3", without_settings(LAYER, "rms_norm_eps"), "configuration cannot be read: .* 'rms_norm_eps'"),
    ("peagle", without("mask_hidden"), "it has no mask_hidden"),
    ("peagle", settings(mask_token_id=None), "must say which token its mask is"),
    ("peagle", settings(mask_token_id=64), "made for a target with 65 tokens, and this one has 64"),
    (
        "peagle",
        settings("speculators_config", proposal_methods=[{"speculative_tokens": 1}]),
        "2 tokens or more .*got 1",
    ),
    ("medusa", without("0.1.weight"), "has no output"),
    ("medusa", settings(medusa_num_heads=9), "asks for 9 heads of 1 blocks, and the weights have 3 of 1"),
    ("medusa", settings(medusa_num_layers=2), "asks for 3 heads of 2 blocks, and the weights have 3 of 1"),
    ("mtp", without("model.mtp_layers.0.input_proj.weight"), "no weights of an MTP layer .* many conversions"),
    ("mtp", without("model.mtp_layers.0.self_attn.o_proj.weight"), r"says: it has no layers\.0\.self_attn\.o_proj"),
    (
        "mtp",
        as_well("model.mtp_layers.0.hidden_layernorm.weight", mx.zeros(16)),
        "width of 16, and those of this target have 32",
    ),
    ("mtp", settings(hidden_size=64), "made for a target with hidden_size 64, and this one has 32"),
    ("mtp", settings(model_type="qwen3_next_mtp"), "made for a qwen3_next target, and this one is a mimo"),
    ("dflash", without("hidden_norm.weight"), "it has no hidden_norm.weight"),
    ("dflash", settings(block_size=1), "must have 2 tokens or more, got 1"),
    ("dflash", settings(mask_token_id=1000), "made for a target with 1001 tokens"),
    ("dflash", settings(mask_token_id=None), "cannot be read"),
    ("dflash", without_settings("mask_token_id"), "has no 'mask_token_id'"),
    ("dflash", settings(aux_hidden_state_layer_ids=[1, 2]), "is not what its configuration says"),
    ("dflash", settings(draft_vocab_size=40), "which is which"),
    (
        "dflash",
        both(settings(draft_vocab_size=40), as_well("d2t", mx.full(40, 60))),
        "names ids that its target, with 64, does not have",
    ),
    ("dflash", settings(LAYER, hidden_act="gelu"), "activation 'gelu'"),
    ("dflash", settings(LAYER, rope_parameters={"full_attention": {"rope_theta": 1e6}}), "different rotary embeddings"),
    ("mtp_deep", without("model.layers.3.enorm.weight"), "it has no embedding_norm.weight"),
    ("dspark", without("confidence_head.proj.bias"), "it has no confidence_head.proj.bias"),
    ("dspark", settings(confidence_head_with_markov=False), r"proj.weight is \(1, 36\), and should be \(1, 32\)"),
    ("dspark", settings(markov_head_type="ngram"), "a markov_head_type of 'ngram' is not supported"),
    ("dspark", without("markov_head.gate_proj.bias"), "it has no markov_head.gate_proj.bias"),
    ("dflash2", settings(selector_rank=16), r"predecessor_codebook.weight is \(64, 4\), and should be \(64, 16\)"),
    ("dflash2", settings(speculators_model_type="hydra", architectures=[]), "but Hydra"),
    ("dflash2", settings(selector_rank=None), "configuration cannot be read: int"),
    ("gemma4", without("pre_projection.weight"), "it has no pre_projection.weight"),
    (
        "gemma4",
        settings("text_config", num_hidden_layers=1),
        "it has layers.1.input_layernorm.weight, .* 7 more as well",
    ),
    ("gemma4", settings(text_config=None), "configuration cannot be read: unsupported operand"),
    ("gemma4", settings(num_centroids=7), "chooses 5 of 7 groups of its 64 tokens; groups must be of one size"),
    ("gemma4", as_well(ORDERING, mx.zeros(64)), f"{ORDERING} of draft .* does not name each token once"),
]


@sweep(("kind", "change", "said"), BROKEN)
def test_what_is_wrong_is_said(kind: str, change: Break, said: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path, vocab_size=VOCAB_SIZE)
    config = json.loads((tmp_path / "config.json").read_text())
    [file] = tmp_path.glob("*.safetensors")
    weights: Weights = mx.load(str(file))
    mx.eval(weights)
    change(config, weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(file), weights)
    with pytest.raises(ModelError, match=said) as refusal:
        TrainedDrafter(tmp_path, target, VOCAB_SIZE, "draft 'org/head'")
    assert "do not fit" not in str(refusal.value)


@sweep("content", ["", "[]", "{", '"mtp"', '{"model_type": "qwen3"}'])
def test_an_invalid_configuration_is_named(content: str, tmp_path: Path) -> None:
    target = make("eagle3", tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"draft 'org/head'.* (cannot be read|no trained drafter)"):
        TrainedDrafter(tmp_path, target, VOCAB_SIZE, "draft 'org/head'")


@sweep("kind", KINDS)
def test_missing_files_are_named(kind: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path)
    for pattern, said in (("*.safetensors", "there are no weights"), ("config.json", "cannot be read")):
        for file in tmp_path.glob(pattern):
            file.unlink()
        with pytest.raises(ModelError, match=f"draft 'org/head'.*{said}|{said}.*draft 'org/head'"):
            TrainedDrafter(tmp_path, target, VOCAB_SIZE, "draft 'org/head'")


# --- of another target ----------------------------------------------------------------------------


def naming(*architectures: str, name: str | None = None) -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"architectures": list(architectures), "name_or_path": name}}}


@sweep(
    ("family", "config"),
    [
        ("llama", naming("LlamaForCausalLM", name="org/other-name")),
        ("qwen3_next", naming("Qwen3NextForCausalLM")),
        ("gemma3_text", naming("Gemma3ForConditionalGeneration")),
        ("glm4_moe", naming("Glm4MoeForCausalLM")),
        # What mlx-lm does not know may be another name of what it knows.
        ("llama", naming("SomethingForCausalLM")),
        # Files that do not say.
        ("llama", {}),
        ("llama", {"speculators_config": None}),
        ("llama", {"speculators_config": {"verifier": []}}),
        ("llama", naming()),
        ("llama", naming("Llama")),
    ],
)
def test_a_target_of_the_kind_that_is_named_is_taken(family: str, config: dict[str, Any]) -> None:
    check_named_target(config, build(family), "the drafter")


NARROWER = "reads hidden states of a width of 48, and those of this target have 32"
WIDER = "made for a target with 65 tokens, and this one has 64"


@sweep(
    ("kind", "changes", "of_target", "said"),
    [
        (
            "eagle3",
            naming("Qwen3ForCausalLM", name="Qwen/Qwen3-8B"),
            {},
            r"target of the kind Qwen3ForCausalLM \(Qwen/Qwen3-8B\), and this one is a llama",
        ),
        ("eagle3", {"target_hidden_size": 48}, {}, NARROWER),
        ("medusa", {"hidden_size": 48}, {}, NARROWER),
        ("medusa", {"vocab_size": 65}, {}, WIDER),
        ("dflash", {"hidden_size": 48}, {}, NARROWER),
        ("dflash", {"vocab_size": 65}, {}, WIDER),
        ("dflash", {"aux_hidden_state_layer_ids": [0, 1, 9]}, {}, MADE_FOR_ANOTHER),
        ("mtp", {"vocab_size": 65}, {}, "made for a target with vocab_size 65, and this one has 64"),
        ("mtp", {}, {"name": "llama"}, "those of llama targets are not supported"),
        ("mtp_deep", {"family": "step3p5_deep"}, {}, "the embedding of draft .* has 48 ids, and its target 64"),
        ("gemma4", {}, {"name": "llama"}, "keys and values of a gemma4_text target, and this one is a llama"),
        ("gemma4", {}, {"hidden_size": 48}, "of a width of 32, and those of this target have 48"),
        ("gemma4", {}, {"vocab_size": 48}, "made for a target with 64 tokens, and this one has 48"),
        ("gemma4", {}, {"head_dim": 16}, "has 4 heads of a width of 8 .* target's 2 of 16; it was made for another"),
        ("gemma4", {}, {"layer_types": ["full_attention"] * 4}, "keys of a layer with sliding_attention, and this"),
    ],
)
def test_another_target_is_refused_with_what_differs(kind, changes, of_target, said, tmp_path):
    target = make(kind, tmp_path / "its", family=changes.get("family"))
    if of_target:
        target = build(**{"name": "gemma4_text"} | of_target)
    make(kind, tmp_path / "other", **changes)
    with pytest.raises(ModelError, match=said):
        TrainedDrafter(tmp_path / "other", target, of_target.get("vocab_size", VOCAB_SIZE), "draft 'org/head'")


def test_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    target = make("dflash", tmp_path)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    num_layers = len(target.layers) + 2
    for read, said in (
        ([0, 1], "is not what its configuration says"),
        ([0, 1, 2], f"made for a target with {num_layers} layers, and this one has {len(target.layers)}"),
    ):
        authors = {"num_hidden_layers": 2, "dflash_config": {"mask_token_id": 1, "target_layer_ids": read}}
        of_target = {"architectures": ["DFlashDraftModel"], "num_target_layers": num_layers}
        (tmp_path / "config.json").write_text(json.dumps(layer | authors | of_target))
        with pytest.raises(ModelError, match=said):
            TrainedDrafter(tmp_path, target, VOCAB_SIZE)
