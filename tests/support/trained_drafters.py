"""Trained drafters of every kind with random weights, and tiny targets for them."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from architectures import VOCAB_SIZE, build
from mlx.utils import tree_flatten
from models import draw_weights

from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds import dflash, eagle3, gemma4_assistant
from actors.trained.kinds.medusa import Medusa
from actors.trained.kinds.mtp import MTPReader, load_mtp
from actors.trained.kinds.target_parts import embedding_of, final_norm_of, head_of

KINDS = ("eagle3", "peagle", "medusa", "mtp", "mtp_deep", "dflash", "dspark", "dflash2", "gemma4")
BLOCK_SIZE = 5
# What the files of the kinds that go on from EAGLE-3 and DFlash say besides.
_LATER: dict[str, dict[str, Any]] = {
    "peagle": {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 5}
    | {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
    "dspark": {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "markov_head_type": "gated"}
    | {"markov_rank": 4, "sample_from_anchor": True},
    "dflash2": {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"], "conv_kernel_size": 2}
    | {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6},
}
# Families of targets, without and with layers that are recurrent, or have a sliding window.
_FAMILIES = {
    "mtp": ("mimo", "qwen3_next"),
    "mtp_deep": ("deepseek_v3_deep", "step3p5_deep"),
    "gemma4": ("gemma4_text", "gemma4"),
}
_LAYERS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_MTP_CASES = Path(__file__).parents[1] / "trained" / "mtp"


def make(
    kind: str,
    folder: Path,
    *,
    family: str | None = None,
    is_hybrid: bool = False,
    vocab_size: int = VOCAB_SIZE,
    **changes: Any,
) -> Any:
    """Write a drafter.

    Args:
        family: of its target, one of the cases of MTP's; None for one that is recurrent in part if `is_hybrid` and the
            kind allows it.
        **changes: of its configuration.

    Returns: its target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family = family or _FAMILIES.get(kind, ("llama", "lfm2"))[is_hybrid]
    if kind.startswith("mtp"):
        case = _MTP_CASES / family
        write_mtp(folder, case, vocab_size=vocab_size, **changes)
        return draw_weights(mtp_target(case, vocab_size=vocab_size), 3)
    target = build(family, vocab_size=vocab_size)
    write: Any = {"eagle3": write_eagle3, "peagle": write_eagle3, "medusa": write_medusa, "gemma4": write_gemma4}
    write.get(kind, write_dflash)(folder, target, **_LATER.get(kind, {}) | {"vocab_size": vocab_size} | changes)
    return target


def write_eagle3(
    folder: Path, target: Any, *, own_embedding: bool = True, vocab_size: int = VOCAB_SIZE, **changes: Any
) -> Path:
    """Write an EAGLE-3 drafter for a target."""
    hidden_size = target.args.hidden_size if hasattr(target.args, "hidden_size") else 32
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, len(target.layers)],
        "transformer_layer_config": {
            **_LAYERS,
            **{"model_type": "llama", "hidden_size": hidden_size, "num_hidden_layers": 1, "vocab_size": vocab_size},
        },
    } | changes
    mx.random.seed(4)
    weights = dict(tree_flatten(eagle3.Eagle3(eagle3.read_config(config)).parameters()))
    if own_embedding:
        weights["embed_tokens.weight"] = mx.random.normal((vocab_size, hidden_size))
    return _written(folder, config, "model", weights)


def write_medusa(
    folder: Path, target: Any, *, num_heads: int = 3, hidden_size: int = 32, vocab_size: int = VOCAB_SIZE
) -> Path:
    """Write Medusa's heads for a target."""
    mx.random.seed(6)
    weights = {
        name.removeprefix("heads.").replace("blocks.", "").replace("output.", "1."): value
        for name, value in tree_flatten(Medusa(num_heads, 1, hidden_size, vocab_size).parameters())
    }
    return _written(folder, {"medusa_num_heads": num_heads, "medusa_num_layers": 1}, "medusa_lm_head", weights)


