"""EAGLE-3: the logits of Speculators' torch classes (0.9.0), as `make_speculators_cases.py` wrote them."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from sweeps import sweep
from trained_drafters import expected_of

from actors.trained.depth_sequence import DepthSequence, ModulePass
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.eagle3 import Eagle3Reader, LoadedEagle3, load_eagle3, read_config
from runtime.distill.training import logits_of_steps

CASES = sorted(path for path in (Path(__file__).parent / "eagle3").iterdir() if path.is_dir())
# Steps after a position for which Speculators has given logits.
NUM_STEPS = 3


def check_steps(loaded: LoadedEagle3, features: mx.array, expected: dict[str, mx.array]) -> None:
    """Compare the logits after each position, and after those that are drafted from there, with those expected."""
    text: tuple[int, ...] = (0, *expected["tokens"].tolist())
    num_tokens, reader = len(text) - 1, Eagle3Reader(loaded)
    sequence = DepthSequence(ModulePass.each([reader]), reader.masks)
    for begin in range(num_tokens):
        sequence.give(begin, features[begin : begin + 1])
        sequence.rewind(min(sequence.length, begin + 1))
        for step in range(min(NUM_STEPS, num_tokens - begin)):
            logits = sequence.feed(text[sequence.length : begin + 2 + step], 1)
            found = logits[-1][loaded.target_ids]
            assert mx.allclose(found, expected[f"logits{step}"][begin], rtol=1e-4, atol=1e-4), (begin, step)
            assert int(mx.isfinite(logits[-1]).sum()) == 40


@sweep("case", [*CASES, *sorted((Path(__file__).parent / "peagle").iterdir())])
def test_the_logits_after_a_text_are_those_of_the_torch_classes(case: Path) -> None:
    loaded, expected = load_eagle3(DrafterFiles.read(case)), expected_of(case)
    assert loaded.model.config.num_parallel == (NUM_STEPS - 1 if case.parent.name == "peagle" else 0)
    check_steps(loaded, expected["features"], expected)


def config_of(case: Path, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((case / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value != "absent"}


def test_the_authors_files_are_read_too(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "llama")
    ours = config_of(case)
    layer = ours["transformer_layer_config"]
    rope = layer.pop("rope_parameters")
    authors = layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": ours["draft_vocab_size"],
        "rope_theta": rope["rope_theta"],
    }
    (tmp_path / "config.json").write_text(json.dumps(authors))
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    renamed["t2d"] = mx.ones((96,), mx.bool_)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    expected, loaded = expected_of(case), load_eagle3(DrafterFiles.read(tmp_path))
    check_steps(loaded, expected["features"], expected)
    # They name no layers.
    assert loaded.model.config.feature_layers_of(32) == (2, 16, 29)


def test_flags_inside_of_eagle_config_are_read(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "norms")
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    config = config_of(case)
    flags = [name for name in config if name.startswith(("norm_", "fc_norm", "eagle_aux"))]
    config["eagle_config"] = {name: config.pop(name) for name in flags}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(value is True for value in config["eagle_config"].values())
    assert load_eagle3(DrafterFiles.read(tmp_path)).model.config == load_eagle3(DrafterFiles.read(case)).model.config


@sweep(
    ("named", "entered"),
    [
        # SpecForge's and lmsys's name the layer that gives the hidden state; NVIDIA's for gpt-oss, and the paper's, the
        # one that it enters.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, (2, 18, 33)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, (2, 18, 33)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
    ],
)
def test_layers_are_those_that_the_files_origin_means(named: dict[str, Any], entered: tuple[int, ...] | None) -> None:
    layer = config_of(CASES[0])["transformer_layer_config"]
    assert read_config(layer | named).feature_layers == entered
    # Speculators always names the layer that is entered.
    if "eagle_aux_hidden_state_layer_ids" in named:
        assert read_config({"transformer_layer_config": layer} | named).feature_layers == (1, 17, 32)


def test_what_the_head_reads_is_read_without_a_projection(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "llama")
    (tmp_path / "config.json").write_text(json.dumps(config_of(case, eagle_config={"use_aux_hidden_state": False})))
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))
    projection = weights.pop("fc.weight")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    loaded = load_eagle3(DrafterFiles.read(tmp_path))
    assert loaded.model.config.feature_layers_of(7) == (7,)
    expected = expected_of(case)
    check_steps(loaded, expected["features"] @ projection.T, expected)


@sweep("case", CASES)
def test_all_steps_at_all_positions_at_once_are_those_of_the_torch_classes(case: Path) -> None:
    loaded, expected = load_eagle3(DrafterFiles.read(case)), expected_of(case)
    # Speculators fills up with the token 0.
    tokens = mx.concatenate([expected["tokens"], mx.zeros((NUM_STEPS - 1,), mx.int32)])
    given = logits_of_steps(loaded.model, expected["features"][None], loaded.embedding(tokens)[None], NUM_STEPS)
    for step, logits in enumerate(given):
        assert mx.allclose(logits[0], expected[f"logits{step}"], rtol=1e-4, atol=1e-4), step
