"""Trained drafters are recognised, and the error says what to use instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.loading import model_sources
from runtime.loading.trained_drafters import SUPPORTED, trained_drafter

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"medusa_num_heads": 4, "medusa_num_layers": 1}, "Medusa"),
    ({"model_type": "medusa"}, "Medusa"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE-3"),
    ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "EAGLE"),
    ({"architectures": ["MedusaModel"]}, "Medusa"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "EAGLE-3"),
    ({"speculators_model_type": "mlp"}, "Speculators' mlp"),
    ({"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]}, "Speculators' mtp"),
    ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, "MTP"),
    ({"model_type": "qwen3_next_mtp"}, "MTP"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}, "DFlash"),
    ({"model_type": "qwen3", "dflash_config": {}}, "DFlash"),
]


@pytest.mark.parametrize(("config", "kind"), CONFIGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_trained_drafter_is_recognised(config: dict[str, Any], kind: str) -> None:
    assert trained_drafter(config) == kind


@pytest.mark.parametrize(("config", "kind"), [(config, kind) for config, kind in CONFIGS if kind not in SUPPORTED])
async def test_one_of_another_kind_is_refused(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(runtime.ModelError) as refusal:
        async with runtime.open(runtime.DEMO_TARGET, draft=tmp_path):
            pass
    assert str(refusal.value) == (
        f"draft '{tmp_path}' is a drafter trained for its target ({kind}), which cannot be used yet; give a small "
        'language model of the same vocabulary, or "ngram"'
    )


async def test_one_that_was_downloaded_is_recognised_where_it_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle"}))
    monkeypatch.setattr(model_sources, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    usual = model_sources.load
    monkeypatch.setattr(model_sources, "load", lambda name: {}[name] if name == "org/head" else usual(name))
    with pytest.raises(runtime.ModelError, match=r"draft 'org/head' is a drafter trained for its target \(EAGLE\)"):
        async with runtime.open(runtime.DEMO_TARGET, draft="org/head"):
            pass


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": None, "model_type": 3},
        {"architectures": [None, 1], "speculators_model_type": None},
    ],
)
def test_a_language_model_is_none(config: dict[str, Any]) -> None:
    assert trained_drafter(config) is None
