"""One text in the tokens of two vocabularies: its lengths, logits and rewinds."""

import math
import random
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from models import gemma3_text, llama, mamba
from other_vocabularies import TranslatedScript, own_texts
from scripted import VOCAB_SIZE, Script, agreeing, always, continuation, ids, never, simulated, truthful, within
from scripted import ScriptedModel as Scripted
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.model import Feed, RewindMode
from actors.translated.translated_model import TranslatedModel
from protocol.cache_size import TextSize
from protocol.errors import RewindError
from protocol.vocabulary_map import VocabularyMap

# The target has 6 tokens. The draft model has no 4 and 5, and reads them as two and three of its own.
# What begins with 1 and 3 may also be some longer tokens of its own.
MAP = VocabularyMap({0: 5, 1: 3, 2: 0, 3: 2}, ((5,), (3,), (0,), (2,), (1, 4), (4, 3, 4)), None, 6, {7: 1, 8: 1, 9: 3})
OWN_SIZE = 16


def translated(model: Any = None, vocabulary_map: VocabularyMap = MAP) -> tuple[TranslatedModel, MLXModel]:
    """A tiny model, translated, and by itself."""
    own = MLXModel(model or llama(vocab_size=OWN_SIZE), CacheOptions())
    return TranslatedModel(own, vocabulary_map), own


def expected_rows(own: MLXModel, text: list[int], num_rows: int, vocabulary_map: VocabularyMap = MAP) -> mx.array:
    """The logits after the last tokens of a text, each from a sequence of its own."""
    rows = []
    for end in range(len(text) - num_rows + 1, len(text) + 1):
        sequence = own.open_sequence(alongside_model=False)
        logits = sequence.feed(tuple(own_texts(vocabulary_map, text[:end])), 1)
        proposed = {own: token for token, own in vocabulary_map.shared.items()} | dict(vocabulary_map.beginnings)
        row = [-math.inf] * 6
        for own_token, token in proposed.items():
            row[token] = float(np.logaddexp(row[token], logits[0, own_token].item()))
        rows.append(mx.array(row))
        sequence.close()
    return mx.stack(rows)


def assert_same(found: mx.array | None, expected: mx.array) -> None:
    assert found.shape == expected.shape
    assert mx.array_equal(mx.isinf(found), mx.isinf(expected)).item()
    known = mx.where(mx.isinf(expected), 0.0, 1.0)
    assert mx.allclose(known * mx.maximum(found, -100), known * mx.maximum(expected, -100), atol=1e-4).item()


@sweep(
    ("model", "options"),
    [
        (llama, {}),
        (partial(gemma3_text, window=2000), {}),
        (partial(build, "qwen3", head_dim=32), {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 3000}),
    ],
)
def test_a_text_of_twice_as_many_tokens_of_its_own_takes_no_more_than_is_reserved(model: Any, options: Any) -> None:
    translator = TranslatedModel(MLXModel(model(max_position_embeddings=4096), CacheOptions(**options)), MAP)
    sequence = translator.open_sequence(alongside_model=False)
    for num_tokens in range(200, 1201, 200):
        sequence.feed((4,) * 200, 0)
        assert sequence.own.length == 2 * num_tokens
        assert sequence.num_bytes <= translator.cache_size.of([TextSize(num_tokens, 200)])


@sweep("seed", range(2))
@sweep("begin", [None, 6])  # a token of the model's own, with which every text begins
@sweep("is_recurrent", [False, True])
def test_a_text_has_the_logits_of_the_models_own_tokens_whatever_becomes_of_it(is_recurrent, begin, seed):
    vocabulary_map = attrs.evolve(MAP, begin=begin)
    model, own = translated((mamba if is_recurrent else llama)(vocab_size=OWN_SIZE), vocabulary_map)
    sequence, draws = model.open_sequence(alongside_model=False), random.Random(seed)
    assert (sequence.needs_prefix_checkpoints, sequence.depends_on_passes) == (is_recurrent, False)
    text, checkpoints = list[int](), list[int]()
    for _ in range(16):
        settled, num_fed = len(text), draws.randint(1, 4)
        mode = sequence.prepare(num_fed, settled)
        assert mode is (RewindMode.CHECKPOINT if is_recurrent else RewindMode.TRIM)
        if num_fed == 1 and settled > 0:
            text += draws.choices([*MAP.shared])
            rows = sequence.feed_lazy(mx.array(text[-1:]))
        else:
            text += draws.choices(range(6), k=num_fed)
            rows = sequence.feed(tuple(text[settled:]), draws.randint(0, num_fed))
        if rows is not None:
            assert_same(rows, expected_rows(own, text, rows.shape[0], vocabulary_map))
        length = draws.randint(settled, len(text))
        kept = settled if is_recurrent and length < len(text) else length
        assert sequence.rewind(length) == kept
        del text[kept:]
        if draws.random() < 0.3:
            sequence.add_prefix_checkpoint()
            checkpoints.append(len(text))
        elif draws.random() < 0.3:
            num_common = draws.randint(0, len(text) + 1)
            ends = [end for end in (0, *checkpoints, settled, len(text)) if end <= num_common]
            reusable = max(ends) if is_recurrent else min(num_common, len(text))
            assert sequence.reusable_length(num_common, len(text) + 2) == reusable
            if reusable > 0:
                sequence.reuse(reusable)
                del text[reusable:]
                checkpoints = [end for end in (*checkpoints, reusable) if end <= reusable]
        sequence.check(len(text))
        assert (sequence.length, sequence.own.length) == (len(text), len(own_texts(vocabulary_map, text)))
        for other in (len(text) + 1, abs(len(text) - 1))[: 1 if is_recurrent else 2]:  # recurrent caches keep no count
            with pytest.raises(RewindError):
                sequence.check(other)
    assert sequence.num_bytes > 0
    with pytest.raises(RewindError, match=f"asked to rewind to 99 tokens a cache that holds {len(text)}"):
        sequence.rewind(99)


