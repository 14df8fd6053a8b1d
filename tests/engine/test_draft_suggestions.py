"""Suggested draft models: models on the disk with the right vocabulary and size first, then those of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from sweeps import sweep
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import runtime
from runtime.loading import drafters

FAMILIES = drafters._table("small_models")
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936}


def model(where: Path, num_bytes: int, *, word: str = "w", **config: Any) -> Path:
    """A directory that looks like a model, as far as suggestions look at it."""
    where.mkdir(parents=True)
    (where / "config.json").write_text(json.dumps(QWEN3 | config))
    (where / "model.safetensors").write_bytes(b"\0" * num_bytes)
    Tokenizer(WordLevel({f"{word}{i}": i for i in range(8)}, unk_token=f"{word}0")).save(str(where / "tokenizer.json"))
    return where


def cached(cache: Path, name: str, num_bytes: int, **config: Any) -> Path:
    """A model in Hugging Face's cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    return model(repository / "snapshots" / ("a" * 40), num_bytes, **config)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    made.mkdir()
    return made


def named(target: str | Path, cache: Path) -> list[str]:
    return [suggestion.model for suggestion in runtime.suggest_draft(target, cache_dir=cache)]


def test_models_on_the_disk_come_first_and_the_smallest_of_them_first(cache: Path) -> None:
    cached(cache, "org/large", 3000)
    cached(cache, "org/small", 900)
    cached(cache, "org/smaller", 300)
    found = runtime.suggest_draft("org/large", cache_dir=cache)
    assert [(each.model, each.num_bytes) for each in found] == [("org/smaller", 300), ("org/small", 900)]
    assert all(each.is_on_disk and each.is_checked for each in found)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        found[0].model = "another"


def test_what_does_not_fit_is_not_proposed(cache: Path) -> None:
    cached(cache, "org/large", 3000)
    cached(cache, "org/as-large", 2000)
    cached(cache, "org/other-words", 300, word="v")
    cached(cache, "org/trained", 300, speculators_model_type="eagle3")
    no_weights = cached(cache, "org/no-weights", 300)
    (no_weights / "model.safetensors").unlink()
    no_tokenizer = cached(cache, "org/no-tokenizer", 300)
    (no_tokenizer / "tokenizer.json").write_text("{")
    no_config = cached(cache, "org/no-config", 300)
    (no_config / "config.json").write_text("[]")
    assert named("org/large", cache) == []


OF_28_LAYERS = {"num_hidden_layers": 28, "hidden_size": 1024}


@sweep(
    ("sizes", "others"),
    [
        (OF_28_LAYERS, {"num_hidden_layers": 14, "hidden_size": 1024}),
        ({"n_layer": 12, "n_embd": 768}, {"n_layer": 12, "n_embd": 512}),
        ({"num_hidden_layers": 24, "d_model": 2560}, {"num_hidden_layers": 24, "d_model": 768}),
        ({"text_config": OF_28_LAYERS}, {"text_config": OF_28_LAYERS | {"num_hidden_layers": 6}}),
    ],
)
def test_a_quantised_copy_of_the_target_under_any_name_is_no_drafter(sizes: Any, others: Any, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    target = model(tmp_path / "models" / "large", 3000, **sizes)
    model(tmp_path / "models" / "mine", 400, **sizes)
    cached(cache, "org/large-4bit", 500, **sizes)
    cached(cache, "org/small", 300, **others)
    assert named(target, cache) == ["org/small"]


def test_drafters_trained_for_models_of_the_target_s_shape_come_first(cache: Path) -> None:
    cached(cache, "org/large", 3000, hidden_size=64)
    cached(cache, "org/small", 300, hidden_size=32)
    layer = {"hidden_size": 64, "vocab_size": 151_936}
    cached(cache, "org/trained", 5000, speculators_model_type="eagle3", transformer_layer_config=layer)
    cached(cache, "org/layer", 200, model_type="qwen3_5_mtp", text_config=layer)
    assistant = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64}
    cached(cache, "org/reader", 200, text_config=layer | {"hidden_size": 16}, **assistant)
    cached(cache, "org/wide", 300, speculators_model_type="eagle3", hidden_size=96)
    cached(cache, "org/other", 300, speculators_model_type="hydra", hidden_size=64)
    found = runtime.suggest_draft("org/large", cache_dir=cache)
    assert [(each.model, each.kind) for each in found] == [
        ("org/layer", "MTP"),
        ("org/reader", "Gemma 4's assistant"),
        ("org/trained", "EAGLE-3"),
        ("org/small", None),
    ]
    assert "on this disk, EAGLE-3" in found[2].described


