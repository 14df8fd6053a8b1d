"""Medusa: heads on a target's last hidden state, each of which predicts one token further on.

Head i reads the hidden state that the target's own head reads at position t, and predicts the token at position
t + 2 + i. No head knows what another one predicts.

Source: Cai, Li, Geng, Peng, Lee, Chen and Dao 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
Decoding Heads", arXiv 2401.10774. Files: those of the authors (https://github.com/FasterDecoding/Medusa).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from actors.trained.kinds.torch_file import load_torch_file
from protocol.errors import ModelError

# "<head>.<layer>.linear.weight" of a block, "<head>.<layer>.weight" of the last layer; whole models have a prefix.
_WEIGHT = re.compile(r"(?:medusa_head\.)?(?P<head>\d+)\.(?P<layer>\d+)\.(?P<rest>linear\.weight|linear\.bias|weight)")
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@attrs.frozen
class MedusaConfig:
    """What a drafter's weights and its configuration say.

    Attributes:
        num_heads: how many tokens are predicted.
        num_layers: residual blocks of each head.
        hidden_size: width of the target's hidden states.
        vocab_size: width of the logits.
        target: name or path of the target, if the file names one.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    target: str | None = None


class MedusaBlock(Module):
    """A residual block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(hidden_size, hidden_size)

    def __call__(self, hidden: mx.array) -> mx.array:
        """(…, hidden size) to the same shape; lazy."""
        result: mx.array = hidden + silu(self.linear(hidden))
        return result


class MedusaHead(Module):
    """The head of one position."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = [MedusaBlock(config.hidden_size) for _ in range(config.num_layers)]
        self.output = Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """(…, hidden size) normalised hidden states of the target to (…, V) logits; lazy."""
        for block in self.blocks:
            hidden = block(hidden)
        logits: mx.array = self.output(hidden)
        return logits


class Medusa(Module):
    """The heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.heads = [MedusaHead(config) for _ in range(config.num_heads)]


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of Medusa heads."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return "medusa_num_heads" in config or any("medusa" in str(name).lower() for name in names)


def load_medusa(folder: Path) -> Medusa:
    """Load heads from a folder with `config.json` and `medusa_lm_head.safetensors` or `medusa_lm_head.pt`.

    How many heads there are is for the weights to say: in some of the authors' folders the configuration has a smaller
    number. More in the configuration than in the weights is an error.

    Raises: ModelError: a file is missing or damaged, or the weights are not those of such heads.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = _weights(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the drafter in {folder} cannot be read: {error}") from error
    if not weights:
        raise ModelError(f"there are no weights of Medusa heads ({' or '.join(_FILES)}) in {folder}")
    found = _config_of(config, weights, folder)
    model = Medusa(found)
    try:
        model.load_weights([(_renamed(name, found.num_layers), value) for name, value in weights.items()])
    except ValueError as error:
        raise ModelError(f"the weights in {folder} do not fit its configuration: {error}") from error
    mx.eval(model.state)
    return model


def _weights(folder: Path) -> dict[str, mx.array]:
    """The weights of heads in a folder."""
    loaded: dict[str, mx.array] = {}
    if (folder / _FILES[0]).exists():
        files = [folder / _FILES[0]]
    elif (folder / _FILES[1]).exists():
        loaded, files = load_torch_file(folder / _FILES[1]), []
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        loaded |= mx.load(str(file))  # type: ignore[arg-type]
    return {name: value for name, value in loaded.items() if _WEIGHT.fullmatch(name)}


def _config_of(config: Mapping[str, Any], weights: Mapping[str, mx.array], folder: Path) -> MedusaConfig:
    keys = [match for name in weights if (match := _WEIGHT.fullmatch(name)) is not None]
    num_heads, num_layers = (1 + max(int(key[group]) for key in keys) for group in ("head", "layer"))
    num_layers -= 1  # the last one is the output
    wanted_heads, wanted_layers = config.get("medusa_num_heads", num_heads), config.get("medusa_num_layers", num_layers)
    if wanted_heads > num_heads or wanted_layers != num_layers:
        raise ModelError(
            f"the configuration in {folder} asks for {wanted_heads} heads of {wanted_layers} blocks, and the weights "
            f"have {num_heads} of {num_layers}"
        )
    output = next((value for name, value in weights.items() if _renamed(name, num_layers) == _FIRST_OUTPUT), None)
    if output is None or output.ndim != 2:
        raise ModelError(f"the weights in {folder} do not fit its configuration: the first head has no output")
    vocab_size, hidden_size = output.shape
    target = config.get("base_model_name_or_path")
    return MedusaConfig(num_heads, num_layers, hidden_size, vocab_size, target if isinstance(target, str) else None)


_FIRST_OUTPUT = "heads.0.output.weight"


def _renamed(name: str, num_layers: int) -> str:
    key = _WEIGHT.fullmatch(name)
    assert key is not None
    is_output = int(key["layer"]) == num_layers
    return f"heads.{key['head']}." + (f"output.{key['rest']}" if is_output else f"blocks.{key['layer']}.{key['rest']}")
