"""MTP layers: the logits of transformers' decoder layers in torch, as `make_mtp_cases.py` wrote them; their texts."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from completions import open_and_close
from drafted_runtime import check_greedy
from mlx.utils import tree_flatten
from models import draw_weights, save
from sweeps import sweep
from trained_drafters import expected_of, mtp_readers, mtp_target_of, write_mtp

import runtime
from actors.mlx.model import is_quantized
from actors.trained.depth_sequence import DepthSequence, ModulePass
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.mtp import MTPLayers, names_a_layer
from actors.trained.kinds.mtp import load_mtp as load_files
from protocol.errors import ModelError

CASES = sorted(path for path in (Path(__file__).parent / "mtp").iterdir() if path.is_dir())


def load_mtp(folder: Path, target: Any) -> MTPLayers:
    return load_files(DrafterFiles.read(folder), target)


@sweep("case", CASES)
def test_the_logits_are_those_of_the_torch_layers_alone_or_in_a_chain(case: Path) -> None:
    readers, expected = mtp_readers(case, mtp_target_of(case)), expected_of(case)
    num_steps, num_tokens, _ = expected["logits"].shape
    assert num_steps == 2 + len(readers)
    tokens: tuple[int, ...] = (0, *expected["tokens"].tolist())
    sequence = DepthSequence(ModulePass.each(readers))
    for begin in range(num_tokens):
        sequence.give(begin, expected["features"][begin : begin + 1])
        # What was drafted after the features before is right: the layers have read of it what they need.
        sequence.rewind(min(sequence.length, begin + 1))
        for step in range(num_steps):
            logits = sequence.feed(tokens[sequence.length : begin + 2 + step], 1)
            assert logits is not None
            assert sequence.staleness == step
            assert mx.allclose(logits[-1], expected["logits"][step, begin], rtol=1e-4, atol=1e-4), (begin, step)
            sequence.check(begin + 2 + step)


def case_of(name: str) -> Path:
    return next(case for case in CASES if case.name == name)


# What mlx-vlm calls the parts of a layer in a folder of its own, without the beginning of the names.
QWEN = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "output_norm": "norm",
    "layers": "layers",
}
FLAT = {
    "glm4_moe_lite": {
        "embedding_norm": "model.enorm",
        "hidden_norm": "model.hnorm",
        "projection": "model.eh_proj",
        "output_norm": "model.shared_head_norm",
        "layers.0": "model.mtp_block",
        "embedding": "model.embed_tokens",
        "head": "lm_head",
    },
    "nemotron_h": {
        "embedding_norm": "layers.0.enorm",
        "hidden_norm": "layers.0.hnorm",
        "projection": "layers.0.eh_proj",
        "output_norm": "layers.1.final_layernorm",
        "layers": "layers",
    },
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
}


def flat(name: str, target: Any, before: str = "") -> dict[str, mx.array]:
    """The weights of a case as mlx-vlm writes them: norms have their one, experts are in one array."""
    [layer] = load_mtp(case_of(name), target).depths
    parameters = tree_flatten(layer.parameters())
    parts = FLAT[name].items()
    return {
        before + key.replace(ours, theirs, 1): value
        for key, value in parameters
        for ours, theirs in parts
        if key.startswith(f"{ours}.")
    }


@sweep(
    ("name", "before", "metadata"),
    [
        *((name, "", {"format": "mlx"}) for name in FLAT),
        # Saved again by somebody who left out what stands at the beginning.
        ("qwen3_5", "", {}),
        ("qwen3_5_moe", "mtp.", {}),
        # The names of the original, converted.
        ("qwen3_next", "mtp.", {"format": "mlx"}),
        ("qwen3_5", "language_model.mtp.", {"format": "mlx"}),
    ],
)
def test_a_folder_of_its_own_is_read_as_mlx_vlm_writes_it(name, before, metadata, tmp_path):
    case, target = case_of(name), mtp_target_of(case_of(name))
    inner = json.loads((case / "config.json").read_text())
    model_type = "qwen3_5_mtp" if name.startswith("qwen") else f"{name}_mtp"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "text_config": inner, "block_size": 3, "tie_word_embeddings": False})
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), flat(name, target, before), metadata)
    read = dict(tree_flatten(load_mtp(tmp_path, target).parameters()))
    expected = dict(tree_flatten(load_mtp(case, target).parameters()))
    assert read.keys() == expected.keys()
    for key, value in expected.items():
        assert mx.array_equal(read[key], value), key


def test_experts_one_by_one_are_read_where_the_class_expects_them_together(tmp_path: Path) -> None:
    case = case_of("qwen3_5_moe")
    target = mtp_target_of(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))
    before = "mtp.layers.0.mlp.experts."
    gate_up, down = weights.pop(before + "gate_up_proj"), weights.pop(before + "down_proj")
    for expert in range(gate_up.shape[0]):
        gate, up = mx.split(gate_up[expert], 2)
        weights |= {
            f"{before}{expert}.gate_proj.weight": gate,
            f"{before}{expert}.up_proj.weight": up,
            f"{before}{expert}.down_proj.weight": down[expert],
        }
    read = dict(tree_flatten(load_mtp(write_mtp(tmp_path, case, weights), target).parameters()))
    for name, value in tree_flatten(load_mtp(case, target).parameters()):
        assert mx.array_equal(read[name], value), name


@sweep(
    ("name", "first", "second"),
    [("mimo", "model.mtp_layers.0.", "model.mtp_layers.1."), ("qwen3_5", "mtp.layers.0.", "mtp.layers.1.")],
)
def test_further_layers_that_nobody_chains_are_left_out_or_refused(name, first, second, tmp_path):
    case = case_of(name)
    target = mtp_target_of(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))
    more = {key.replace(first, second): value for key, value in weights.items() if key.startswith(first)}
    folder = write_mtp(tmp_path, case, weights | more)
    if name == "mimo":
        assert len(load_mtp(folder, target).depths) == 1
    else:
        with pytest.raises(ModelError, match=r"has 2 layers behind one projection, .* one with 1 is supported"):
            load_mtp(folder, target)


# --- a runtime ------------------------------------------------------------------------------------


async def test_open_takes_the_layer_in_the_targets_own_files(tmp_path: Path) -> None:
    case = case_of("mimo")
    target = draw_weights(mtp_target_of(case), 3)
    folder = Path(save(tmp_path / "target", target))
    shutil.copy(case / "model.safetensors", folder / "mtp.safetensors")
    async with runtime.open(folder, "mtp") as rt:
        await check_greedy(rt, target, [2])
        await rt.detach_draft()
        await rt.attach_draft(runtime.ModelSpec("mtp", quantize={"bits": 8, "group_size": 32}))
        assert is_quantized(rt._draft.model.module)
        await check_greedy(rt, target, [2])
    with pytest.raises(runtime.SettingsError, match="leave out all but revision and quantize"):
        await open_and_close(folder, runtime.ModelSpec("mtp", adapter_path="adapter"))


@sweep("case", CASES)
def test_a_layer_is_found_by_the_names_of_weights(case: Path) -> None:
    names = list(mx.load(str(case / "model.safetensors")))
    family = case.name.removesuffix("_deep")
    assert names_a_layer(names, family)
    assert not names_a_layer(names, "llama")
    assert not names_a_layer((name for name, _ in tree_flatten(mtp_target_of(case).parameters())), family)


async def test_a_target_without_files_has_no_layer_in_them() -> None:
    with pytest.raises(ModelError, match="the target was given as a model; give the folder"):
        await open_and_close((mtp_target_of(case_of("mimo")), None), "mtp")