def test_drafters_that_are_known_are_named_for_conversions_of_their_target_too(cache: Path) -> None:
    snapshot = cached(cache, "mlx-community/Qwen3.5-4B-4bit", 10)
    cached(cache, "org/Qwen3.5-4B-Something", 10)
    found = runtime.suggest_draft("mlx-community/Qwen3.5-4B-4bit", cache_dir=cache)
    known = {each.model: each for each in found if not each.is_on_disk}
    assert known["mlx-community/Qwen3.5-4B-MTP-4bit"].kind == "MTP"
    assert known["z-lab/Qwen3.5-4B-DFlash"].described.endswith(
        "(DFlash, trained for this model, 0.5B parameters, from the hub)"
    )
    assert named(snapshot, cache) == [each.model for each in found]
    assert named("org/Qwen3.5-4B-Something", cache) == []


def test_of_trained_drafters_on_the_disk_those_known_for_the_target_come_first(cache: Path) -> None:
    cached(cache, "Qwen/Qwen3-8B", 3000, hidden_size=64)
    layer = {"hidden_size": 64, "vocab_size": 151_936}
    for name in ("org/another", "z-lab/Qwen3-8B-DFlash-b16"):
        cached(cache, name, 300, architectures=["DFlashDraftModel"], transformer_layer_config=layer)
    assert named("Qwen/Qwen3-8B", cache)[:2] == ["z-lab/Qwen3-8B-DFlash-b16", "org/another"]


def test_what_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    target = model(tmp_path / "models" / "large", 3000)
    beside = model(tmp_path / "models" / "small", 300)
    half = model(tmp_path / "models" / "half", 300)
    (half / "model-00002.safetensors").symlink_to(half / "gone")
    (no_cache := tmp_path / "file").write_text("")
    assert named(target, no_cache) == [str(half), str(beside)]


def test_a_family_s_small_models_come_after_those_on_the_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A table of models that are small enough for a test.
    (family,) = [family for family in FAMILIES if "qwen3" in family["model_types"]]
    tiny = {
        name: facts | {"megabytes": size} for (name, facts), size in zip(family["models"].items(), (0, 9), strict=True)
    }
    monkeypatch.setattr(drafters, "_table", lambda name: [family | {"models": tiny}] * (name == "small_models"))
    cached(cache, "org/large", 3000)
    cached(cache, "org/small", 300)
    found = runtime.suggest_draft("org/large", cache_dir=cache)
    assert [(each.model, each.is_on_disk, each.is_checked) for each in found] == [
        ("org/small", True, True),
        (min(tiny), False, False),  # the other is larger than the target allows
    ]
    assert "on this disk" in found[0].described
    assert "from the hub" in found[1].described


@pytest.mark.parametrize(
    ("target", "error", "complaint"),
    [
        ("org/nowhere", runtime.ModelError, "is not on this disk"),
        ("not an id", runtime.ModelError, "is not on this disk"),
        ("", runtime.SettingsError, "must be a path or a hub id"),
        (7, runtime.SettingsError, "must be a path or a hub id"),
        ("x" * 5000, runtime.ModelError, "^.{,1020}is not on this disk"),
        (list(range(10**6)), runtime.SettingsError, "must be a path or a hub id, got .{,200}$"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: Any, error: type, complaint: str, cache: Path) -> None:
    with pytest.raises(error, match=complaint):
        runtime.suggest_draft(target, cache_dir=cache)


def test_the_demo_drafters_are_found_beside_the_demo_target(cache: Path) -> None:
    assert named(runtime.DEMO_TARGET, cache) == [str(runtime.DEMO_TRAINED_DRAFT), str(runtime.DEMO_DRAFT)]
