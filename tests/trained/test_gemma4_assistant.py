"""Gemma 4's assistants: the logits of mlx-vlm (0.7.10), as `make_gemma4_cases.py` wrote them; their texts."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from architectures import VOCAB_SIZE, build
from sweeps import sweep
from trained_drafters import expected_of, write_gemma4

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.model import Feed
from actors.trained.drafter_files import DrafterFiles
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.kinds.gemma4_assistant import Gemma4AssistantReader, Gemma4AssistantSequence, load_gemma4_assistant

CASES = sorted((Path(__file__).parent / "gemma4").iterdir())
KINDS = ("sliding_attention", "full_attention")
NUM_TOKENS, NUM_STEPS = 18, 3


class Case(Gemma4AssistantReader):
    """An assistant whose features are keys, values and hidden states as mlx-vlm's target has made them."""

    def __init__(self, folder: Path) -> None:
        self.expected = expected_of(folder)
        embedding = self.expected["embedding"] * self.expected["hidden"].shape[1] ** 0.5
        model = load_gemma4_assistant(DrafterFiles.read(folder))
        super().__init__(model, dict.fromkeys(KINDS), lambda tokens: embedding[tokens], lambda hidden: hidden)
        self.tokens: list[int] = self.expected["tokens"].tolist()

    def features(self, begin: int, end: int) -> mx.array:
        """(end - begin, 1): which positions they are of."""
        return mx.arange(begin, end)[:, None]

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        positions = features[:, 0]
        for kind, written in zip(KINDS, cache, strict=False):
            keys, values = (self.expected[f"{kind}.{name}"][:, :, positions] for name in ("keys", "values"))
            written.update_and_fetch(keys, values)
        hidden = self.expected["hidden"][positions][None, None]
        cache[-1].update_and_fetch(hidden, hidden[..., :1])

    def check(self, logits: mx.array, num_read: int, step: int) -> None:
        """Compare (V,) logits with those of a step after the first `num_read` tokens."""
        expected = self.expected["logits"][num_read - 1, step]
        chosen = mx.isfinite(logits)
        assert mx.all(mx.where(chosen, mx.abs(logits - expected), 0.0) < 1e-4)
        # mlx-vlm's value for tokens of other groups.
        other = mx.where(chosen, expected, mx.inf).min() - 1.0
        assert mx.allclose(mx.where(chosen, other, expected), other)
        ordered = self._model.config.ordered
        share = 1.0 if ordered is None else ordered[1] / ordered[0]
        assert mx.sum(chosen).item() == share * self.vocab_size


@sweep("folder", CASES)
def test_hidden_states_and_the_logits_of_steps_and_texts_are_those_of_mlx_vlm(folder: Path) -> None:
    case = Case(folder)
    cache = case.make_cache()
    case.read_context(case.features(0, NUM_TOKENS), 0, cache)
    _, together = case.read(case.tokens[1 : NUM_TOKENS + 1], 0, NUM_TOKENS, cache)
    for num_read in range(1, NUM_TOKENS + 1):
        hidden = None
        for step in range(NUM_STEPS):
            hidden, [logits] = case.read([case.tokens[num_read + step]], 0, num_read, cache, hidden)
            assert mx.allclose(hidden[0], case.expected["given"][num_read - 1, step], atol=1e-4)
            case.check(logits, num_read, step)
            sequence = Gemma4AssistantSequence(case)
            sequence.give(0, case.features(0, num_read))
            [logits] = sequence.feed(tuple(case.tokens[: num_read + 1 + step]), 1)
            assert (sequence.staleness, sequence.foreseen) == (step, None)
            case.check(logits, num_read, step)
        case.check(together[num_read - 1], num_read, 0)


def test_an_untied_head_is_read_instead_of_the_embedding(tmp_path: Path) -> None:
    [tied, untied] = (write_gemma4(tmp_path / name) for name in ("tied", "untied"))
    weights: dict[str, mx.array] = mx.load(str(untied / "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = mx.zeros((3, 3))
    folder = write_gemma4(tmp_path / "untied", tie_word_embeddings=False)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    [expected, found] = (load_gemma4_assistant(DrafterFiles.read(folder)) for folder in (tied, untied))
    assert mx.array_equal(found.embed_tokens.weight, expected.embed_tokens.weight)


# --- keys and values ------------------------------------------------------------------------------


@sweep("name, are_rows", [("gemma4_text", False), ("gemma4_text", True), ("gemma4", True)])
def test_keys_and_values_are_those_in_the_targets_caches(name: str, are_rows: bool, tmp_path: Path) -> None:
    built, draws = build(name), random.Random(3)
    model = MLXModel(built, CacheOptions())
    drafter = TrainedDrafter(write_gemma4(tmp_path), built, model.vocab_size)
    model.record_features(drafter.feature_layers)
    with model.evaluating_layers():
        texts = [model.open_sequence(alongside_model=False) for _ in range(2 if are_rows else 1)]
        drafted = [drafter.open_sequence(alongside_model=False) for _ in texts]
        for text in texts:
            text.feed(tuple(draws.choices(range(VOCAB_SIZE), k=draws.randint(2, 6))), 0)
        while min(text.length for text in texts) < 40:
            lengths = [text.length + draws.randint(1, 3) for text in texts]
            feeds = [Feed(text, tuple(draws.choices(range(VOCAB_SIZE), k=5)), 1) for text in texts]
            for text in texts:
                text.prepare(5, text.length)
            mx.eval(model.feed_together(feeds) if are_rows else texts[0].feed(feeds[0].tokens, 1))
            for text, sequence, length in zip(texts, drafted, lengths, strict=True):
                text.rewind(length)
                taken = text.features.take(length)
                sequence.give(taken.start, taken.values)
                sequence.feed((), 0)
        for text, sequence in zip(texts, drafted, strict=True):
            text.leave_batch()
            assert isinstance(sequence, Gemma4AssistantSequence)
            for layer, context in zip(text.cache, sequence._cache, strict=False):
                assert context.offset == text.length == layer.offset
                keys, values, *_ = layer.state
                num_held = min(text.length, 12)
                for found, expected in ((context.keys, keys), (context.values, values)):
                    end = expected.shape[2] if expected.shape[2] < text.length else text.length
                    expected = expected[:, :, end - num_held : end]
                    assert mx.allclose(found[:, :, text.length - num_held : text.length], expected, atol=1e-4)
