"""What kinds of caches say; and a new cache class needs a kind and nothing else.

Other tests rewind and save that of `cache_subjects`.
"""

import mlx.core as mx
from cache_subjects import ATOL, TEXT, Joining
from mlx_lm.models.cache import ChunkedKVCache
from models import llama

from actors.mlx.cache_kinds import kind_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.model import Feed, RewindMode


def is_read_after(sequence: MLXSequence, before: list[int], tokens: list[int]) -> bool:
    """Whether a sequence reads tokens as the model without a cache does, after others."""
    logits = sequence.feed(tuple(tokens), len(tokens))
    assert logits is not None
    return bool(mx.allclose(logits, llama()(mx.array([before + tokens]))[0][len(before) :], rtol=0, atol=ATOL))


def test_a_chunked_cache_says_what_the_next_pass_will_drop() -> None:
    layer = ChunkedKVCache(8)
    layer.update_and_fetch(*2 * [mx.zeros((1, 1, 10, 4))])
    kind = kind_of(layer)
    # A pass first drops what lies more than a chunk behind: the two first tokens, which the eighth attends to.
    assert kind.can_trim_after(layer, 0, 7)
    assert not kind.can_trim_after(layer, 1, 7)
    assert kind.can_trim_after(layer, 1, 8)


def test_a_cache_of_a_new_kind_is_copied() -> None:
    sequence = MLXModel(Joining(llama()), CacheOptions()).open_sequence(alongside_model=False)
    sequence.feed(tuple(TEXT[:9]), 0)
    copy = sequence.copy(9)
    assert is_read_after(sequence, TEXT[:9], TEXT[40:50])
    assert is_read_after(copy, TEXT[:9], TEXT[9:14])


def test_a_cache_of_a_new_kind_is_a_row_beside_others() -> None:
    model = MLXModel(Joining(llama()), CacheOptions())
    assert model.sharing_obstacle() is None
    texts = [TEXT[:9], TEXT[20:25]]
    sequences = [model.open_sequence(alongside_model=False) for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.feed(tuple(text), 0)
        assert sequence.prepare(2, len(text)) is RewindMode.TRIM
    model.feed_together([Feed(sequence, (1, 2), 1) for sequence in sequences])
    assert all(sequence.is_row for sequence in sequences)
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.rewind(len(text) + 1) == len(text) + 1
        assert is_read_after(sequence, [*text, 1], TEXT[60:63])
        assert not sequence.is_row
