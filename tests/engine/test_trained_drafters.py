"""Trained drafters are recognised, and the error says what to use instead."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from completions import open_and_close
from sweeps import sweep

import runtime
from actors.trained.drafter_model import SUPPORTED
from actors.trained.kinds.recognition import kind_of, nearest_to
from runtime.loading import model_sources

CONFIGS: list[tuple[dict[str, Any], str | None]] = [
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
    ({"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 256}}, "DFlash 2"),
    (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark", "markov_rank": 8}},
        "DSpark",
    ),
    ({"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "DSpark"),
    ({"speculators_model_type": "dspark"}, "DSpark"),
    ({"speculators_model_type": "peagle"}, "P-EAGLE"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, "P-EAGLE"),
    ({"model_type": "gemma4_assistant"}, "Gemma 4's assistant"),
    ({"model_type": "gemma4_unified_assistant", "architectures": None}, "Gemma 4's assistant"),
    ({"model_type": "qwen3_5_mtp", "text_config": {"model_type": "qwen3_5_text"}}, "MTP"),
    ({"model_type": "mlp_speculator"}, "MLP speculator"),
    ({"model_type": "llama", "hydra_num_heads": 4}, "Hydra"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-3"),
    # Language models.
    ({}, None),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
    ({"architectures": None, "model_type": 3}, None),
    ({"architectures": [None, 1], "speculators_model_type": None}, None),
]


@sweep(("config", "kind"), CONFIGS)
def test_a_trained_drafter_is_told_from_a_language_model(config: dict[str, Any], kind: str | None) -> None:
    assert kind_of(config) == kind


@sweep(("config", "kind"), [(config, kind) for config, kind in CONFIGS if kind not in (*SUPPORTED, None)])
async def test_one_of_another_kind_is_refused(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(runtime.ModelError) as refusal:
        await open_and_close(runtime.DEMO_TARGET, draft=tmp_path)
    assert str(refusal.value) == (
        f"draft '{tmp_path}' is a drafter trained for its target, of the kind {kind}, which cannot be used; nearest "
        f'to it is {nearest_to(kind)}; or draft with "ngram"'
    )


class FakeHub:
    """A hub with one folder, of which only named files are given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str | None, Any]] = []  # (hub id, revision, files) of each download
        monkeypatch.setattr(model_sources, "snapshot_download", self.snapshot)

    def snapshot(self, name: str, revision: str | None = None, allow_patterns: Any = None) -> str:
        self.asked.append((name, revision, allow_patterns))
        return str(self.folder)


@pytest.mark.slow
async def test_one_on_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(runtime.DEMO_TRAINED_DRAFT, monkeypatch)
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.ModelSpec("org/head", revision="v2")) as rt:
        completion = await rt.generate("def quicksort(items):", max_tokens=12, lookahead=2)
    assert completion.statistics.proposed > 0
    config, files = hub.asked
    assert config == ("org/head", "v2", ["config.json"])
    assert files[:2] == ("org/head", "v2")
    assert "*.safetensors" in files[2]


async def test_one_of_another_kind_on_the_hub_is_refused_and_not_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle"}))
    hub = FakeHub(tmp_path, monkeypatch)
    with pytest.raises(runtime.ModelError, match=r"draft 'org/head' is a drafter .* of the kind EAGLE,"):
        await open_and_close(runtime.DEMO_TARGET, draft="org/head")
    assert hub.asked == [("org/head", None, ["config.json"])]


async def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> None:
        raise socket.gaierror("no network")

    pauses: list[float] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(runtime.ModelError, match=r"the Hugging Face hub it could not be fetched: .* no network$"):
        await open_and_close(runtime.DEMO_TARGET, draft="org/other")
    assert pauses == []
