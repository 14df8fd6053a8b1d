"""Prompt lookup, compared with an evidently right search through the whole text; and its costs, counted."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import ProtocolError
from protocol.prompt_lookup import MAX_NGRAM, MIN_NGRAM, Found, PromptLookup, prior

deterministic = settings(deadline=None, derandomize=True, max_examples=120)


def index_of(text: Iterable[int], **bounds: int) -> PromptLookup:
    index = PromptLookup(**bounds)
    index.append(text)
    return index


def searched(text: Sequence[int], beyond: Sequence[int], most: int, longest: int, shortest: int) -> Found | None:
    """The result of a lookup by definition: the longest match, and of those the last one."""
    whole = [*text, *beyond]
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if most and n <= len(whole) and list(text[end - n : end]) == whole[-n:]:
                after = list(whole)
                for i in range(most):
                    after.append(after[end + i])
                return Found(tuple(after[len(whole) :]), n)
    return None


# --- results --------------------------------------------------------------------------------------


def test_what_came_after_the_last_tokens_before_comes_again():
    assert index_of([1, 2, 3, 4, 5, 1, 2]).lookup(num_tokens=3) == Found((3, 4, 5), match_length=2)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4]])
def test_where_nothing_occurred_before_nothing_is_found(text):
    assert index_of(text).lookup(num_tokens=4) is None


def test_nothing_wanted_is_nothing_found():
    assert index_of([1, 2, 1, 2]).lookup(num_tokens=0) is None


def test_a_longer_match_wins_over_a_later_one():
    assert index_of([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]).lookup(num_tokens=1) == Found((7,), match_length=3)


def test_of_matches_that_are_as_long_the_last_one_wins():
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2]).lookup(num_tokens=1) == Found((8,), match_length=2)


def test_a_match_is_no_longer_than_the_longest_looked_for():
    text = [*range(10), *range(9)]
    assert index_of(text, longest=4).lookup(num_tokens=1) == Found((9,), match_length=4)
    assert index_of(text, longest=9).lookup(num_tokens=1) == Found((9,), match_length=9)


def test_a_match_that_occurred_once_is_as_long_as_it_really_is():
    # Only the shortest part of an n-gram that occurred once is entered; the rest is read from the text.
    assert index_of([0, 1, 2, 3, 9, 4, 1, 2, 3]).lookup(num_tokens=1) == Found((9,), match_length=3)


def test_a_match_is_no_shorter_than_the_shortest_looked_for():
    assert index_of([1, 2, 1], shortest=1).lookup(num_tokens=1) == Found((2,), match_length=1)
    assert index_of([1, 2, 1], shortest=2).lookup(num_tokens=1) is None


def test_a_draft_beyond_the_text_is_looked_up_like_text():
    index = index_of([1, 2, 3, 4, 9, 1], shortest=2)
    assert index.lookup(num_tokens=1) is None
    assert index.lookup([2], num_tokens=2) == Found((3, 4), match_length=2)
    assert index.lookup([2, 3], num_tokens=2) == Found((4, 9), match_length=3)
    assert index.lookup([2, 5], num_tokens=2) is None


def test_a_draft_beyond_the_text_is_not_remembered():
    index = index_of([1, 2, 3, 4])
    assert index.lookup([5, 6, 5, 6], num_tokens=2) is None
    index.lookup([1, 2], num_tokens=4)
    index.append([7, 8])
    assert index.lookup([5], num_tokens=1) is None


def test_what_is_found_leads_through_the_draft_where_it_comes_to_the_texts_end():
    assert index_of([1, 2, 3]).lookup([9, 1, 2], num_tokens=6) == Found((3, 9, 1, 2, 3, 9), match_length=2)


@sweep("period", [1, 2, 7])
@sweep("num_tokens", [9, 16, 40])
def test_a_text_that_repeats_itself_is_continued_beyond_its_end(period, num_tokens):
    text = list(itertools.islice(itertools.cycle(range(10, 10 + period)), num_tokens + period + 30))
    found = index_of(text[:num_tokens]).lookup(num_tokens=period + 30)
    assert found is not None
    assert list(found.tokens) == text[num_tokens:]
    assert found.match_length == min(MAX_NGRAM, num_tokens - period)


@st.composite
def lookups(draw: Callable[..., object]) -> tuple[list[list[int]], list[int], int, int, int]:
    """A text in pieces, a draft, the number of tokens wanted, and bounds; few ids, so that there are many matches."""
    tokens = st.integers(0, draw(st.integers(0, 3)))
    longest = draw(st.integers(1, 9))
    return (
        draw(st.lists(st.lists(tokens, max_size=12), max_size=6)),
        draw(st.lists(tokens, max_size=12)),
        draw(st.integers(0, 30)),
        longest,
        draw(st.integers(1, longest)),
    )


@given(lookups())
@deterministic
def test_what_is_found_is_what_a_search_through_the_whole_text_finds(drawn):
    pieces, beyond, most, longest, shortest = drawn
    index = PromptLookup(longest=longest, shortest=shortest)
    text: list[int] = []
    for piece in [[], *pieces]:
        index.append(piece)
        text += piece
        assert len(index) == len(text)
        for draft in ([], beyond):
            assert index.lookup(draft, num_tokens=most) == searched(text, draft, most, longest, shortest)


@given(st.lists(st.lists(st.integers(0, 9), min_size=20, max_size=20), min_size=1, max_size=2), st.data())
@deterministic
def test_long_quotations_are_found_as_a_search_finds_them(sources, data):
    # Chance makes short matches only; quotations make long ones.
    text: list[int] = []
    for _ in range(8):
        source = data.draw(st.sampled_from(sources))
        begin = data.draw(st.integers(0, 19))
        text += source[begin : begin + data.draw(st.integers(1, 20))]
    assert index_of(text).lookup(num_tokens=25) == searched(text, [], 25, MAX_NGRAM, MIN_NGRAM)


def test_a_text_may_be_appended_in_any_pieces():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    whole = index_of(text)
    for size in (1, 2, 5):
        index = PromptLookup()
        for begin in range(0, len(text), size):
            index.append(iter(text[begin : begin + size]))
        assert len(index) == len(text)
        assert index.lookup(num_tokens=5) == whole.lookup(num_tokens=5)


@sweep(("longest", "shortest"), [(0, 0), (3, 0), (2, 3), (-1, -2)])
def test_bounds_that_exclude_everything_are_an_error(longest, shortest):
    with pytest.raises(ProtocolError, match="1 <= shortest <= longest"):
        PromptLookup(longest=longest, shortest=shortest)


# --- how sure it is -------------------------------------------------------------------------------


def test_a_longer_match_is_surer_and_none_is_certain():
    priors = [prior(length) for length in range(1, MAX_NGRAM + 1)]
    assert priors == sorted(priors)
    assert len(set(priors)) == MAX_NGRAM
    assert 0 < priors[0] < priors[-1] < 1
    assert prior(MAX_NGRAM + 1) == prior(1000) == priors[-1]


def test_every_token_found_is_as_sure_as_the_match_would_be_were_those_before_it_right():
    found = index_of([1, 2, 3, 4, 5, 6, 1, 2]).lookup(num_tokens=4)
    assert found == Found((3, 4, 5, 6), match_length=2)
    assert found.confidences == (prior(2), prior(3), prior(4), prior(5))
    for i, token in enumerate(found.tokens):
        again = index_of([1, 2, 3, 4, 5, 6, 1, 2]).lookup(found.tokens[:i], num_tokens=1)
        assert again == Found((token,), match_length=2 + i)
        assert again.confidences == found.confidences[i : i + 1]


# --- costs ----------------------------------------------------------------------------------------


class Counted(int):
    """An id that counts how often ids are hashed or compared."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def looks(call: Callable[[], object]) -> int:
    before = Counted.looks
    call()
    return Counted.looks - before


