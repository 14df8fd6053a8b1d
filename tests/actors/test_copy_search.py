"""The search for copies, compared with an evidently right one, token by token."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from actors.drafters.copy_search import MAX_OCCURRENCES, CopySearch
from protocol.copying import MAX_MATCH, Copied

deterministic = settings(max_examples=80)


def search_in(text: Iterable[int]) -> CopySearch:
    search = CopySearch()
    search.append(list(text))
    return search


def tokens_of(found: Iterable[Copied]) -> list[int]:
    return [copied.token for copied in found]


def searched(text: Sequence[int], num_tokens: int, shortest: int) -> list[Copied]:
    """The result of a lookup by definition: what followed the newest matches of the longest length, most often."""

    def match_length(end: int) -> int:
        pairs = zip(text[end - 1 :: -1], text[: -MAX_MATCH - 1 : -1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    lengths = {end: match_length(end) for end in range(len(text) - 1, 0, -1)}
    longest = max(lengths.values(), default=0)
    ends = [end for end, length in lengths.items() if longest and length == longest][:MAX_OCCURRENCES]
    found: list[Copied] = []
    while ends and longest >= shortest and len(found) < num_tokens:
        after = [*text, *tokens_of(found)]
        following = [after[end + len(found)] for end in ends]
        token, count = Counter(following).most_common(1)[0]
        ends = [end for end, each in zip(ends, following, strict=True) if each == token]
        found.append(Copied(token, longest + len(found), count, len(following)))
    return found


# --- results --------------------------------------------------------------------------------------


@st.composite
def lookups(draw: Callable[..., object]) -> tuple[list[list[int]], int, int]:
    """A text in pieces, the number of tokens wanted, and the shortest match."""
    tokens = st.integers(0, draw(st.integers(0, 3)))  # few ids, so that there are many matches
    pieces = st.lists(st.lists(tokens, max_size=12), max_size=6)
    return draw(pieces), draw(st.integers(0, 30)), draw(st.integers(1, 5))


@given(lookups())
@deterministic
def test_what_is_found_is_what_a_search_through_the_whole_text_finds(drawn):
    pieces, num_tokens, shortest = drawn
    search, text = CopySearch(), list[int]()
    for piece in [[], *pieces]:
        search.append(piece)
        text += piece
        assert len(search) == len(text)
        assert list(search.lookup(num_tokens, shortest=shortest)) == searched(text, num_tokens, shortest)


@given(st.lists(st.lists(st.integers(0, 9), min_size=20, max_size=20), min_size=1, max_size=2), st.data())
@deterministic
def test_long_quotations_are_found_as_a_search_finds_them(sources, data):
    # Chance makes short matches only; quotations make long ones.
    text: list[int] = []
    for _ in range(8):
        source = data.draw(st.sampled_from(sources))
        begin = data.draw(st.integers(0, 19))
        text += source[begin : begin + data.draw(st.integers(1, 20))]
    assert list(search_in(text).lookup(25)) == searched(text, 25, 1)


# --- how sure it is -------------------------------------------------------------------------------


def test_a_longer_match_is_surer_and_none_is_certain():
    confidences = [Copied(5, length).confidence for length in range(1, MAX_MATCH + 1)]
    assert confidences == sorted(confidences)
    assert 0 < confidences[0] < confidences[-1] < 1
    assert Copied(5, 1000).confidence == confidences[-1]


@sweep("length", [1, 3, 16, 80])
def test_occurrences_that_agree_make_it_surer_and_those_that_do_not_less_sure(length):
    agreeing = [Copied(5, length, num, num).confidence for num in range(1, MAX_OCCURRENCES + 1)]
    assert agreeing == sorted(set(agreeing))
    assert agreeing[-1] < 1
    disagreeing = [Copied(5, length, num, 8).confidence for num in range(1, 8)]
    assert disagreeing == sorted(set(disagreeing))
    assert 0 < disagreeing[-1] < agreeing[-1]
    assert len({Copied(5, length, *of).kind for of in ((1, 1), (3, 3), (1, 3))}) == 3