def write_dflash(
    folder: Path, target: Any, *, hidden_size: int = 32, vocab_size: int = VOCAB_SIZE, **changes: Any
) -> Path:
    """Write a DFlash drafter for a target, or one of the kinds that go on from it."""
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [0, 1, len(target.layers)],
        "mask_token_id": vocab_size - 1,
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": vocab_size,
        "transformer_layer_config": {
            **_LAYERS,
            **{"hidden_size": hidden_size, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": vocab_size},
        },
    } | changes
    mx.random.seed(7)
    weights = dict(tree_flatten(dflash.DFlash(dflash.read_config(config)).parameters()))
    return _written(folder, config, "model", weights)


def write_gemma4(folder: Path, _target: Any = None, *, vocab_size: int = VOCAB_SIZE, **changes: Any) -> Path:
    """Write an assistant for the Gemma 4 among the architectures."""
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 32,
        "use_ordered_embeddings": True,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 5,
        "text_config": {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    } | changes
    mx.random.seed(8)
    model = gemma4_assistant.Gemma4Assistant(gemma4_assistant.read_config(config))
    weights = {
        name if name.startswith(("pre_", "post_", "masked_")) else f"model.{name}": value
        for name, value in tree_flatten(model.parameters())
    }
    if config["use_ordered_embeddings"]:
        weights["masked_embedding.token_ordering"] = mx.random.permutation(vocab_size)
    return _written(folder, config, "model", weights)


def expected_of(case: Path) -> dict[str, mx.array]:
    """What a case of `tests/trained` expects, by name."""
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))
    return expected


def close(found: mx.array, expected: mx.array) -> bool:
    """Whether logits are the same, those of ids that the drafter lacks included."""
    return bool(mx.all((found == expected) | (mx.abs(found - expected) < 1e-4 * (1 + mx.abs(expected)))))


def dflash_reader(case: Path) -> dflash.DFlashReader:
    """The drafter of a case, with the embedding and, unless it has its own, the head of the case's target."""
    expected = expected_of(case)
    model, target_ids = dflash.load_dflash(DrafterFiles.read(case))
    own_head = None if target_ids is None else model.lm_head
    return dflash.DFlashReader(
        model,
        target_ids,
        expected["embedding"].shape[0],
        lambda tokens: expected["embedding"][tokens],
        own_head or (lambda hidden: hidden @ expected["head"].T),
    )


def mtp_target(case: Path, **changes: Any) -> Any:
    """A target of the family of a case, with random weights that are not evaluated."""
    config = json.loads((case / "config.json").read_text()) | changes
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def mtp_target_of(case: Path) -> Any:
    """A target of the family, with the embedding, final norm and head of the case; its layers are random."""
    target = mtp_target(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))
    shared = {
        name: value
        for name, value in weights.items()
        if name.split(".")[1] in ("embed_tokens", "embeddings", "norm", "norm_f", "weight")
    }
    if case.name.startswith(("qwen", "step")):
        shared["model.norm.weight"] = shared["model.norm.weight"] + 1
    whole = "language_model." if case.name.startswith("qwen3_5") else ""
    target.load_weights([(whole + name, value) for name, value in shared.items()], strict=False)
    mx.eval(target.parameters())
    return target


def mtp_readers(folder: Path, target: Any) -> list[MTPReader]:
    """The layers in a folder, with the parts of their target."""
    named = "the drafter"
    parts = final_norm_of(target, named), embedding_of(target, named), head_of(target, named)
    return [MTPReader(layer, *parts, 48) for layer in load_mtp(DrafterFiles.read(folder), target).depths]


def write_mtp(folder: Path, case: Path, weights: dict[str, mx.array] | None = None, **changes: Any) -> Path:
    """A folder with the MTP layer of a case alone, as a drafter."""
    folder.mkdir(exist_ok=True)
    config = json.loads((case / "config.json").read_text()) | {"model_type": f"{case.name}_mtp"} | changes
    (folder / "config.json").write_text(json.dumps(config))
    if weights is None:
        shutil.copy(case / "model.safetensors", folder)
    else:
        mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    return folder


def _written(folder: Path, config: dict[str, Any], name: str, weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / f"{name}.safetensors"), weights)
    return folder
