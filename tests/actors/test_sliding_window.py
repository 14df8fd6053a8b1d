"""The cache of a sliding window: each token sees its window, whatever was fed and trimmed before, as with mlx-lm's.

Keys are numbers here, a different one for each token that is ever fed, so that a test can tell which tokens are seen.
"""

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from architectures import build
from cache_subjects import ATOL, TEXT, VOCAB_SIZE, WINDOW, subject
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from models import Wrapped, llama
from sweeps import sweep

from actors.mlx.cache_kinds import kind_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.sequence import MLXSequence
from actors.mlx.sliding_window import MAX_TRIM, NUM_SPARE, STEP, SlidingWindowCache
from actors.model import RewindMode
from protocol.settings import MAX_LOOKAHEAD


class Reader:
    """A cache, and the text that it should hold."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.text: list[int] = []
        self._numbers = itertools.count(1)

    def feed(self, width: int, window_size: int | None = None) -> list[list[int]]:
        """Feed new tokens in one pass. Returns: what each of them sees, in the order of the cache."""
        new = list(itertools.islice(self._numbers, width))
        self.text += new
        mask = self.cache.make_mask(width, window_size=window_size)
        keys = mx.array(new, mx.float32).reshape(1, 1, width, 1)
        seen_keys, seen_values = self.cache.update_and_fetch(keys, -keys)
        assert mx.array_equal(seen_keys, -seen_values)
        for shared, own in zip(self.cache.keys_and_values(), (seen_keys, seen_values), strict=True):
            assert mx.array_equal(shared, own)
        numbers = [int(number) for number in seen_keys.flatten().tolist()]
        if mask is None:
            return [numbers] * width
        if mask == "causal":
            return [numbers[: len(numbers) - width + i + 1] for i in range(width)]
        rows = mask.reshape(width, -1).tolist()
        return [[number for number, is_seen in zip(numbers, row, strict=True) if is_seen] for row in rows]

    def expected(self, width: int, size: int) -> list[list[int]]:
        """What the last `width` tokens see of the text through a window of `size` tokens."""
        ends = range(len(self.text) - width + 1, len(self.text) + 1)
        return [self.text[max(0, end - size) : end] for end in ends]

    def trim(self, num_tokens: int) -> None:
        assert self.cache.trim(num_tokens) == num_tokens
        del self.text[len(self.text) - num_tokens :]
        assert self.cache.offset == len(self.text)


# --- what is seen ---------------------------------------------------------------------------------

widths = st.one_of(st.just(1), st.integers(2, 9), st.integers(60, 130))


@settings(max_examples=40)
@given(
    num_visible=st.integers(2, 40),
    steps=st.lists(st.tuples(st.lists(widths, min_size=1, max_size=4), st.floats(0, 1)), min_size=1, max_size=14),
    data=st.data(),
)
def test_each_token_sees_its_window_whatever_was_fed_and_trimmed(num_visible, steps, data):
    reader = Reader(SlidingWindowCache(num_visible))
    for passes, share in steps:
        length, num_tokens = len(reader.text), sum(passes)
        shortest = next(n for n in range(length + 1) if n == length or reader.cache.can_trim_after(num_tokens, n))
        can_go_back = reader.cache.can_trim_after(num_tokens, shortest)
        for width in passes:
            size = data.draw(st.sampled_from([None, num_visible, max(1, num_visible - 2)]))
            assert reader.feed(width, size) == reader.expected(width, size or num_visible)
        assert reader.cache.size() == min(len(reader.text), num_visible)
        if can_go_back:
            assert reader.cache.num_trimmable >= len(reader.text) - shortest
        reader.trim(int(share * reader.cache.num_trimmable))


@sweep("window_size", [None, 8, 5])
@sweep("width", [1, 2, 7, 8, 20])
@sweep("length", [0, 1, 4, 7, 8, 9, 30])
def test_each_token_sees_what_it_sees_with_the_cache_of_mlx_lm(length: int, width: int, window_size: Any) -> None:
    ours, theirs = Reader(SlidingWindowCache(8)), Reader(RotatingKVCache(8))
    for _ in range(length):
        assert ours.feed(1) == [sorted(row) for row in theirs.feed(1)]
    for step in (width, 1, width):
        assert ours.feed(step, window_size) == [sorted(row) for row in theirs.feed(step, window_size)]


def test_a_layer_may_ask_for_a_mask_in_an_array() -> None:
    cache = SlidingWindowCache(8)
    assert cache.make_mask(3) == "causal"
    assert cache.make_mask(3, return_array=True).tolist() == [[True, False, False], [True, True, False], [True] * 3]


# --- how far it can be trimmed ----------------------------------------------------------------------


@sweep("size", [1, 8, 128, 1024])
def test_a_full_window_can_be_trimmed_by_more_than_any_drafter_is_ahead(size: int) -> None:
    reader = Reader(SlidingWindowCache(size))
    reader.feed(size + 7)
    for num_tokens in [1] * 300 + [MAX_LOOKAHEAD + 1] * 9:
        length = len(reader.text)
        assert reader.cache.can_trim_after(num_tokens, max(0, length + num_tokens - MAX_TRIM))
        reader.feed(num_tokens)
        assert reader.cache.is_trimmable()
        assert reader.cache.num_trimmable >= min(MAX_TRIM, len(reader.text) - size)
    assert MAX_TRIM > 2 * MAX_LOOKAHEAD + 1


def test_a_trim_stops_where_a_token_would_lack_a_part_of_its_window() -> None:
    reader = Reader(SlidingWindowCache(8))
    for _ in range(1000):
        reader.feed(1)
    can_trim = reader.cache.num_trimmable
    assert not reader.cache.can_trim_after(0, 1000 - can_trim - 1)
    assert reader.cache.can_trim_after(0, 1000 - can_trim)
    assert not reader.cache.can_trim_after(MAX_TRIM + 1, 1000)
    assert reader.cache.trim(can_trim + 5) == can_trim
    assert (reader.cache.offset, reader.cache.is_trimmable()) == (1000 - can_trim, False)
    del reader.text[-can_trim:]
    assert reader.feed(3) == reader.expected(3, 8)


# --- memory ---------------------------------------------------------------------------------------


def num_slots(cache: SlidingWindowCache) -> int:
    assert cache.nbytes == 2 * cache.keys.nbytes
    return int(cache.keys.shape[2])


def test_the_cache_of_a_short_text_is_small_and_of_a_long_one_bounded() -> None:
    reader = Reader(SlidingWindowCache(600))
    for width in (1, STEP - 2, 1, 1, STEP - 2, 1, 1):
        reader.feed(width)
        assert num_slots(reader.cache) == -(-len(reader.text) // STEP) * STEP
    reader.feed(700)
    assert num_slots(reader.cache) <= 600 + MAX_TRIM + 700
    for _ in range(3 * (NUM_SPARE - MAX_TRIM)):
        reader.feed(1)
        assert num_slots(reader.cache) == 600 + NUM_SPARE


def test_a_token_is_written_in_place_but_for_one_move_in_many() -> None:
    reader = Reader(SlidingWindowCache(64))
    reader.feed(400)
    num_moved, before = 0, reader.cache.keys
    for _ in range(500):
        reader.feed(1)
        num_moved += reader.cache.keys is not before
        before = reader.cache.keys
    assert num_moved <= 1 + 500 // (NUM_SPARE - MAX_TRIM)


# --- states ---------------------------------------------------------------------------------------

# Empty, short, full, wrapped round, and wider than the window of 8.
HISTORIES = [[], [3], [7], [8], [1] * 8, [1] * 13, [20], [20, 1], [5, *[1] * 9]]


@sweep("history", HISTORIES)
def test_the_states_of_mlx_lms_cache_and_of_this_one_are_of_a_form(history: list[int]) -> None:
    ours, theirs = Reader(SlidingWindowCache(8)), Reader(RotatingKVCache(8))
    for width in history:
        ours.feed(width)
        theirs.feed(width)
    from_theirs, from_ours = Reader(None), Reader(None)
    for reader, state in ((from_theirs, theirs.cache.state), (from_ours, ours.cache.state)):
        reader.text, reader._numbers = list(ours.text), itertools.count(500)
        reader.cache = (SlidingWindowCache if reader is from_theirs else RotatingKVCache).from_state(state)
        assert (reader.cache.offset, reader.cache.keep, reader.cache.max_size) == (len(ours.text), 0, 8)
    assert type(from_theirs.cache) is SlidingWindowCache
    for width in (1, 1, 3, 1, 9, 1):
        assert from_theirs.feed(width) == from_theirs.expected(width, 8)
        assert [sorted(row) for row in from_ours.feed(width)] == from_ours.expected(width, 8)


def test_a_snapshot_keeps_its_tokens_across_a_move() -> None:
    reader = Reader(SlidingWindowCache(8))
    reader.feed(NUM_SPARE)
    restore, text = kind_of(reader.cache).snapshot(reader.cache), list(reader.text)
    before = reader.cache.keys
    while reader.cache.keys is before:
        reader.feed(1)
    for _ in range(2):
        restore()
        reader.text = list(text)
        assert reader.feed(4) == reader.expected(4, 8)


# --- which windows have it ------------------------------------------------------------------------


class Making(Wrapped):
    """A model with the caches that it is given."""

    def __init__(self, model: nn.Module, caches: list[Any]) -> None:
        super().__init__(model)
        self.caches = caches

    def make_cache(self) -> list[Any]:
        return self.caches


def test_the_windows_of_a_model_are_replaced_and_nothing_else_is() -> None:
    class Mine(RotatingKVCache):
        pass

    caches = [KVCache(), RotatingKVCache(7), RotatingKVCache(7, keep=4), Mine(7), QuantizedKVCache()]
    made = CacheOptions().make_cache(Making(llama(), [*caches, CacheList(KVCache(), RotatingKVCache(9))]))
    assert [type(layer) for layer in made] == [
        KVCache, SlidingWindowCache, RotatingKVCache, Mine, QuantizedKVCache, CacheList
    ]  # fmt: skip
    assert [type(layer) for layer in made[5].caches] == [KVCache, SlidingWindowCache]
    assert (made[1].max_size, made[5].caches[1].max_size) == (7, 9)


# --- real models ----------------------------------------------------------------------------------

# A text much longer than what a window keeps.
LONG = (TEXT * 4)[:400]


def logits_of(model: nn.Module, text: list[int]) -> mx.array:
    """The logits after a text that mlx-lm's caches have read in two passes."""
    cache = make_prompt_cache(model)
    model(mx.array([text[:-1]]), cache=cache)
    logits: mx.array = model(mx.array([text[-1:]]), cache=cache)[0, -1]
    return logits


