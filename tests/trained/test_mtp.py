"""MTP layers: the logits of transformers' decoder layers in torch, as `make_mtp_cases.py` wrote them; their texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import build
from drafted_runtime import check_greedy, check_reuse, check_seeded, drafted, features_of, fresh_proposals
from mlx.utils import tree_flatten
from models import draw_weights, save
from sweeps import sweep
from trained_drafters import mtp_target, write_mtp

import runtime
from actors.trained.kinds.mtp import MTPReader, is_mtp, load_mtp
from actors.trained.kinds.target_parts import embedding_of, final_norm_of, head_of
from protocol.errors import ModelError

CASES = sorted(path for path in (Path(__file__).parent / "mtp").iterdir() if path.is_dir())
VOCAB_SIZE = 48


def target_of(case: Path) -> Any:
    """A target of the family, with the embedding, final norm and head of the case; its layers are random."""
    target = mtp_target(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))  # type: ignore[assignment]
    shared = {
        name: value for name, value in weights.items() if name.split(".")[1] in ("embed_tokens", "norm", "weight")
    }
    if case.name.startswith("qwen"):
        shared["model.norm.weight"] = shared["model.norm.weight"] + 1
    whole = "language_model." if case.name.startswith("qwen3_5") else ""
    target.load_weights([(whole + name, value) for name, value in shared.items()], strict=False)
    mx.eval(target.parameters())
    return target


def reader_of(folder: Path, target: Any) -> MTPReader:
    named = "the drafter"
    model = load_mtp(folder, target, named)
    return MTPReader(
        model, final_norm_of(target, named), embedding_of(target, named), head_of(target, named), VOCAB_SIZE
    )


@sweep("case", CASES)
def test_the_logits_are_those_of_the_torch_layers(case: Path) -> None:
    reader = reader_of(case, target_of(case))
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))  # type: ignore[assignment]
    num_steps, num_tokens, _ = expected["logits"].shape
    tokens = expected["tokens"]
    for begin in range(num_tokens):
        cache = reader.make_cache()
        hidden = reader.project(expected["features"][: begin + 1])
        hidden, logits = reader.read(hidden, tokens[: begin + 1], cache)
        for step in range(num_steps):
            assert mx.allclose(logits[-1], expected["logits"][step, begin], rtol=1e-4, atol=1e-4), (begin, step)
            hidden, logits = reader.read(hidden[-1:], tokens[begin + 1 + step : begin + 2 + step], cache)


def case_of(name: str) -> Path:
    return next(case for case in CASES if case.name == name)


def test_weights_that_mlx_lm_has_converted_are_read_too(tmp_path: Path) -> None:
    case = case_of("qwen3_next")
    target = target_of(case)
    model = load_mtp(case, target, "the drafter")
    names = {
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "projection": "mtp.fc",
        "output_norm": "mtp.norm",
        "layer": "mtp.layers.0",
    }
    converted = {
        name.replace(first, names[first], 1): value
        for name, value in tree_flatten(model.parameters())
        if (first := name.split(".")[0])
    }
    write_mtp(tmp_path, case, {})
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), converted, {"format": "mlx"})
    read = dict(tree_flatten(load_mtp(tmp_path, target, "the drafter").parameters()))
    for name, value in tree_flatten(model.parameters()):
        assert mx.array_equal(read[name], value), name


def test_experts_one_by_one_are_read_where_the_class_expects_them_together(tmp_path: Path) -> None:
    case = case_of("qwen3_5_moe")
    target = target_of(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))  # type: ignore[assignment]
    before = "mtp.layers.0.mlp.experts."
    gate_up, down = weights.pop(before + "gate_up_proj"), weights.pop(before + "down_proj")
    for expert in range(gate_up.shape[0]):
        gate, up = mx.split(gate_up[expert], 2)
        weights |= {
            f"{before}{expert}.gate_proj.weight": gate,
            f"{before}{expert}.up_proj.weight": up,
            f"{before}{expert}.down_proj.weight": down[expert],
        }
    read = dict(tree_flatten(load_mtp(write_mtp(tmp_path, case, weights), target, "the drafter").parameters()))
    for name, value in tree_flatten(load_mtp(case, target, "the drafter").parameters()):
        assert mx.array_equal(read[name], value), name


def test_it_is_recognised_by_its_configuration() -> None:
    assert is_mtp({"model_type": "deepseek_mtp"})
    assert is_mtp({"architectures": ["Qwen3NextMTP"]})
    assert not is_mtp({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "glm4_moe_mtp"}, "made for a glm4_moe target, and this one is a mimo"),
        ({"hidden_size": 64}, "made for a target with hidden_size 64, and this one has 32"),
        ({"vocab_size": 49}, "made for a target with vocab_size 49, and this one has 48"),
    ],
)
async def test_another_target_is_refused_with_what_differs(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    case = case_of("mimo")
    folder = write_mtp(tmp_path, case, **changes)
    with pytest.raises(ModelError, match=said):
        async with runtime.open((target_of(case), None), folder):
            raise AssertionError("should not be reached")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    case = case_of("mimo")
    target = target_of(case)
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))  # type: ignore[assignment]
    projection = "model.mtp_layers.0.input_proj.weight"
    with pytest.raises(ModelError, match="width of 16, and those of this target have 32"):
        load_mtp(write_mtp(tmp_path, case, weights | {projection: mx.zeros((16, 32))}), target, "the drafter")
    del weights["model.mtp_layers.0.self_attn.o_proj.weight"]
    with pytest.raises(ModelError, match=r"do not fit its target: Missing 1 parameters: \s*layer\.self_attn\.o_proj"):
        load_mtp(write_mtp(tmp_path, case, weights), target, "the drafter")
    with pytest.raises(ModelError, match="conversions to MLX drop them"):
        load_mtp(write_mtp(tmp_path, case, {"model.norm.weight": mx.ones(32)}), target, "the drafter")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_mtp(tmp_path, target, "the drafter")
    with pytest.raises(ModelError, match="those of llama targets are not supported"):
        load_mtp(case, build("llama"), "the drafter")


# --- a runtime ------------------------------------------------------------------------------------


@sweep(("name", "lookahead"), [("deepseek_v3", 2), ("mimo", 3), ("qwen3_5_moe", 1), ("qwen3_next", "auto")])
async def test_greedy_texts_are_the_targets(name: str, lookahead: Any, tmp_path: Path) -> None:
    case = case_of(name)
    target = draw_weights(target_of(case), 3)
    async with drafted(write_mtp(tmp_path, case), target) as rt:
        await check_greedy(rt, target, lookahead)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
async def test_seeded_texts_are_those_without_a_drafter(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    target = draw_weights(target_of(case), 3)
    async with drafted(write_mtp(tmp_path, case), target, max_batch=8) as rt:
        await check_seeded(rt, lookahead=2)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
async def test_a_text_may_go_on_from_an_earlier_one(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    target = draw_weights(target_of(case), 3)
    async with drafted(write_mtp(tmp_path, case), target) as rt:
        await check_reuse(rt, target)


async def test_open_takes_the_layer_in_the_targets_own_files(tmp_path: Path) -> None:
    case = case_of("mimo")
    target = draw_weights(target_of(case), 3)
    folder = Path(save(tmp_path / "target", target))
    shutil.copy(case / "model.safetensors", folder / "mtp.safetensors")
    async with runtime.open(folder, "mtp") as rt:
        await check_greedy(rt, target, 2)
        await rt.detach_draft()
        await rt.attach_draft("mtp")
        await check_greedy(rt, target, 2)


async def test_a_target_without_files_has_no_layer_in_them() -> None:
    with pytest.raises(ModelError, match="the target was given as a model; give the folder"):
        async with runtime.open((target_of(case_of("mimo")), None), "mtp"):
            raise AssertionError("should not be reached")


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
async def test_what_is_drafted_after_a_miss_follows_from_the_targets_features(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    target = draw_weights(target_of(case), 3)
    text, proposals = await fresh_proposals(write_mtp(tmp_path, case), target, lookahead=3)
    features, reader = features_of(target, text), reader_of(case, target)
    for position, tokens in proposals:
        cache = reader.make_cache()
        hidden = reader.project(features[: position - 1])
        hidden, logits = reader.read(hidden, mx.array(text[1:position]), cache)
        for token in tokens:
            assert token == mx.argmax(logits[-1]).item()
            hidden, logits = reader.read(hidden[-1:], mx.array([token]), cache)
