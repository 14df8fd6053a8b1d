"""The length of a context by a model's configuration, as far as mlx-lm applies it."""

from copy import deepcopy
from typing import Any

import architectures
from sweeps import sweep

from actors.mlx.model import context_length_of

BASE: dict[str, Any] = {"rope_theta": 1e4}
YARN = {**BASE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {**BASE, "rope_type": "default"}
BY_LAYER = {"full_attention": YARN, "sliding_attention": PLAIN}
SCALED = {"llama_4_scaling_beta": 0.1, **YARN}


def text(**changes: Any) -> dict[str, Any]:
    return {"text_config": architectures._text(max_position_embeddings=64, **changes)}


@sweep(
    ("name", "changes", "length"),
    [
        ("llama", {"rope_scaling": YARN}, 256),
        ("llama", {"rope_scaling": {**YARN, "rope_type": "linear"}}, 256),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
        ("llama", {"rope_scaling": {**YARN, "factor": 0.5}}, 64),
        ("llama", {"rope_scaling": None}, 64),
        # ollama/ollama #18262, omlx #3347
        ("qwen3", {"rope_theta": None, "rope_parameters": YARN}, 256),
        ("qwen3", {"rope_theta": None, "rope_parameters": PLAIN}, 64),
        ("qwen3_5", text(num_experts=0, rope_parameters=YARN), 256),
        ("qwen3_5", text(num_experts=0, rope_parameters={**PLAIN, "factor": 4.0}), 64),
        ("qwen3_vl", text(model_type="qwen3", rope_theta=None, rope_parameters=YARN), 256),
        ("mistral3", text(model_type="ministral3", rope_parameters=SCALED), 256),
        ("ministral3", {"rope_parameters": SCALED}, 256),
        ("laguna", {"rope_parameters": BY_LAYER}, 256),
        ("laguna", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": YARN}}, 64),
        ("mellum", {"rope_parameters": BY_LAYER}, 256),
        # mlx-lm reads the base alone.
        ("mellum", {"rope_parameters": {key: {**YARN, "rope_type": "linear"} for key in BY_LAYER}}, 64),
        ("lfm2", {"rope_parameters": YARN}, 64),
    ],
)
def test_a_context_is_as_long_as_the_embeddings_are_scaled_to(name: str, changes: dict[str, Any], length: int) -> None:
    # Some models change what they are given.
    changes = {"max_position_embeddings": 64, **deepcopy(changes)}
    assert context_length_of(architectures.build(name, **changes)) == length
