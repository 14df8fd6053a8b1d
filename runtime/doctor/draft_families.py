"""A table of small models that can draft for larger models of their family; vocabularies are checked when opened."""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class SmallModel:
    """A small model that can draft.

    Attributes:
        model: its hub id.
        num_megabytes: approximate size of its weights.
    """

    model: str
    num_megabytes: int


@attrs.frozen
class Family:
    """Models that share a vocabulary.

    Attributes:
        model_types: values of `model_type` in config.json.
        vocab_sizes: smallest and largest number of embedding rows, padding included.
        small_models: the smallest first.
    """

    model_types: frozenset[str]
    vocab_sizes: tuple[int, int]
    small_models: tuple[SmallModel, ...]


FAMILIES = (
    Family(
        frozenset({"qwen3", "qwen3_moe"}),
        (151_936, 151_936),
        (SmallModel("mlx-community/Qwen3-0.6B-4bit", 335), SmallModel("mlx-community/Qwen3-1.7B-4bit", 970)),
    ),
    Family(
        frozenset({"qwen2"}),
        (151_936, 152_064),
        (
            SmallModel("mlx-community/Qwen2.5-0.5B-Instruct-4bit", 280),
            SmallModel("mlx-community/Qwen2.5-Coder-0.5B-Instruct-4bit", 280),
            SmallModel("mlx-community/Qwen2.5-1.5B-Instruct-4bit", 870),
        ),
    ),
    Family(
        frozenset({"llama"}),
        (128_256, 128_256),
        (SmallModel("mlx-community/Llama-3.2-1B-Instruct-4bit", 700),),
    ),
    Family(
        frozenset({"llama"}),
        (49_152, 49_152),
        (SmallModel("mlx-community/SmolLM2-135M-Instruct", 270),),
    ),
    Family(
        frozenset({"gemma3", "gemma3_text"}),
        (262_144, 262_208),
        (SmallModel("mlx-community/gemma-3-270m-it-4bit", 150), SmallModel("mlx-community/gemma-3-1b-it-4bit", 730)),
    ),
    Family(
        frozenset({"gemma2"}),
        (256_000, 256_000),
        (SmallModel("mlx-community/gemma-2-2b-it-4bit", 1470),),
    ),
    Family(
        frozenset({"lfm2", "lfm2_moe"}),
        (65_536, 65_536),
        (SmallModel("mlx-community/LFM2-350M-4bit", 200),),
    ),
)


def small_models(model_type: str, vocab_size: int) -> Iterator[SmallModel]:
    """The small models of a model's family, the smallest first; none if the family is not in the table."""
    for family in FAMILIES:
        low, high = family.vocab_sizes
        if model_type in family.model_types and low <= vocab_size <= high:
            yield from family.small_models