def texts(length: int) -> dict[str, list[int]]:
    dice = random.Random(1)
    some = [dice.randrange(50_000) for _ in range(length)]
    return {
        "all different": list(range(length)),
        "one token": [5] * length,
        "a period of seven": [i % 7 for i in range(length)],
        "two tokens at random": [dice.randrange(2) for _ in range(length)],
        "said twice": some[: length // 2] * 2,
        "ever more of the same": [i for end in range(length) for i in range(end)][:length],
    }


def test_a_reference_is_searched_and_is_not_of_the_text():
    index = PromptLookup()
    index.append_reference([1, 2, 3])
    index.append_reference([4, 5])
    index.append([8, 9, 3])
    assert (len(index), index.num_reference) == (3, 5)
    found = index.lookup(num_tokens=2)
    assert found is not None
    assert (found.tokens, found.match_length) == ((4, 5), 1)
    with pytest.raises(ProtocolError, match="comes before the text, which has 3 tokens already"):
        index.append_reference([6])


@sweep("kind", texts(0))
def test_a_token_costs_as_much_in_a_long_text_as_in_a_short_one(kind):
    text = [Counted(token) for token in texts(3000)[kind]]
    index = PromptLookup()
    # To hash an n-gram looks at n tokens, and to find it compares as many; entering one takes a few of both.
    most_looks = 10 * sum(range(MAX_NGRAM + 1))
    for begin in range(0, len(text), 500):
        assert looks(lambda begin=begin: index.append(text[begin : begin + 500])) <= 500 * most_looks
        assert looks(lambda: index.lookup(num_tokens=64)) <= most_looks
        assert looks(lambda begin=begin: index.lookup(text[begin : begin + 64], num_tokens=64)) <= most_looks


@sweep("kind", texts(0))
def test_a_token_takes_a_bounded_amount_of_memory(kind):
    text = texts(3000)[kind]
    tracemalloc.start()
    try:
        index = index_of(text)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == len(text)
    # An entry is a tuple, a slot of the dictionary and a number.
    assert num_bytes <= 300 * (2 if kind == "all different" else MAX_NGRAM) * len(text)


def test_a_lookup_makes_no_copy_of_the_text():
    index = index_of(texts(3000)["a period of seven"])
    tracemalloc.start()
    try:
        index.lookup(num_tokens=4)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3000
