"""What the files of drafters say of their target is compared with the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import build
from sweeps import sweep
from trained_drafters import write_dflash, write_eagle3

import runtime
from actors.trained.drafter_files import check_named_target
from protocol.errors import ModelError


def naming(*architectures: str, name: str | None = None) -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"architectures": list(architectures), "name_or_path": name}}}


@sweep(
    ("family", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("gemma3_text", "Gemma3ForConditionalGeneration"),
        ("glm4_moe", "Glm4MoeForCausalLM"),
        # What mlx-lm does not know may be another name of what it knows.
        ("llama", "SomethingForCausalLM"),
    ],
)
def test_a_target_of_the_kind_that_is_named_is_taken(family: str, architecture: str) -> None:
    check_named_target(naming(architecture, name="org/other-name"), build(family), "the drafter")


@sweep(
    "config", [{}, {"speculators_config": None}, {"speculators_config": {"verifier": []}}, naming(), naming("Llama")]
)
def test_files_that_do_not_say_are_taken(config: dict[str, Any]) -> None:
    check_named_target(config, build("llama"), "the drafter")


@pytest.mark.parametrize("write", [write_eagle3, write_dflash])
async def test_a_target_of_another_kind_is_refused(write: Any, tmp_path: Path) -> None:
    built = build("llama")
    write(tmp_path, built, **naming("Qwen3ForCausalLM", name="Qwen/Qwen3-8B"))
    said = r"target of the kind Qwen3ForCausalLM \(Qwen/Qwen3-8B\), and this one is a llama"
    with pytest.raises(ModelError, match=said):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")


async def test_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    built = build("llama")
    authors = {"num_hidden_layers": 2, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]}}
    write_dflash(tmp_path, built)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"]
    num_layers = len(built.layers) + 2
    (tmp_path / "config.json").write_text(
        json.dumps(layer | authors | {"architectures": ["DFlashDraftModel"], "num_target_layers": num_layers})
    )
    with pytest.raises(ModelError, match="is not what its configuration says"):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")
    authors["dflash_config"]["target_layer_ids"] = [0, 1, 2]  # type: ignore[index]
    (tmp_path / "config.json").write_text(
        json.dumps(layer | authors | {"architectures": ["DFlashDraftModel"], "num_target_layers": num_layers})
    )
    said = f"made for a target with {num_layers} layers, and this one has {len(built.layers)}"
    with pytest.raises(ModelError, match=said):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")
