"""Small language models that draft well for larger ones of their family: a table, to be checked by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class Small:
    """A small model.

    Attributes:
        model: its hub id.
        num_megabytes: of its weights, about.
    """

    model: str
    num_megabytes: int


@attrs.frozen
class Family:
    """Models that share a vocabulary.

    Attributes:
        model_types: that a config.json may name.
        vocab_sizes: rows of the embeddings, padding included, from the least to the most.
        small: the smallest first.
    """

    model_types: frozenset[str]
    vocab_sizes: tuple[int, int]
    small: tuple[Small, ...]


FAMILIES = (
    Family(
        frozenset({"qwen3", "qwen3_moe"}),
        (151_936, 151_936),
        (Small("mlx-community/Qwen3-0.6B-4bit", 335), Small("mlx-community/Qwen3-1.7B-4bit", 970)),
    ),
    Family(
        frozenset({"qwen2"}),
        (151_936, 152_064),
        (
            Small("mlx-community/Qwen2.5-0.5B-Instruct-4bit", 280),
            Small("mlx-community/Qwen2.5-Coder-0.5B-Instruct-4bit", 280),
            Small("mlx-community/Qwen2.5-1.5B-Instruct-4bit", 870),
        ),
    ),
    Family(
        frozenset({"llama"}),
        (128_256, 128_256),
        (Small("mlx-community/Llama-3.2-1B-Instruct-4bit", 700),),
    ),
    Family(
        frozenset({"llama"}),
        (49_152, 49_152),
        (Small("mlx-community/SmolLM2-135M-Instruct", 270),),
    ),
    Family(
        frozenset({"gemma3", "gemma3_text"}),
        (262_144, 262_208),
        (Small("mlx-community/gemma-3-270m-it-4bit", 150), Small("mlx-community/gemma-3-1b-it-4bit", 730)),
    ),
    Family(
        frozenset({"gemma2"}),
        (256_000, 256_000),
        (Small("mlx-community/gemma-2-2b-it-4bit", 1470),),
    ),
    Family(
        frozenset({"lfm2", "lfm2_moe"}),
        (65_536, 65_536),
        (Small("mlx-community/LFM2-350M-4bit", 200),),
    ),
)


def small_models(model_type: str, vocab_size: int) -> Iterator[Small]:
    """Those of a model's family, the smallest first; none where the family is not in the table."""
    for family in FAMILIES:
        least, most = family.vocab_sizes
        if model_type in family.model_types and least <= vocab_size <= most:
            yield from family.small