def test_several_texts_share_a_pass() -> None:
    model, own = translated()
    texts = [[0, 4, 1], [5, 2], [3, 3, 4, 4]]
    sequences = [model.open_sequence(alongside_model=False) for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.feed(tuple(text), 0)
    assert model.sharing_obstacle() is None
    for more in ((4, 1), (2,), (5,)):
        feeds = [Feed(sequence, more, len(more)) for sequence in sequences]
        texts = [[*text, *more] for text in texts]
        for rows, text in zip(model.feed_together(feeds), texts, strict=True):
            assert_same(rows, expected_rows(own, text, len(more)))
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.check(len(text))
    # A pass that fails leaves nothing.
    model.abandon_shared()
    assert [sequence.length for sequence in sequences] == [0, 0, 0]
    assert_same(sequences[0].feed((4,), 1), expected_rows(own, [4], 1))


def test_a_text_that_is_too_long_in_the_models_own_tokens_is_not_fed() -> None:
    model, _ = translated(llama(vocab_size=OWN_SIZE, max_position_embeddings=8))
    assert model.context_length == 8
    sequence = model.open_sequence(alongside_model=False)
    sequence.feed((4, 4, 4), 0)
    with pytest.raises(runtime.ModelError, match="the text has 9 tokens of the draft model, and its context takes 8"):
        sequence.feed((5,), 1)
    assert sequence.length == 3


# --- the actors, in simulated time ----------------------------------------------------------------

# By id of the scripted target: four of five are shared, in the reverse order; the others are two tokens.
SHARED = [token for token in range(VOCAB_SIZE) if token % 5]
SCRIPT_MAP = VocabularyMap(
    {token: VOCAB_SIZE - 1 - token for token in SHARED},
    tuple(
        (VOCAB_SIZE - 1 - token,) if token % 5 else (VOCAB_SIZE, VOCAB_SIZE + 1 + token) for token in range(VOCAB_SIZE)
    ),
    None,
    VOCAB_SIZE,
)


def in_own_tokens(script: Script) -> Script:
    """A script about the target's tokens, of a model with others."""

    def logits(own: Any) -> Any:
        history: list[int] = []
        for token in own:
            if token < VOCAB_SIZE:
                history.append(VOCAB_SIZE - 1 - token)
            elif token > VOCAB_SIZE:
                history.append(token - VOCAB_SIZE - 1)
        return [*script(history)[::-1], *[-math.inf] * (VOCAB_SIZE + 1)]

    return logits


@sweep(
    ("lookahead", "cache"),
    [
        (3, {}),
        ("auto", {"undo": never}),
        (3, {"undo": never, "keeps_states": True}),
        ("auto", {"undo": within(9), "keeps_states": True}),
    ],
)
async def test_the_text_is_the_targets_whatever_is_drafted(lookahead: Any, cache: Any, autojump_clock: Any) -> None:
    for agreement in (0.0, 0.7, 1.0):
        drafter = TranslatedScript(in_own_tokens(agreeing(agreement)), SCRIPT_MAP, **cache)
        async with simulated(Scripted(truthful), drafter) as simulation:
            completion = await simulation.runtime.generate([5, 6, 7], max_tokens=50, lookahead=lookahead)
        assert ids(completion.tokens) == continuation([5, 6, 7], 50)
        assert completion.statistics.draft_failures == 0
        if agreement == 1.0 and lookahead != "auto" and cache.get("undo", always) is always:
            # What the drafter cannot say is every fifth token or so.
            assert 0.6 < sum(token.from_draft for token in completion.tokens) / 50 + 1 / (1 + lookahead) < 1.1