@sweep("name", ["gemma3_text", "gpt_oss", "gemma3n"])
def test_rounds_far_beyond_a_full_window_are_trimmed_and_leave_nothing_behind(name: str) -> None:
    model = build(name)
    sequence = MLXSequence(model, CacheOptions(), vocab_size=VOCAB_SIZE)
    text = LONG[:330]
    sequence.feed(tuple(text), 0)
    for width, num_right in ((8, 0), (2, 1), (65, 3), (5, 4), (65, 0), (65, 64), (1, 0), (12, 2)):
        proposal = [(token + 1) % VOCAB_SIZE for token in LONG[:width]]
        assert sequence.prepare(width, len(text)) is RewindMode.TRIM
        logits = sequence.feed(tuple(proposal), width)
        assert mx.allclose(logits[-1], logits_of(model, text + proposal), rtol=0, atol=ATOL)
        text += proposal[:num_right]
        assert sequence.rewind(len(text)) == len(text)
    assert sequence._checkpoints == []


def test_prefixes_are_trimmed_within_a_window_and_restored_beyond_it() -> None:
    of = subject("SlidingWindowCache")
    sequence = of.open_sequence("auto")
    sequence.feed(tuple(LONG[:100]), 0)
    sequence.add_prefix_checkpoint()
    assert sequence.needs_prefix_checkpoints
    sequence.feed(tuple(LONG[100:310]), 0)
    for token in LONG[310:]:
        sequence.feed((token,), 0)
    kept = min(layer.num_trimmable for layer in sequence.cache if type(layer) is SlidingWindowCache)
    assert MAX_TRIM <= kept < 300 - WINDOW
    assert sequence.reusable_length(400 - kept, 400) == 400 - kept
    assert sequence.reusable_length(400 - kept - 1, 400) == 100
    assert sequence.reusable_length(99, 400) == 0
    for length in (400 - MAX_TRIM, 100):
        sequence.reuse(length)
        logits = sequence.feed((5,), 1)
        assert mx.allclose(logits[0], logits_of(of.model, [*LONG[:length], 5]), rtol=0, atol=ATOL)


