"""Flags of mlx-lm's commands: `outrider generate` prints the text that `mlx_lm.generate` prints."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from command_line import ran
from mlx_lm import cache_prompt
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import llama, save

# The package has a function of this name, too.
generate_of_mlx_lm: Any = importlib.import_module("mlx_lm.generate")

# In words of the tiny model's vocabulary.
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w7', 'user': 'w8', 'assistant': 'w9'}[m.role] }} {{ m.content }} w6 "
    "{% endfor %}{% if add_generation_prompt %}w9 {{ word }}{% endif %}"
)
PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a chat template, for both programs."""
    where = Path(save(tmp_path_factory.mktemp("models") / "model", llama()))
    (where / "chat_template.jinja").write_text(TEMPLATE)
    return str(where)


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter with an effect."""
    where, lora = tmp_path_factory.mktemp("adapter"), {"rank": 2, "scale": 20.0, "dropout": 0.0}
    built = mlx_lm.load(model)[0]
    built.freeze()
    linear_to_lora_layers(built, 2, lora)
    weights = dict(mlx_lm.utils.tree_flatten(built.trainable_parameters()))
    noise = {
        name: weight + 0.2 * mx.random.normal(weight.shape, key=mx.random.key(3)) for name, weight in weights.items()
    }
    mx.save_safetensors(str(where / "adapters.safetensors"), noise)
    (where / "adapter_config.json").write_text(json.dumps({"num_layers": 2, "lora_parameters": lora}))
    return str(where)


def of_mlx_lm(command: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any, *arguments: str) -> str:
    """What a command of mlx-lm prints."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["mlx_lm", *arguments])
        command.main()
    return str(capfd.readouterr().out).strip()


def ours(capfd: Any, *arguments: str) -> str:
    here = [RENAMED.get(argument, argument) for argument in arguments]
    return str(ran(capfd, "generate", *here).out).strip()


# Flags of mlx-lm's that have another name here.
RENAMED = {
    "--model": "--target",
    "--temp": "--temperature",
    "--system-prompt": "--system",
    "--chat-template-config": "--chat-template-args",
    "--ignore-chat-template": "--raw",
}

CASES = {
    "a message": [],
    "a system message": ["--system-prompt", "w4 w5"],
    "an answer that has begun": ["--prefill-response", "w11 w12"],
    "variables of the template": ["--chat-template-config", '{"word": "w13"}'],
    "without the template": ["--ignore-chat-template"],
    "penalties of none": ["--temp", "0", "--top-p", "0.9", "--min-p", "0.1", "--top-k", "3"],
    "xtc at temperature 0": ["--xtc-probability", "0.5", "--xtc-threshold", "0.1", "--min-tokens-to-keep", "2"],
    "small passes": ["--prefill-step-size", "2", "--max-kv-size", "64"],
    "trusted": ["--trust-remote-code"],
}


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_the_same_flags_give_the_same_text(flags, model, monkeypatch, capfd):
    arguments = ["--model", model, "--prompt", PROMPT, "-m", "12", *flags]
    expected = of_mlx_lm(generate_of_mlx_lm, monkeypatch, capfd, *arguments, "--verbose", "False")
    assert ours(capfd, *arguments) == expected
    assert ours(capfd, *arguments, "--draft", model, "--lookahead", "2") == expected


def test_an_adapter_gives_the_same_text(model, adapter, monkeypatch, capfd):
    arguments = ["--model", model, "--prompt", PROMPT, "-m", "12"]
    plain = ours(capfd, *arguments)
    arguments += ["--adapter-path", adapter]
    expected = of_mlx_lm(generate_of_mlx_lm, monkeypatch, capfd, *arguments, "--verbose", "F")
    assert expected != plain
    assert ours(capfd, *arguments) == expected
    assert ours(capfd, *arguments, "--draft", model, "--draft-adapter-path", adapter) == expected


@pytest.mark.parametrize("flags", [[], ["--ignore-chat-template"]], ids=["template", "raw"])
def test_a_prompt_cache_file_is_continued_with_the_same_text(flags, model, tmp_path, monkeypatch, capfd):
    file = str(tmp_path / "prompt.safetensors")
    cached = ["--model", model, "--prompt", "w21 w22 w23 w24", "--prompt-cache-file", file]
    of_mlx_lm(cache_prompt, monkeypatch, capfd, *cached)
    arguments = ["--prompt", PROMPT, "-m", "12", "--prompt-cache-file", file, *flags]
    expected = of_mlx_lm(generate_of_mlx_lm, monkeypatch, capfd, *arguments, "--verbose", "f")
    assert ours(capfd, *arguments) == expected
    assert ours(capfd, *arguments, "--model", model, "--draft", "ngram") == expected


def test_another_model_than_that_of_the_file_is_refused(model, tmp_path, monkeypatch, capfd):
    file = str(tmp_path / "prompt.safetensors")
    of_mlx_lm(cache_prompt, monkeypatch, capfd, "--model", model, "--prompt", "w2", "--prompt-cache-file", file)
    _, err = ran(capfd, "generate", PROMPT, "--prompt-cache-file", file, "--target", "/another", status=2)
    assert f"--prompt-cache-file was made with {model}, got --target /another" in err
