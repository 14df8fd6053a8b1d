"""One text in the tokens of two vocabularies: its lengths, logits and rewinds."""

import math
from functools import partial
from typing import Any

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
        sequence = own.open_sequence(beside_another=False)
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
    sequence = translator.open_sequence(beside_another=False)
    for num_tokens in range(200, 1201, 200):
        sequence.feed((4,) * 200, 0)
        assert sequence.own.length == 2 * num_tokens
        assert sequence.num_bytes <= translator.cache_size.of([TextSize(num_tokens, 200)])


def test_logits_are_those_of_the_models_own_tokens() -> None:
    model, own = translated()
    sequence = model.open_sequence(beside_another=False)
    assert sequence.feed((0, 4), 0) is None
    assert (sequence.length, sequence.own.length) == (2, 3)
    assert_same(sequence.feed((5, 1, 4, 2), 3), expected_rows(own, [0, 4, 5, 1, 4, 2], 3))
    assert_same(sequence.feed((3,), 1), expected_rows(own, [0, 4, 5, 1, 4, 2, 3], 1))
    sequence.check(7)
    assert_same(sequence.feed_lazy(mx.array([1])), expected_rows(own, [0, 4, 5, 1, 4, 2, 3, 1], 1))
    sequence.check(8)
    with pytest.raises(RewindError):
        sequence.check(7)
    with pytest.raises(RewindError):
        sequence.check(9)
    assert sequence.num_bytes > 0
    assert sequence.prepare(3, 8) is RewindMode.TRIM
    sequence.close()


def test_a_rewind_leads_to_the_end_of_one_of_the_targets_tokens() -> None:
    model, own = translated()
    sequence = model.open_sequence(beside_another=False)
    sequence.feed((0, 4, 5, 1), 0)
    for length in (4, 3, 2, 1, 0):
        assert sequence.rewind(length) == length
        assert sequence.own.length == len(own_texts(MAP, [0, 4, 5, 1][:length]))
        sequence.check(length)
    with pytest.raises(RewindError, match="asked to rewind to 1 tokens a cache that holds 0"):
        sequence.rewind(1)
    assert_same(sequence.feed((4, 3), 2), expected_rows(own, [4, 3], 2))


def test_a_recurrent_model_goes_back_to_a_checkpoint() -> None:
    model, own = translated(mamba(vocab_size=OWN_SIZE))
    sequence = model.open_sequence(beside_another=False)
    sequence.feed((0, 4), 0)
    assert sequence.prepare(1, 2) is RewindMode.CHECKPOINT
    sequence.feed((5, 5, 1), 1)
    assert sequence.rewind(4) == 2
    sequence.check(2)
    assert_same(sequence.feed((5, 2), 1), expected_rows(own, [0, 4, 5, 2], 1))


def test_every_text_begins_as_the_model_is_used_to() -> None:
    begins = VocabularyMap(MAP.shared, MAP.readings, 6, 6, MAP.beginnings)
    model, own = translated(vocabulary_map=begins)
    sequence = model.open_sequence(beside_another=False)
    assert_same(sequence.feed((4, 2), 2), expected_rows(own, [4, 2], 2, begins))
    assert sequence.own.length == 4
    assert sequence.rewind(0) == 0
    assert_same(sequence.feed((1,), 1), expected_rows(own, [1], 1, begins))
    assert sequence.own.length == 2


def test_several_texts_share_a_pass() -> None:
    model, own = translated()
    texts = [[0, 4, 1], [5, 2], [3, 3, 4, 4]]
    sequences = [model.open_sequence(beside_another=False) for _ in texts]
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


def test_another_text_reuses_the_beginning() -> None:
    model, own = translated()
    sequence = model.open_sequence(beside_another=False)
    sequence.feed((0, 4, 5, 1), 0)
    assert sequence.reusable_length(4, 6) == 4
    assert sequence.reusable_length(9, 9) == 4
    assert sequence.reusable_length(2, 6) == 2
    sequence.reuse(2)
    assert_same(sequence.feed((5, 2), 1), expected_rows(own, [0, 4, 5, 2], 1))
    assert not sequence.needs_prefix_checkpoints
    assert not sequence.depends_on_passes


def test_another_text_reuses_a_recurrent_models_checkpoint() -> None:
    model, own = translated(mamba(vocab_size=OWN_SIZE))
    sequence = model.open_sequence(beside_another=False)
    sequence.feed((0, 4, 5), 0)
    assert sequence.needs_prefix_checkpoints
    sequence.add_prefix_checkpoint()
    sequence.feed((1, 1), 0)
    assert sequence.reusable_length(4, 6) == 3
    sequence.reuse(3)
    assert_same(sequence.feed((2,), 1), expected_rows(own, [0, 4, 5, 2], 1))


def test_a_text_that_is_too_long_in_the_models_own_tokens_is_not_fed() -> None:
    model, _ = translated(llama(vocab_size=OWN_SIZE, max_position_embeddings=8))
    assert model.context_length == 8
    sequence = model.open_sequence(beside_another=False)
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