def test_a_text_from_a_file_is_reused_up_to_what_a_drafter_might_change() -> None:
    of = subject("SlidingWindowCache")
    sequence, other = of.open_sequence("auto"), of.open_sequence("auto")
    sequence.feed(tuple(LONG[:100]), 0)
    sequence.add_prefix_checkpoint()
    sequence.feed(tuple(LONG[100:]), 0)
    state = sequence.take_state(tuple(LONG))
    other.put_state(state)
    ahead = 2 * MAX_LOOKAHEAD + 1
    assert [other.reusable_length(n, 400) for n in (400, 400 - ahead, 400 - MAX_TRIM)] == [400, 400 - ahead, 240]
    assert other.reusable_length(400 - MAX_TRIM - 1, 400) == 100
    other.reuse(400 - ahead)
    logits = other.feed((5,), 1)
    assert mx.allclose(logits[0], logits_of(of.model, [*LONG[: 400 - ahead], 5]), rtol=0, atol=ATOL)
    # Only the window of a checkpoint is in a file, since nothing shorter is ever wanted of it.
    (checkpoint,) = state.prefix_checkpoints
    rows = {layer.kind: layer.state[0] for layer in checkpoint.layers}
    assert rows["RotatingKVCache"].shape[2] == WINDOW


# --- as a row -------------------------------------------------------------------------------------


