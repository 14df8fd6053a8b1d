"""The corpus of copies, compared with a search through every text; its bound, and who copies from whom."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.copy_corpus import EVERYBODY, CopyCorpus
from protocol.copying import MAX_MATCH

A, B = b"a", b"b"
OWNERS = (EVERYBODY, A, B)
AMPLE = 2**22

texts = st.lists(st.integers(0, 3), max_size=30)
deterministic = settings(deadline=None, derandomize=True, max_examples=80)


def add(corpus: CopyCorpus, tokens: list[int], owner: bytes) -> None:
    for _ in corpus.add(tokens, owner):
        assert corpus.num_bytes <= corpus.max_bytes


def longest(text: list[int], suffix: list[int]) -> int:
    """How long the longest match in a text is, something or nothing following it."""
    lengths = [n for n in range(1, min(MAX_MATCH, len(suffix)) + 1) for e in range(n, len(text) + 1)
               if text[e - n : e] == suffix[-n:]]  # fmt: skip
    return max(lengths, default=0)


@deterministic
@given(st.lists(st.tuples(st.sampled_from(OWNERS), texts), max_size=8), texts.filter(bool), st.sampled_from((A, B)))
def test_what_is_found_follows_a_longest_match_in_ones_own_texts(kept, suffix, owner):
    corpus = CopyCorpus(AMPLE)
    for each, tokens in kept:
        add(corpus, tokens, each)
    own = [tokens for each, tokens in kept if each in (owner, EVERYBODY)]
    found = list(corpus.lookup(owner, suffix, 5, 1))
    most = max((longest(text, suffix) for text in own), default=0)
    if not found:
        # Only where every longest match may be the end of its text, after which nothing follows.
        assert not most or any(text[-most:] == suffix[-most:] for text in own)
        return
    length, tokens = found[0].match_length, [copied.token for copied in found]
    assert length <= most
    wanted = suffix[-length:] + tokens
    assert any(text[i : i + len(wanted)] == wanted for text in own for i in range(len(text)))


def test_what_one_owner_quotes_is_never_found_for_another_and_a_document_for_both():
    corpus = CopyCorpus(AMPLE)
    add(corpus, list(range(50)), A)
    add(corpus, list(range(100, 150)), EVERYBODY)
    assert [each.token for each in corpus.lookup(A, [7, 8], 3, 2)] == [9, 10, 11]
    assert list(corpus.lookup(B, [7, 8], 3, 2)) == []
    for owner in OWNERS:
        assert [each.token for each in corpus.lookup(owner, [107, 108], 2, 2)] == [109, 110]


def test_a_copy_ends_with_its_text():
    corpus = CopyCorpus(AMPLE)
    add(corpus, [1, 2, 3], A)
    add(corpus, [4, 5], A)
    assert [each.token for each in corpus.lookup(A, [1, 2], 9, 2)] == [3]
    assert list(corpus.lookup(A, [4, 5], 9, 2)) == []


def test_the_least_recently_used_goes_first_and_the_bound_holds():
    corpus = CopyCorpus(2**17)
    for number in range(200):
        add(corpus, list(range(300 * number, 300 * number + 300)), A)
        assert list(corpus.lookup(A, [7, 8], 1, 2))  # the first is in use
    assert not list(corpus.lookup(A, [607, 608], 1, 2))
    assert list(corpus.lookup(A, [59907, 59908], 1, 2))
    assert corpus.num_bytes > 2**16


def test_what_is_larger_than_the_bound_leaves_nothing():
    corpus = CopyCorpus(1000)
    add(corpus, list(range(2000)), A)
    assert corpus.num_bytes == 0
    assert list(corpus.lookup(A, [7, 8], 1, 2)) == []
