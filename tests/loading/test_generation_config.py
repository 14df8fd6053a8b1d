"""The sampling settings that a model brings in its generation_config.json."""

import json
from pathlib import Path
from typing import Any

from command_line import ran
from models import llama, save
from sweeps import sweep

import runtime
from runtime.loading.model_files import defaults_message, sampling_defaults


@sweep(
    ("file", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "eos_token_id": 1}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.05}, {"temperature": 0.7, "min_p": 0.05}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05, "repetition_context_size": None}),
        ({"repetition_penalty": 1.0, "max_new_tokens": 9}, {}),
        ({"temperature": None, "top_p": "0.9", "top_k": -1, "min_p": 7}, {}),
        ([], {}),
    ],
)
def test_settings_that_change_something_are_taken(file: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert sampling_defaults(tmp_path) == expected


def test_without_a_readable_file_there_are_none(tmp_path: Path) -> None:
    assert sampling_defaults(None) == sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_defaults(tmp_path) == {}


def recommending(folder: Path, **settings: Any) -> str:
    """A model that recommends settings."""
    model = save(folder / "model", llama())
    (folder / "model" / "generation_config.json").write_text(json.dumps(settings))
    return model


async def test_only_who_asks_for_them_gets_them_and_settings_of_ones_own_win(tmp_path: Path) -> None:
    model = recommending(tmp_path, do_sample=True, temperature=0.9, top_p=0.5)
    async with runtime.open(model) as rt:
        assert (rt.model_defaults, rt.defaults) == ({}, {})
    async with runtime.open(model, generation_config="auto", defaults={"top_p": 0.8}) as rt:
        assert rt.model_defaults == {"temperature": 0.9, "top_p": 0.5}
        assert rt.defaults == {"temperature": 0.9, "top_p": 0.8}
        settings = rt.check_settings({"temperature": 0.0})
        assert (settings.temperature, settings.top_p) == (0.0, 0.8)
        assert defaults_message("m", rt.model_defaults, {"top_p"}) == (
            "m: its generation_config.json sets temperature 0.9 (--generation-config none ignores it)"
        )


def test_a_command_says_once_what_the_model_sets(tmp_path: Path, capfd: Any) -> None:
    model = recommending(tmp_path, temperature=0.9)
    asked = ("generate", "w1 w2", "--target", model, "--max-tokens", "4", "--seed", "7")
    sampled = ran(capfd, *asked)
    assert sampled.err.count("generation_config.json sets temperature 0.9") == 1
    assert sampled.out == ran(capfd, *asked, "--temperature", "0.9").out
    greedy = ran(capfd, *asked, "--generation-config", "none")
    assert "generation_config" not in greedy.err
    assert greedy.out == ran(capfd, *asked, "--temperature", "0").out