def feed_rows(rows: Any, lengths: list[int], widths: list[int]) -> None:
    """A pass in which the token at position p of a row is the number p + 1."""
    rows.begin(lengths, widths)
    numbers = mx.array([[length + i + 1 for i in range(max(widths))] for length in lengths], mx.float32)
    keys = numbers[:, None, :, None]
    rows.update_and_fetch(keys, -keys)


@sweep("rewound_to", [300, 301, 320])
@sweep("widths", [(20, 80), (20, 1), (20, 20)])
def test_a_window_leaves_a_batch_with_all_that_no_pass_has_overwritten(widths, rewound_to):
    window = SlidingWindowCache(8)
    rows = kind_of(window).row_cache(window)
    readers = [Reader(SlidingWindowCache(8)) for _ in range(2)]
    for reader, length in zip(readers, (300, 3), strict=True):
        reader.feed(length)
        rows.join(reader.cache, length)
        assert reader.cache.empty()
    # The wide pass of the other row writes behind this one's text, too.
    feed_rows(rows, [300, 3], list(widths))
    feed_rows(rows, [rewound_to, 4], [1, 1])
    (reader, _), length = readers, rewound_to + 1
    rows.copy_to(0, length, reader.cache)
    rows.remove(0)
    reader.text = list(range(1, length + 1))
    # At least to before the last pass.
    assert reader.cache.num_trimmable >= 1
    reader.trim(reader.cache.num_trimmable)
    assert reader.feed(3) == reader.expected(3, 8)
    # The row that is left has its own.
    rows.copy_to(0, 5, readers[1].cache)
    readers[1].text = list(range(1, 6))
    assert readers[1].feed(2) == readers[1].expected(2, 8)
